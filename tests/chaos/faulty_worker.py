"""The real worker with a fault: it dies of a prompt, as of a kernel that crashes, it hangs in a step, or it is slow."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from millrace.executor.wire.messages import WorkerConfig

VARIABLE = "CHAOS_WORKER_FAULTS"
"""The `WorkerFaults` as JSON."""


class WorkerFaults(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of the workers of one engine."""

    poison: list[int] = []
    """The worker dies of a sequence that begins with these tokens."""
    hangs_at_step: int = 0
    """The number of the step that does not end; 0: none."""
    has_hung: str = ""
    """A path: the file that the first worker creates when it hangs; later ones do not hang."""
    hangs_until: str = ""
    """A path: the step continues once this file exists. "": never."""
    step_s: float = 0.0
    """Each step takes this much longer."""


def create_worker(rank: int, world_size: int, epoch: int, config: WorkerConfig, rendezvous: str) -> Any:
    from millrace.worker import create_worker as create_real_worker

    faults = msgspec.json.decode(os.environ[VARIABLE], type=WorkerFaults)
    worker: Any = create_real_worker(rank, world_size, epoch, config, rendezvous)
    launch, numbers = worker.launch, itertools.count(1)

    def launch_or_fail(plan: Any) -> Any:
        if faults.poison and any(new.token_ids[: len(faults.poison)] == faults.poison for new in plan.new):
            os.kill(os.getpid(), signal.SIGKILL)
        if next(numbers) == faults.hangs_at_step and not Path(faults.has_hung).exists():
            Path(faults.has_hung).touch()
            hang_as_in_a_collective(faults.hangs_until)
        time.sleep(faults.step_s)
        return launch(plan)

    worker.launch = launch_or_fail
    return worker


def hang_as_in_a_collective(until: str) -> None:
    """Heartbeats go on in another thread; only the step does not end."""
    while not until or not Path(until).exists():
        time.sleep(0.01)


if __name__ == "__main__":
    from millrace.executor.rank.serve import serve_rank
    from millrace.worker import import_modules

    sys.exit(serve_rank(create_worker, import_modules=import_modules))
