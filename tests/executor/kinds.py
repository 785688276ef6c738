"""The executors that the contract is tested on, each with the stub worker, and what tests of executors share."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from millrace.executor.base import Executor, Future
from millrace.executor.launch.external import RENDEZVOUS_DIR, ExternalLauncherExecutor
from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.executor.launch.process import python_path
from millrace.executor.launch.ray import RayExecutor
from millrace.executor.launch.ray_cluster import LocalRay
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.limits import Limits
from millrace.executor.remote import RemoteExecutor
from millrace.executor.wire.channel import socket_address
from millrace.executor.wire.messages import (
    Call,
    ModelFacts,
    NewSequence,
    SeqId,
    StepId,
    StepPlan,
    StepRow,
    WorkerConfig,
)
from tests.engine_service.core.sequences import GREEDY
from tests.processes import LIMIT_S

STUB = "tests.executor.faulty_stub"

Make = Callable[..., Executor]
"""Makes an executor from the faults of the stub. Keywords: options of `WorkerConfig`, and `limits`."""

SHORT = Limits(
    stuck_s=1.5,
    first_step_s=1.5,
    longest_step_s=1.5,
    heartbeat_s=2.5,
    busy_heartbeat_s=2.5,
    shutdown_s=0.5,
    call_s=20.0,
    sleep_call_s=6.0,
)


def stub_config(faults: str = "", **options: object) -> WorkerConfig:
    return WorkerConfig(model=faults, num_blocks=32, block_size=4, **options)  # type: ignore[arg-type]


def make_mp(config: WorkerConfig, **options: object) -> Executor:
    return MultiprocExecutor(config, worker_module=STUB, **options)


class Launched(ExternalLauncherExecutor):
    """An external executor that is its own launcher: it starts the ranks as torchrun does, and waits for their ends."""

    processes: list[subprocess.Popen[bytes]]

    def _start_workers(self) -> list[ModelFacts]:
        if self._num_starts == 1:
            directory = tempfile.mkdtemp(prefix="millrace-", dir="/tmp")
            os.environ[RENDEZVOUS_DIR] = directory
            self.processes: list[subprocess.Popen[bytes]] = [
                self._launch_one(rank, directory) for rank in range(self.world_size)
            ]
        try:
            return super()._start_workers()
        finally:
            os.environ.pop(RENDEZVOUS_DIR, None)

    def _launch_one(self, rank: int, directory: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", self._worker_module, "--address", socket_address(directory)]
        command += ["--identity", f"{rank}.1", "--parent-pid", str(os.getpid())]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": python_path()})
        Path(directory, f"rank-{rank}").write_text(str(process.pid))
        return process

    def shutdown(self) -> None:
        super().shutdown()
        for process in getattr(self, "processes", []):
            process.kill()  # as torchrun does with ranks that are left when the group ends
            process.wait(30)


class SharedRay:
    """One local Ray for all tests of a run, which this process has joined."""

    _local: LocalRay | None = None

    @classmethod
    def start(cls) -> None:
        if cls._local is None:
            os.environ.setdefault("RAY_kill_worker_timeout_milliseconds", "500")  # else 5 s for each stuck process
            cls._local = LocalRay(num_cpus=4)
            cls._local.start()

    @classmethod
    def stop(cls) -> None:
        if cls._local is not None:
            cls._local.stop()
            cls._local = None


class Placed(RayExecutor):
    """A Ray executor on the Ray of this run."""

    def __init__(self, config: WorkerConfig, **options: object) -> None:
        SharedRay.start()
        super().__init__(config, **options)


KINDS: dict[str, tuple[type[Executor], dict[str, int]]] = {
    "uni": (UniprocExecutor, {}),
    "mp": (MultiprocExecutor, {}),
    "mp-tp2-pp2": (MultiprocExecutor, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "external": (Launched, {"tensor_parallel_size": 2}),
    "ray": (Placed, {"tensor_parallel_size": 2}),
}
"""By name: the class and the sizes."""

_RAY_MARKS = (
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs millrace[ray]"),
)


def marks_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of tests on this kind."""
    return _RAY_MARKS if name == "ray" else ()


def kinds(*, is_remote: bool | None = None, **flags: bool) -> pytest.MarkDecorator:
    """Parametrize the fixture `make` with every kind that has these values of `can_restart` and `can_resize`.
    `is_remote`: whether its workers are processes of their own, which a test can kill."""
    names = [
        name
        for name, (kind, _) in KINDS.items()
        if is_remote in (None, issubclass(kind, RemoteExecutor))
        and all(getattr(kind, flag) == wanted for flag, wanted in flags.items())
    ]
    return pytest.mark.parametrize("make", [pytest.param(name, marks=marks_of(name)) for name in names], indirect=True)


def start(executor: Executor) -> Executor:
    executor.start()
    executor.initialize_cache(*executor.determine_num_available_blocks())
    return executor


def begin_call(executor: Executor, method: str, *args: object, limit_s: float | None = None) -> Future[list[Any]]:
    """Like `collective_rpc`, but without waiting for the results."""
    return executor._call(Call(call_id=0, method=method, args=list(args)), range(executor.world_size), limit_s)


def first_step(executor: Executor, step_id: int = 1, seq_id: int = 1, depth: int = 1) -> StepPlan:
    """A step with the prompt of one sequence. The rows of earlier steps do not go on."""
    new = NewSequence(SeqId(seq_id), [5, 6, 7], 3, GREEDY)
    row = StepRow(SeqId(seq_id), 0, 3, [seq_id])
    paused = [SeqId(number) for number in range(1, 32) if number != seq_id]
    return StepPlan(StepId(step_id), executor.epoch, depth, 3, 1, [row], [new], paused=paused)


def decode(executor: Executor, step_id: int, seq_id: int = 1) -> StepPlan:
    """The step after `first_step`."""
    return StepPlan(StepId(step_id), executor.epoch, 1, num_tokens=1, num_sampled=1)


def check_health_for(executor: Executor, seconds: float) -> None:
    """Check the health as an idle engine does."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        executor.check_health()
        time.sleep(0.05)


def worker_pids(executor: Executor) -> list[int]:
    """Return them in rank order."""
    pids: list[int] = executor.worker_pids()  # type: ignore[attr-defined]
    return pids


def wait_until_gone(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], LIMIT_S)[0]
        finally:
            os.close(fd)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
