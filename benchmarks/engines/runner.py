"""The process of one engine: loads a model, then runs a round of a workload for each line that it reads. Only the standard
library: it runs in the environments of all engines.

Input: one line with a round's number. Output: one JSON object per line: an empty one after the first token, one with facts
about the engine after the warm-up, then one with the figures of each round. What the engine itself prints goes to stderr.
The end of the input ends the process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import models, workloads
from benchmarks.environment import version_of
from benchmarks.workloads import Request, Workload

WARM_UP_REQUESTS = 64
WARM_UP_TOKENS = 8
PR_SET_PDEATHSIG = 1
"""See prctl(2)."""
SHORT_RUNS = 3
"""Runs of one token for a time per decode step. The fastest counts."""

Figures = dict[str, Any]


class Engine(ABC):
    """A loaded engine."""

    packages: Sequence[str] = ()
    """Distributions whose versions belong to the results."""
    runs_here = True
    """Whether this process is part of the engine, and not only a client of it, whose memory does not count."""
    is_complete = True
    """Whether a round ends when all tokens are there, and not at a time limit."""

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> list[int]:
        """Generate greedily for all requests. Return the number of tokens of each."""

    def facts(self) -> Figures:
        """Return figures that do not belong to a round."""
        return {"versions": {package: version_of(package) for package in self.packages}}

    def counts(self) -> dict[str, float]:
        """Return counters that only grow. Their differences belong to a round's figures."""
        return {}


def run(load: Callable[..., Engine]) -> None:
    """Serve rounds until the input ends. `load` gets the model's directory, a workload and the engine's options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # an engine that is left behind keeps its memory
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    make = partial(workloads.make, options.workload, is_quick=options.quick)
    warm_up = make("warm-up")
    engine = load(models.path_of(warm_up.model), warm_up, **options.options)
    engine.generate(warm_up.head(1, 1).requests)
    print("{}", file=replies)
    engine.generate(warm_up.head(WARM_UP_REQUESTS, WARM_UP_TOKENS).requests)
    print(json.dumps(engine.facts()), file=replies)
    measure = _measure_steps if workloads.is_step(options.workload) else _measure_round
    for line in sys.stdin:
        print(json.dumps(measure(engine, make, int(line)) | memory(counts_this_process=engine.runs_here)), file=replies)
    sys.stderr.flush()
    os._exit(0)  # some engines crash or hang when they are taken down


def _measure_round(engine: Engine, make: Callable[..., Workload], number: int) -> Figures:
    workload, before = make(number), engine.counts()
    seconds, num_tokens = _timed(engine, workload)
    counts = {name: count - before[name] for name, count in engine.counts().items()}
    if "device_s" in counts:
        counts["device_idle_share"] = 1 - counts.pop("device_s") / seconds
    return {"seconds": seconds, "tokens_per_s": num_tokens / seconds, **counts}


def _measure_steps(engine: Engine, make: Callable[..., Workload], number: int) -> Figures:
    """Time prompts with one token each, and with many. The difference is the time of the decode steps."""
    short_s = min(_timed(engine, make(f"{number}/{run}").head(None, 1))[0] for run in range(SHORT_RUNS))
    long = make(number)
    long_s, _ = _timed(engine, long)
    return {"seconds": long_s, "ms_per_step": 1e3 * (long_s - short_s) / (long.requests[0].num_output - 1)}


def _timed(engine: Engine, workload: Workload) -> tuple[float, int]:
    """Return the seconds of a workload, and how many tokens it has generated."""
    began_s = time.perf_counter()
    counts = engine.generate(workload.requests)
    seconds = time.perf_counter() - began_s
    if engine.is_complete and counts != [request.num_output for request in workload.requests]:
        raise SystemExit(f"wrong numbers of tokens for {workload.name}: {counts[:5]} ... of {len(counts)} outputs")
    return seconds, sum(counts)


def memory(*, counts_this_process: bool) -> dict[str, int]:
    """Return the sum of the largest resident sizes so far, of the processes below this one, and perhaps of this one too."""
    parents: dict[int, int] = {}
    peaks_kib: dict[int, int] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            lines = (directory / "status").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        parents[int(directory.name)] = int(fields["PPid"])
        peaks_kib[int(directory.name)] = int(fields.get("VmHWM", "0 kB").split()[0])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    if not counts_this_process:
        ours.remove(os.getpid())
    return {"peak_memory_mib": sum(peaks_kib.get(pid, 0) for pid in ours) // 1024}
