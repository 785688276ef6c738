"""The process of one engine: loads a model, then runs a round of a workload for each line that it reads. Only the standard
library: it runs in the environments of all engines.

Input: one line with a round's number. Output: one JSON object per line. The first one says that the engine has generated a
token, and each further one has the figures of a round. What the engine itself prints goes to stderr. The end of the input
ends the process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import models, workloads
from benchmarks.environment import version_of
from benchmarks.workloads import STEP_TOKENS, Workload

WARM_UP_REQUESTS = 64
WARM_UP_TOKENS = 8


class Engine(ABC):
    """A loaded engine."""

    packages: Sequence[str]
    """Distributions whose versions belong to the results."""

    @abstractmethod
    def generate(self, workload: Workload) -> list[int]:
        """Generate for all requests. Return the number of tokens of each."""

    def counts(self) -> dict[str, int]:
        """Return counters that only grow. Their differences belong to a round's figures."""
        return {}


def run(load: Callable[..., Engine]) -> None:
    """Serve rounds until the input ends. `load` gets the model's directory, the workload and the engine's options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, is_quick = options.workload, options.quick
    warm_up = workloads.make(name, "warm-up", is_quick=is_quick)
    engine = load(models.path_of(warm_up.model), warm_up, **options.options)
    engine.generate(warm_up.head(1, 1))
    _reply(replies, {"versions": {package: version_of(package) for package in engine.packages}})
    engine.generate(warm_up.head(WARM_UP_REQUESTS, WARM_UP_TOKENS))
    for line in sys.stdin:
        figures = _run_steps(engine, name, int(line), is_quick) if workloads.is_step(name) else None
        _reply(replies, figures or _run_round(engine, workloads.make(name, int(line), is_quick=is_quick)))
    sys.stderr.flush()
    os._exit(0)  # some engines crash or hang when they are taken down


def _reply(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _run_round(engine: Engine, workload: Workload) -> dict[str, Any]:
    before = engine.counts()
    seconds = _timed(engine, workload)
    counts = {name: count - before[name] for name, count in engine.counts().items()}
    return {"seconds": seconds, "tokens_per_s": workload.num_output_tokens / seconds, **counts, **_memory()}


def _run_steps(engine: Engine, name: str, number: int, is_quick: bool) -> dict[str, Any]:
    short, long = (tokens // (workloads.QUICK_DIVISOR if is_quick else 1) for tokens in STEP_TOKENS)
    short_s, long_s = (
        _timed(engine, workloads.make(name, f"{number}/{count}", is_quick=is_quick, num_output=count))
        for count in (short, long)
    )
    return {"seconds": short_s + long_s, "ms_per_step": 1e3 * (long_s - short_s) / (long - short), **_memory()}


def _timed(engine: Engine, workload: Workload) -> float:
    began_s = time.perf_counter()
    counts = engine.generate(workload)
    seconds = time.perf_counter() - began_s
    if counts != [request.num_output for request in workload.requests]:
        raise SystemExit(f"wrong numbers of tokens for {workload.name}: {counts[:5]} ... of {len(counts)} outputs")
    return seconds


def _memory() -> dict[str, int]:
    """Return the sum of the largest resident sizes so far, of this process and the processes below it."""
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
    return {"peak_memory_mib": sum(peaks_kib.get(pid, 0) for pid in ours) // 1024}
