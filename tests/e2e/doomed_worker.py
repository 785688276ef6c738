"""The real worker on a faulty machine. Run as a program, this module is the engine service with such workers and without
pauses between their restarts. The first argument is the fault: METHOD:FAULT; METHOD:FAULT@RANK for one rank; or
METHOD:FAULT:FILE, which happens once and creates the file. Two faults last as long as their FILE exists: `away` kills
rank 1, `no-gpu` chooses a device on a host without a GPU."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from millrace.executor.wire.messages import WorkerConfig

VARIABLE = "DOOM"


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


class AcceleratorError(RuntimeError):
    """Named like torch's."""


def create_worker(rank: int, world_size: int, epoch: int, config: WorkerConfig, rendezvous: str) -> Any:
    from millrace.worker import create_worker as create_real_worker

    worker: Any = create_real_worker(rank, world_size, epoch, config, rendezvous)
    where, what, *once = os.environ[VARIABLE].split(":")
    what, _, only_rank = what.partition("@")
    if only_rank and int(only_rank) != rank:
        return worker
    method = getattr(worker, where)

    def fail(*args: object) -> object:
        if what in ("away", "no-gpu"):
            return fail_while_there(*args)
        if once and Path(once[0]).exists():
            return method(*args)
        for mark in once:
            Path(mark).touch()
        match what:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stopped":  # as by a supervisor that signals the service and its workers at once
                os.kill(os.getppid(), signal.SIGTERM)
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            case "device":
                raise AcceleratorError("CUDA error: uncorrectable ECC error encountered")
            case "memory":
                raise OutOfMemoryError("CUDA out of memory")
        raise AssertionError(what)

    def fail_while_there(*args: object) -> object:
        if Path(once[0]).exists() and what == "no-gpu":
            from millrace.worker.device import choose_device

            choose_device("cuda")
        if Path(once[0]).exists() and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args)

    setattr(worker, where, fail)
    return worker


def main(doom: str, arguments: list[str]) -> int:
    from millrace.engine_service import build, worker_group
    from millrace.engine_service import serve as service

    os.environ[VARIABLE] = doom
    worker_group.RESTART_BACKOFF_S = (0.0, 0.0)  # type: ignore[assignment]
    make = build.make_executor  # type: ignore[attr-defined]
    build.make_executor = lambda *args, **kw: make(*args, worker_module="tests.e2e.doomed_worker", **kw)  # type: ignore[attr-defined]
    service.become_rank = partial(service.become_rank, worker_module="tests.e2e.doomed_worker")  # type: ignore[attr-defined]
    return service.main(arguments)


if __name__ == "__main__":
    if "--identity" in sys.argv:
        from millrace.executor.rank.serve import serve_rank

        sys.exit(serve_rank(create_worker))
    sys.exit(main(sys.argv[1], sys.argv[2:]))
