"""The stub with the GPUs that it sees in its stats: `worker_module="tests.executor.seeing_worker"`."""

from __future__ import annotations

import os
from typing import Any

from millrace.executor.wire.messages import WorkerConfig
from tests.executor.stub import StubWorker


class SeeingWorker(StubWorker):
    """Reports CUDA_VISIBLE_DEVICES."""

    def stats(self) -> dict[str, Any]:
        return {"devices": os.environ.get("CUDA_VISIBLE_DEVICES")}


def create_worker(rank: int, world_size: int, epoch: int, config: WorkerConfig, rendezvous: str) -> SeeingWorker:
    return SeeingWorker(epoch, config, rank, world_size)
