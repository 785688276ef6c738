"""Runs engines against each other: each in a process of its own, one round of each in turns, on the same machine.

The engine of a round computes; the others wait for their next round and take no CPU time. So slow changes of the machine
affect all engines alike, and ratios are taken within a round.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks import models, workloads
from benchmarks.environment import ROOT
from benchmarks.interval import median_interval

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


class Contender(Protocol):
    """Something that runs rounds of one workload."""

    def run_round(self, number: int) -> Figures:
        """Run one round. Raises `EngineError`."""

    def summary(self) -> Figures:
        """Return the figures that do not belong to a round."""

    def close(self) -> None: ...


class EngineProcess:
    """Owns the process of one engine for one workload. Its log is in `models.HOME`."""

    def __init__(self, kind: EngineKind, workload: str, *, is_quick: bool = False) -> None:
        """Start the engine and wait for its first token. Raises `EngineError`."""
        self._log = models.HOME / "logs" / f"{kind.name}.{workload}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(kind.python), "-P", "-m", f"benchmarks.engines.{kind.module}"]
        command += ["--workload", workload, "--options", json.dumps(kind.options), *(["--quick"] if is_quick else [])]
        began_s = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(ROOT), **kind.variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        try:
            self._versions = self._receive(START_LIMIT_S)["versions"]
        except BaseException:
            self.close()
            raise
        self._first_token_s = time.monotonic() - began_s

    def run_round(self, number: int) -> Figures:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no reply either
            self._process.stdin.write(f"{number}\n".encode())
            self._process.stdin.flush()
        return self._receive(ROUND_LIMIT_S)

    def summary(self) -> Figures:
        return {"start_to_first_token_s": round(self._first_token_s, 2), "versions": self._versions}

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self, limit_s: float) -> Figures:
        assert self._process.stdout is not None
        is_ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        line = self._process.stdout.readline() if is_ready else b""
        if not line:
            reason = "has ended" if is_ready else f"did not answer within {limit_s:g} s"
            raise EngineError(f"the engine {reason}; its log is {self._log}")
        figures: Figures = json.loads(line)
        return figures


def run_in_turns(
    starts: Mapping[str, Callable[[], Contender]], baseline: str, num_rounds: int, limit_s: float
) -> dict[str, Figures]:
    """Run `num_rounds` rounds of each contender in turns. Return the figures by contender.

    No round begins when it would probably end after `limit_s`, counted from the call; each contender gets one round. A
    contender that fails has "failed" among its figures. `over_<baseline>` is the median of the ratios of the rounds: above
    1, the contender is faster.
    """
    began_s = time.monotonic()
    results: dict[str, Figures] = {}
    rounds: dict[str, list[Figures]] = {name: [] for name in starts}
    with contextlib.ExitStack() as opened:
        contenders: dict[str, Contender] = {}
        for name, start in starts.items():
            with _noted_failure(results, name):
                contenders[name] = start()
                opened.callback(contenders[name].close)
        longest_s = 0.0
        for number in range(num_rounds):
            round_began_s = time.monotonic()
            if number and round_began_s + longest_s > began_s + limit_s:
                break
            for name in list(contenders)[:: -1 if number % 2 else 1]:
                with _noted_failure(results, name):
                    rounds[name].append(contenders[name].run_round(number))
                if name in results:
                    del contenders[name]
            longest_s = max(longest_s, time.monotonic() - round_began_s)
        for name, contender in contenders.items():
            results[name] = {**_medians(rounds[name]), **contender.summary()}
            if name != baseline and baseline in contenders:
                results[name] |= _ratio(rounds[name], rounds[baseline], baseline)
    return {name: results[name] for name in starts}


@contextlib.contextmanager
def _noted_failure(results: dict[str, Figures], name: str) -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        results[name] = {"failed": str(error)}


def _medians(rounds: list[Figures]) -> Figures:
    medians: Figures = {"num_rounds": len(rounds)}
    for name in rounds[0]:
        values = [one[name] for one in rounds]
        medians[name] = max(values) if name == "peak_memory_mib" else round(statistics.median(values), 3)
        if name in ("tokens_per_s", "ms_per_step"):
            medians[f"{name}_of_each_round"] = [round(value, 3) for value in values]
        if name == "peak_memory_mib":
            medians["peak_memory_mib_of_round_1"] = values[0]
    return medians


def _ratio(rounds: list[Figures], baselines: list[Figures], baseline: str) -> Figures:
    name = "ms_per_step" if "ms_per_step" in rounds[0] else "seconds"
    ratios = [theirs[name] / ours[name] for ours, theirs in zip(rounds, baselines, strict=True)]
    low, high = median_interval(ratios)
    key = f"over_{baseline}"
    return {key: round(statistics.median(ratios), 4), f"{key}_interval": [round(low, 4), round(high, 4)]}


def rounds_of(names: Sequence[str], limit_s: float) -> Iterator[tuple[str, float]]:
    """Yield each workload with its share of the time that is left."""
    end_s = time.monotonic() + limit_s
    for index, name in enumerate(names):
        print(f"{name} ...", file=sys.stderr, flush=True)
        yield name, max(0.0, end_s - time.monotonic()) / (len(names) - index)


def prepare_model(workload: str, *, is_quick: bool) -> None:
    """Make the model of a workload if it is missing."""
    models.find(workloads.make(workload, is_quick=is_quick).model)
