"""One rank: the device, the weights, the KV tensors, attention and the sampler. Importing this package is cheap: torch
and transformers are loaded by `create_worker`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.executor.rank.worker import Worker
    from millrace.executor.wire.messages import WorkerConfig


def create_worker(rank: int, world_size: int, epoch: int, config: WorkerConfig, rendezvous: str) -> Worker:
    """The worker of one rank, for plans of the given epoch; nothing is loaded before its `start`.

    Raises `ConfigError` for a configuration that no device could serve.
    """
    from millrace.worker.rank import Rank

    return Rank(rank, world_size, epoch, config, rendezvous)
