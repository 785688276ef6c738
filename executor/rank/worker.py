"""The contract of one rank, which `millrace.worker` and test doubles implement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from millrace.executor.wire.messages import ModelFacts, StepPlan, StepResult

WAKE_TAGS = ("weights", "kv_cache")
"""What `wake_up` takes back, together or one after the other."""


class Worker(Protocol):
    """Owns the device, the weights and the KV tensors of one rank. One thread calls all methods, which block.

    A worker package has the function `create_worker(rank, world_size, epoch, config, rendezvous) -> Worker`, and
    `python -P -m <package>` runs a worker in a process of its own.
    """

    def start(self, on_phase: Callable[[str], None]) -> ModelFacts:
        """Open the device and load the model. Calls `on_phase` when the phases "device" and "load_model" begin."""

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """Return (device blocks, host blocks) that fit; the device's include block 0. Profiles the largest step if memory is
        scarce."""

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> float:
        """Allocate the KV pool, and behind it the host tier, which may have 0 blocks. Once, after
        `determine_num_available_blocks`, before the first step. Return the seconds in which a block moves to the host tier
        and back, 0.0 without one."""

    def launch(self, plan: StepPlan) -> None:
        """Begin one step, and compute it here if the device is the host. Plans come in the order of their step ids. A plan
        may feed tokens of the step launched before, whose result has not been collected yet.

        After an error, plans are refused up to the next one of depth 1. That one also drops the results of earlier steps
        that were not collected.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest step that was launched and not collected, and return its result."""

    def is_result_ready(self) -> bool:
        """Whether `collect` would return at once."""

    @property
    def has_idle_work(self) -> bool:
        """Whether `do_idle_work` has something to do."""

    def do_idle_work(self) -> None:
        """Do a part of what makes later steps faster, such as to capture a graph of the GPU. Called while there is no step
        and no call; the next one waits for it."""

    def compile_grammar(self, number: int, grammar: str) -> None:
        """Begin to compile a grammar in another thread, and return at once. The numbers of the calls grow."""

    @property
    def last_compiled(self) -> int:
        """The grammars up to this number are compiled, or have failed."""

    def check_health(self) -> None:
        """Raise when the device cannot be used."""

    def sleep(self, level: int) -> None:
        """Drop the KV pool with its host tier, and all sequences. Level 1 keeps the weights in host memory, level 2 drops
        them too."""

    def wake_up(self, tags: list[str], epoch: int, new_weights: str | None = None) -> int:
        """Take back those of `WAKE_TAGS` in `tags`. "kv_cache": an empty pool of the old size, for plans of `epoch`.
        `new_weights`: a directory with other weights of the model, which are read instead, and after later sleeps. Return
        the checksum of the weights, see `ModelFacts.weights_checksum`."""

    def stats(self) -> dict[str, Any]:
        """Return values for logs and metrics. Cheap: also called every 10 s.

        The engine uses `device_bytes` and `device_total_bytes` (memory held, and of the device; None on the host),
        `device_utilization` (share of the time that the device computes, 0 to 1, None where unknown) and `pool_budget`
        (text: how the number of available blocks was determined).
        """

    def shutdown(self) -> None:
        """Release the device memory. The last call."""
