"""A worker that dies of one prompt, as one with a kernel that crashes on it would: the real worker in all else."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import msgspec

from executor.messages import WorkerConfig

POISON_VARIABLE = "CHAOS_POISON_TOKENS"
"""The tokens that the prompt begins with, as JSON."""


def create_worker(rank: int, world_size: int, epoch: int, config: WorkerConfig, rendezvous: str) -> Any:
    from worker import create_worker as create_real_worker

    poison = msgspec.json.decode(os.environ[POISON_VARIABLE], type=list[int])
    worker: Any = create_real_worker(rank, world_size, epoch, config, rendezvous)
    execute_model = worker.execute_model

    def execute_or_die(plan: Any) -> Any:
        if any(new.token_ids[: len(poison)] == poison for new in plan.new):
            os.kill(os.getpid(), signal.SIGKILL)
        return execute_model(plan)

    worker.execute_model = execute_or_die
    return worker


if __name__ == "__main__":
    from executor.rank import serve_rank

    sys.exit(serve_rank(create_worker))
