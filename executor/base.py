"""The two contracts of this folder: what an engine may ask of an executor, and what a rank must be able to do."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from executor.limits import Limits
from executor.messages import ModelFacts, StepPlan, StepResult, WorkerConfig
from executor.metrics import ExecutorMetrics, Recorder

logger = logging.getLogger("millrace.executor")

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
        """Figures for logs and metrics: memory in bytes, steps, sequences."""

    def shutdown(self) -> None:
        """Give the device memory back. Nothing is called afterwards."""


class StepFuture(Protocol):
    """The outcome of one `execute_model`, now or later."""

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Wait for it. Raises `ExecutorTimeout` or what the worker raised (`WorkerError`, `WorkerDied`)."""

    def done(self) -> bool:
        """Whether `result` would return at once."""


class Executor(ABC):
    """Runs step plans on workers. Owned by one thread: every method is called from the thread that called `start`.

    Life: `start`, `determine_num_available_blocks`, `initialize_cache`, then any number of steps, calls and naps, then
    `shutdown`.
    When a worker is lost, every call raises `WorkerDied` until `restart`, which begins a new epoch: the KV pool is empty
    again, its size as before, and plans of the old epoch are refused.
    """

    name: str
    can_restart: bool
    """Whether the executor survives the death of its workers."""
    can_resize: bool = False
    """Whether it can go on with fewer ranks."""

    def __init__(self, config: WorkerConfig, limits: Limits | None = None) -> None:
        self._config = config
        self._limits = limits or Limits()
        self._wanted_world_size = self.world_size
        self._recorder = Recorder()
        self._epoch = 0
        self._num_starts = 0
        self._facts: ModelFacts | None = None
        self._cache_size: tuple[int, int] | None = None
        self._missing: set[str] = set()
        """Of `WAKE_TAGS`: what the workers have given up to sleep."""

    @property
    def epoch(self) -> int:
        """The life of the KV pool; goes up by one with every start, restart and awakening. 1 after `start`."""
        return self._epoch

    @property
    def has_cache(self) -> bool:
        """Whether the KV pool is allocated, or will be by `restart`; not after a `resize`."""
        return self._cache_size is not None

    @property
    def num_device_blocks(self) -> int:
        """Size of the KV pool, 0 before it is allocated."""
        return self._cache_size[0] if self._cache_size is not None else 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._config.tensor_parallel_size * self._config.pipeline_parallel_size

    @property
    def facts(self) -> ModelFacts:
        """What `start` returned last, of rank 0."""
        assert self._facts is not None, "the executor has not been started"
        return self._facts

    # --- life ---

    def start(self) -> ModelFacts:
        """Start the workers and load the model. Raises `StartError`, which names the phase and the rank."""
        self._epoch += 1
        self._num_starts += 1
        self._missing.clear()
        self._facts = self._start_workers()
        return self._facts

    def restart(self) -> None:
        """Replace the workers and begin a new epoch. Raises `StartError` like `start`; may then be called again."""
        began_s = time.monotonic()
        self._discard_workers()
        self.start()
        if self._cache_size is not None:
            self.initialize_cache(*self._cache_size)
        self._recorder.recovery_s = time.monotonic() - began_s

    def resize(self, tensor_parallel_size: int, pipeline_parallel_size: int, *, lost_rank: int | None = None) -> None:
        """Have the next `restart` make ranks for these sizes. The KV pool has to be measured and allocated anew then.

        `lost_rank`, of the present sizes, did not come up: its device is left out until all ranks are wanted again. Raises
        ValueError where the number of ranks is not this executor's to choose.
        """
        sizes = (tensor_parallel_size, pipeline_parallel_size)
        if sizes == self.parallel_sizes:
            return
        if not self.can_resize:
            raise ValueError(f"executor {self.name} can't change its number of ranks")
        self._cache_size = None
        self._config = msgspec.structs.replace(
            self._config, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1]
        )

    @property
    def parallel_sizes(self) -> tuple[int, int]:
        """(tensor parallel, pipeline parallel) of the present or the next start."""
        return self._config.tensor_parallel_size, self._config.pipeline_parallel_size

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers and leave nothing behind. May be called at any time, any number of times."""

    # --- the KV pool ---

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """(device blocks, host blocks) that every rank can hold: the smallest rank decides. Logs the arithmetic."""
        counts = self.collective_rpc("determine_num_available_blocks", timeout_s=self._limits.pool_call_s)
        num_blocks, num_host_blocks = min(device for device, _ in counts), min(host for _, host in counts)
        logger.info("%s", _pool_arithmetic([device for device, _ in counts], num_host_blocks, self.facts))
        return num_blocks, num_host_blocks

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Allocate the KV pool on every rank; a restart allocates it again with the same sizes."""
        sizes = (num_device_blocks, num_host_blocks)
        self.collective_rpc("initialize_cache", sizes, timeout_s=self._limits.pool_call_s)
        self._cache_size = sizes
        self.worker_stats()

    def worker_stats(self) -> list[dict[str, Any]]:
        """What each rank says of itself, in rank order. Asks the ranks, and waits for steps that are under way."""
        by_rank: list[dict[str, Any]] = self.collective_rpc("stats")
        self._recorder.device_bytes = [figures.get("device_bytes") for figures in by_rank]
        return by_rank

    def sleep(self, level: int = 1) -> None:
        """Give device memory back: the KV pool, and the weights (1: kept in host memory, 2: dropped). Blocks until every
        rank sleeps. The workers have forgotten every sequence; steps raise `Asleep` until `wake_up`."""
        if level not in (1, 2):
            raise ValueError(f"level: must be 1 or 2, got {level!r}")
        self.collective_rpc("sleep", (level,), timeout_s=self._limits.pool_call_s)
        self._missing.update(WAKE_TAGS)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take back what `tags` name of `WAKE_TAGS`, or all; blocks meanwhile. With the KV pool a new epoch begins."""
        wanted = list(WAKE_TAGS if tags is None else tags)
        if unknown := set(wanted) - set(WAKE_TAGS):
            raise ValueError(f"tags: must be of {', '.join(WAKE_TAGS)}, got {', '.join(sorted(unknown))}")
        wanted = [tag for tag in wanted if tag in self._missing]
        if not wanted:
            return
        epoch = self._epoch + ("kv_cache" in wanted)
        self.collective_rpc("wake_up", (wanted, epoch), timeout_s=self._limits.pool_call_s)
        self._epoch = epoch
        self._missing.difference_update(wanted)

    @property
    def is_asleep(self) -> bool:
        """Whether something is missing that a step needs."""
        return bool(self._missing)

    # --- work ---

    @abstractmethod
    def execute_model(self, plan: StepPlan) -> StepFuture:
        """Send one step to the workers. Returns at once where workers are processes of their own.

        The result is the output rank's; an error or the death of any rank ends the wait for it.
        """

    def step_limit_s(self, num_tokens: int) -> float:
        """How long a step of so many tokens may take before it counts as stuck."""
        return self._limits.longest_step_s

    @abstractmethod
    def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        unique_reply_rank: int | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call one of `WORKER_METHODS` on every rank.

        Returns the results in rank order, or the one of `unique_reply_rank`; with `non_block` a future whose
        `result(timeout_s)` gives the same. Raises `UnknownMethod`, `WorkerError` (the worker's own error, with its
        traceback), `ExecutorTimeout` (the late reply is dropped and counted) and `WorkerDied`.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Raise `WorkerDied` when a worker is gone, stands still or gives no sign of life; cheap enough for every second."""

    def stats(self) -> ExecutorMetrics:
        """Figures since the executor was made. Asks nobody and never blocks; any thread may call it."""
        return self._recorder.metrics(
            name=self.name,
            world_size=self.world_size,
            wanted_world_size=self._wanted_world_size,
            epoch=self._epoch,
            num_active_workers=self._num_active_workers(),
            num_restarts=max(0, self._num_starts - 1),
            num_blocks=self.num_device_blocks,
        )

    # --- what the kinds differ in ---

    @abstractmethod
    def _start_workers(self) -> ModelFacts:
        """Bring up the workers of this epoch, or leave none behind."""

    @abstractmethod
    def _discard_workers(self) -> None:
        """End the workers at once, dead, stuck or well."""

    @abstractmethod
    def _num_active_workers(self) -> int:
        """Workers that are up."""


def _pool_arithmetic(num_blocks: list[int], num_host_blocks: int, facts: ModelFacts) -> str:
    smallest = min(num_blocks)
    pool_mib = smallest * facts.kv_bytes_per_block / 2**20
    by_rank = f" (smallest of {num_blocks} over the ranks)" if len(num_blocks) > 1 else ""
    return (
        f"KV pool: {smallest} blocks{by_rank} x {facts.kv_bytes_per_block} bytes = {pool_mib:.1f} MiB on each device, "
        f"{num_host_blocks} blocks in host memory; weights {facts.weight_bytes / 2**20:.1f} MiB"
    )
