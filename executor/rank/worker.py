"""What a rank must be able to do, whatever computes in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from millrace.executor.wire.messages import ModelFacts, StepPlan, StepResult

WAKE_TAGS = ("weights", "kv_cache")
"""What a sleeping worker gets back, together or one after the other."""


class Worker(Protocol):
    """One rank: the device, the weights and the KV tensors. Owned by one thread; every method blocks.

    A worker package offers `create_worker(rank, world_size, epoch, config, rendezvous) -> Worker`, and
    `python -P -m <package>` runs one in a process of its own.
    """

    def start(self, on_phase: Callable[[str], None]) -> ModelFacts:
        """Take the device and load the model, announcing the phases "device" and "load_model" as they begin."""

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """(device blocks, host blocks) that fit; block 0 included. Profiles the largest prefill where memory is scarce."""

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Allocate the KV pool. Once, after `determine_num_available_blocks`, before the first step."""

    def execute_model(self, plan: StepPlan) -> StepResult:
        """Run one step. Plans arrive in the order of their step ids."""

    def check_health(self) -> None:
        """Raise when the device cannot be used."""

    def sleep(self, level: int) -> None:
        """Drop the KV pool and all sequences. Level 1 keeps the weights in host memory, level 2 drops them too."""

    def wake_up(self, tags: list[str], epoch: int) -> None:
        """Take back what `tags` name, of `WAKE_TAGS`. With "kv_cache" the pool is there again, empty, at its old size, and
        plans are of `epoch` from now on."""

    def stats(self) -> dict[str, Any]:
        """Figures for logs and metrics: memory in bytes, steps, sequences. Cheap: a rank also asks itself now and then.

        Of these the engine makes use: `device_bytes` and `device_total_bytes` (what it holds and what there is, None on the
        host), `device_utilization` (share of the time that the device computes, 0 to 1, None where it does not tell) and
        `pool_budget` (in words: what the number of available blocks was made of).
        """

    def shutdown(self) -> None:
        """Give the device memory back. Nothing is called afterwards."""
