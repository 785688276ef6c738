"""Start the real engine service with faults that no signal and no proxy can cause.

    python -P -m tests.chaos.launch '{"clock_offset_s": 3600}' --model ... --redis ...

Once it has drained, it prints how many KV blocks are free and how many of its writes were refused.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from millrace.engine_service import build, process, serve
from millrace.engine_service.engine import Engine, Progress
from millrace.engine_service.generation import Generation
from millrace.engine_service.serving import intake
from millrace.engine_service.serving.admission import Admission
from millrace.engine_service.serving.leases import Leases
from millrace.executor import base
from millrace.executor.limits import Limits
from tests.chaos.faulty_worker import VARIABLE, WorkerFaults


class Faults(WorkerFaults, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The faults of one engine and of its workers."""

    clock_offset_s: float = 0.0
    """The error of its wall clock."""
    fatal: list[int] = msgspec.field(default_factory=list)
    """The service itself dies of a sequence that begins with these tokens."""
    dies_after_steps: int = 0
    """The service dies after this number of steps with work in them; 0: it does not."""
    fails_to_admit: int = 0
    """The first N admissions fail with an unexpected exception."""
    protocol: int = 0
    """The version of the queue's protocol that it uses; 0: the real one."""
    stuck_s: float = 0.0
    """A limit for a step; 0: the default one."""
    serves_when: str = ""
    """A path: start, but do not use the queue before this file exists. "": serve at once."""


def main(faults: Faults, arguments: list[str]) -> int:
    _shift_clock(faults.clock_offset_s)
    if faults.protocol:
        _patch(intake, "PROTOCOL", faults.protocol)
    if faults.poison or faults.hangs_at_step or faults.step_s:
        _break_workers(faults)
    if faults.stuck_s:
        _patch(base, "Limits", lambda: Limits(stuck_s=faults.stuck_s))
    if faults.fatal:
        _die_of(faults.fatal)
    if faults.fails_to_admit:
        _fail_to_admit(faults.fails_to_admit)
    if faults.dies_after_steps:
        _die_after(faults.dies_after_steps)
    if faults.serves_when:
        _wait_before_serving(Path(faults.serves_when))
    engines, writers = _remember("Engine"), _remember("Writer")
    status = serve.main(arguments)
    if status != 0:
        return status
    for writer in writers:
        print(f"leases refused: {len(writer._stale_leases)}", flush=True)
    for engine in engines:
        pool, num_usable = engine.scheduler.pool, engine.scheduler.pool.num_blocks - 1
        print(f"KV blocks: {pool.num_free} of {num_usable} free", flush=True)
        print(f"tokens sampled: {engine.metrics().executor.num_tokens}", flush=True)
    return status


def _shift_clock(offset_s: float) -> None:
    true_time = time.time
    time.time = lambda: true_time() + offset_s


def _break_workers(faults: Faults) -> None:
    os.environ[VARIABLE] = msgspec.json.encode(faults).decode()
    make = getattr(build, "make_executor")  # noqa: B009
    _patch(build, "make_executor", lambda *args, **kw: make(*args, worker_module="tests.chaos.faulty_worker", **kw))


def _die_of(prompt: list[int]) -> None:
    add = Engine.add

    def add_or_die(self: Engine, generation: Generation) -> None:
        if generation.sequence.prompt_token_ids[: len(prompt)] == prompt:
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, generation)

    _patch(Engine, "add", add_or_die)


def _fail_to_admit(num_times: int) -> None:
    admit, numbers = Admission.admit, itertools.count(1)

    def admit_or_fail(self: Admission, *args: Any, **kw: Any) -> list[Generation]:
        if next(numbers) <= num_times:
            raise ZeroDivisionError("a bug of ours")
        return admit(self, *args, **kw)

    _patch(Admission, "admit", admit_or_fail)


def _die_after(num_steps: int) -> None:
    step, numbers = Engine.step, itertools.count(1)

    def step_or_die(self: Engine) -> list[Progress]:
        progress = step(self)
        if progress and next(numbers) > num_steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return progress

    _patch(Engine, "step", step_or_die)


def _wait_before_serving(mark: Path) -> None:
    start = Leases.start

    def start_when_marked(self: Leases) -> None:
        while not mark.exists():
            time.sleep(0.01)
        start(self)

    _patch(Leases, "start", start_when_marked)


def _remember(maker: str) -> list[Any]:
    """Return a list that gets what the service creates with this function or class."""
    made: list[Any] = []
    make = getattr(process, maker)

    def make_and_remember(*args: Any, **kw: Any) -> Any:
        made.append(make(*args, **kw))
        return made[-1]

    _patch(process, maker, make_and_remember)
    return made


def _patch(owner: object, name: str, value: object) -> None:
    assert hasattr(owner, name), f"the product has no {name} any more; this launcher has to follow it"
    setattr(owner, name, value)


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Faults), sys.argv[2:]))
