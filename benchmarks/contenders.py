"""Runs engines against each other: each in a process of its own, one round of each in turns, on the same machine.

The engine of a round computes; the others wait for their next round and take no CPU time. So slow changes of the machine
affect all engines alike, and ratios are taken within a round.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import models, workloads
from benchmarks.environment import ROOT, python_path
from benchmarks.options import Options
from benchmarks.timing import median_interval

START_LIMIT_S = 420.0
"""Time for an engine to load and to generate its first token."""
ROUND_LIMIT_S = 420.0

Figures = dict[str, Any]


class EngineError(Exception):
    """An engine has ended, or did not answer in time."""


@dataclass(frozen=True)
class EngineKind:
    """How to run an engine."""

    name: str
    module: str
    """In `benchmarks.engines`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: str | None = None
    """The folder of its virtual environment; None for the one of this process."""
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return Path(sys.executable) if self.environment is None else models.HOME / self.environment / "bin" / "python"


class EngineProcess:
    """Owns the process of one engine for one workload. Its log is in `models.HOME`."""

    def __init__(self, kind: EngineKind, workload: str, *, is_quick: bool, end_s: float) -> None:
        """Start the engine and wait until it has warmed up, at most until `end_s`. Raises `EngineError`."""
        if time.monotonic() >= end_s:
            raise EngineError("no time is left to start it")
        self._end_s = end_s
        self._log = models.HOME / "logs" / f"{kind.name}.{workload}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(kind.python), "-P", "-m", f"benchmarks.engines.{kind.module}"]
        command += ["--workload", workload, "--options", json.dumps(kind.options), *(["--quick"] if is_quick else [])]
        path = python_path() if kind.environment is None else str(ROOT)
        began_s = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path, **kind.variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,  # `select` does not see what lies in a buffer
                start_new_session=True,
            )
        try:
            self._receive(min(START_LIMIT_S, end_s - time.monotonic()))
            first_token_s = time.monotonic() - began_s
            # Wait for the warm-up too: beside another engine's round it would slow that engine.
            facts = self._receive(min(ROUND_LIMIT_S, end_s - time.monotonic()))
            self.summary: Figures = {"start_to_first_token_s": round(first_token_s, 2), **facts}
        except BaseException:
            self.close()
            raise

    def run_round(self, number: int) -> Figures:
        """Run one round, the first one at most until `end_s`. Raises `EngineError`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no reply either
            self._process.stdin.write(f"{number}\n".encode())
        return self._receive(ROUND_LIMIT_S if number else min(ROUND_LIMIT_S, self._end_s - time.monotonic()))

    def close(self) -> None:
        """End the process, and those that it started."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]

    def _receive(self, limit_s: float) -> Figures:
        assert self._process.stdout is not None
        is_ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, limit_s))
        line = self._process.stdout.readline() if is_ready else b""
        if not line:
            reason = "has ended" if is_ready else f"did not answer within {limit_s:.0f} s"
            raise EngineError(f"the engine {reason}; its log is {self._log}")
        figures: Figures = json.loads(line)
        return figures


@dataclass
class Run:
    """What an engine has done of a workload."""

    rounds: list[Figures] = field(default_factory=list)
    summary: Figures = field(default_factory=dict)
    """Figures that do not belong to a round."""
    failure: str = ""

    def figures(self, baseline: Run | None, name: str) -> Figures:
        """Return medians, and ratios to the baseline with this name: above 1, this engine is faster."""
        if self.failure:
            return {"failed": self.failure}
        return _medians(self.rounds) | self.summary | (_ratio(self.rounds, baseline.rounds, name) if baseline else {})


def run_workloads(
    options: Options, default: Sequence[str], groups_of: Callable[[str], Sequence[Sequence[EngineKind]]]
) -> dict[str, dict[str, Figures]]:
    """Run the chosen workloads on the engines of each group, one group after the other. Return the figures by workload
    and engine. Each group begins with the same engine, the baseline, whose figures are those of all its rounds.

    Each group gets an equal share of the time that is left, and at least one round of each engine. But an engine that is
    not through its first round at the end of `options.limit_s` has failed.
    """
    end_s = time.monotonic() + options.limit_s
    plan = [(name, group) for name in options.workloads or default for group in groups_of(name)]
    joined: dict[str, Run] = {}
    figures: dict[str, dict[str, Figures]] = {}
    for index, (name, group) in enumerate(plan):
        print(f"{name}: {', '.join(kind.name for kind in group)}", file=sys.stderr, flush=True)
        models.find(workloads.make(name, is_quick=options.is_quick).model)
        share_s = (end_s - time.monotonic()) / (len(plan) - index)
        runs = run_in_turns(name, group, options, time.monotonic() + share_s, end_s)
        baseline = group[0].name
        ours, known = runs.pop(baseline), joined.get(name, Run())
        joined[name] = Run(known.rounds + ours.rounds, known.summary or ours.summary)
        joined[name].failure = "" if joined[name].rounds else ours.failure
        of_workload = figures.setdefault(name, {})
        of_workload[baseline] = joined[name].figures(None, baseline)
        of_workload |= {one: run.figures(None if ours.failure else ours, baseline) for one, run in runs.items()}
    return figures


def run_in_turns(
    workload: str, kinds: Sequence[EngineKind], options: Options, soft_end_s: float, end_s: float
) -> dict[str, Run]:
    """Run the rounds of each engine in turns. No round but the first begins when it would probably end after
    `soft_end_s`."""
    runs = {kind.name: Run() for kind in kinds}
    with contextlib.ExitStack() as opened:
        engines: dict[str, EngineProcess] = {}
        for kind in kinds:
            with _noted_failure(kind.name, runs):
                engines[kind.name] = EngineProcess(kind, workload, is_quick=options.is_quick, end_s=end_s)
                opened.callback(engines[kind.name].close)
                runs[kind.name].summary = engines[kind.name].summary
        longest_s = 0.0
        for number in range(options.num_rounds):
            began_s = time.monotonic()
            if number and began_s + longest_s > soft_end_s:
                break
            for name in list(engines)[:: -1 if number % 2 else 1]:
                with _noted_failure(name, runs):
                    runs[name].rounds.append(engines[name].run_round(number))
                if runs[name].failure:
                    del engines[name]
            longest_s = max(longest_s, time.monotonic() - began_s)
    return runs


@contextlib.contextmanager
def _noted_failure(name: str, runs: Mapping[str, Run]) -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        runs[name].failure = str(error)


def _medians(rounds: list[Figures]) -> Figures:
    medians: Figures = {"num_rounds": len(rounds)}
    for name in rounds[0]:
        values = [one[name] for one in rounds]
        medians[name] = max(values) if name == "peak_memory_mib" else round(statistics.median(values), 3)
        if name in ("tokens_per_s", "ms_per_step"):
            medians[f"{name}_of_each_round"] = [round(value, 3) for value in values]
    return medians | {"peak_memory_mib_of_round_1": rounds[0]["peak_memory_mib"]}


def _ratio(rounds: list[Figures], baselines: list[Figures], baseline: str) -> Figures:
    name = "ms_per_step" if "ms_per_step" in rounds[0] else "seconds"
    ratios = [theirs[name] / ours[name] for ours, theirs in zip(rounds, baselines, strict=True)]
    low, high = median_interval(ratios)
    key = f"over_{baseline}"
    return {key: round(statistics.median(ratios), 4), f"{key}_interval": [round(low, 4), round(high, 4)]}
