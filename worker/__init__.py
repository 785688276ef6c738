"""One rank: device, weights, KV tensors, attention and sampler. Importing this package loads neither torch nor
transformers; `create_worker` does."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING

from millrace.executor.phases import process_age_s

if TYPE_CHECKING:
    from millrace.executor.rank.worker import Worker
    from millrace.executor.wire.messages import WorkerConfig


def create_worker(rank: int, world_size: int, epoch: int, config: WorkerConfig, rendezvous: str) -> Worker:
    """Create the worker of one rank for plans of `epoch`. Its `start` loads the model.

    `rendezvous`: "tcp://host:port" where the ranks connect to each other; ignored for one rank. Raises `ConfigError`
    for options that no device can serve.
    """
    from millrace.worker.rank import Rank

    return Rank(rank, world_size, epoch, config, rendezvous)


def import_modules() -> None:
    """Import what `create_worker` needs. Only for a process that is nothing but a rank."""
    gc.disable()  # before torch, which is most of the modules
    from millrace.worker.imports import import_transformers

    import_transformers()
    import millrace.worker.rank  # noqa: F401

    gc.freeze()  # the 200,000 objects of modules are never garbage: a collection would pass them each time
    gc.enable()
    logging.getLogger("millrace.worker").info("start: imports %.2f s", process_age_s())
