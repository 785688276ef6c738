"""What an engine may ask of an executor; what that in turn asks of a rank stands in `worker`."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from millrace.executor.errors import UnknownMethod
from millrace.executor.limits import Limits
from millrace.executor.metrics import ExecutorMetrics, Recorder
from millrace.executor.rank.worker import WAKE_TAGS
from millrace.executor.wire.messages import WORKER_METHODS, ModelFacts, StepPlan, StepResult, WorkerConfig

logger = logging.getLogger("millrace.executor")


class StepFuture(Protocol):
    """The outcome of one `execute_model`, now or later."""

    def result(self, timeout_s: float | None = None) -> StepResult:
        """Wait for it. Raises `ExecutorTimeout` or what the worker raised (`WorkerError`, `WorkerDied`)."""

    def done(self) -> bool:
        """Whether `result` would return at once."""


class CallFuture(Protocol):
    """The outcome of one `collective_rpc`, now or later."""

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for it; raises what `collective_rpc` says."""

    def done(self) -> bool:
        """Whether `result` would return at once."""


class Executor(ABC):
    """Runs step plans on workers. Owned by one thread: every method is called from the thread that called `start`, but
    `stats` and the properties, which any thread may read.

    Life: `start`, `determine_num_available_blocks`, `initialize_cache`, then any number of steps, calls and naps, then
    `shutdown`.
    When a worker is lost, every call raises `WorkerDied` until `restart`, which begins a new epoch: the KV pool is empty
    again, its size as before, and plans of the old epoch are refused.

    Calls wait as long as they need, within `Limits`: steps and plain calls for 300 s and 60 s unless told otherwise, those
    that allocate or profile for 15 minutes, naps as the weights are large. Where the worker lives in this process nothing
    can be timed out. Errors are `WorkerError`, `ExecutorTimeout` and `WorkerDied`, as `collective_rpc` has them, where
    nothing else is said.
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
        self._facts: list[ModelFacts] = []
        """By rank."""
        self._lost_s: float | None = None
        """Since when there are no workers that can go on, while that is so."""
        self._is_on_disk = False
        """Whether the weights have to be read again on waking."""
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
        assert self._facts, "the executor has not been started"
        return self._facts[0]

    @property
    def weights_checksums(self) -> list[int]:
        """Of what the ranks loaded in the last start, by rank: see `ModelFacts.weights_checksum`."""
        return [facts.weights_checksum for facts in self._facts]

    # --- life ---

    def start(self) -> ModelFacts:
        """Start the workers and load the model: once, or after a `shutdown`. Blocks until every rank is ready, each phase
        of it within its limit. Returns the facts of rank 0.

        Raises `StartError`, which names the phase and the rank; no worker of ours is left then, and it, or `restart`, may be
        called again when `is_retryable`.
        """
        self._epoch += 1
        self._num_starts += 1
        self._missing.clear()
        self._is_on_disk = False
        self._recorder.idle()
        self._facts = self._start_workers()
        self._keep_device()
        return self.facts

    def _keep_device(self) -> None:
        """What "auto" means is decided once: a GPU that is gone later is lost, and no reason to go on on the CPU."""
        if self._config.device == "auto":
            kind = self.facts.device.partition(":")[0]
            self._config = msgspec.structs.replace(self._config, device=kind)

    def restart(self) -> None:
        """Replace the workers, lost, asleep or well, and begin a new epoch with a KV pool of the same size; after a `resize`
        without one. Where `can_restart`. Blocks like `start` and `initialize_cache`, and pending calls are over.

        Raises `StartError` like `start`, and what `initialize_cache` raises; may be called again after either.
        """
        self._lost_s = self._lost_s or time.monotonic()
        self._discard_workers()
        self.start()
        if self._cache_size is not None:
            self.initialize_cache(*self._cache_size)

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
        """(device blocks, host blocks) that every rank can hold, block 0 included: the smallest rank decides. Between
        `start` and `initialize_cache`. Blocks while ranks profile their largest step. Logs the arithmetic in one line.

        Raises `WorkerError` with a `ModelError` when no block fits, or less than one sequence of the `max_model_len` that
        was asked for; not where `num_blocks` was.
        """
        counts = self.collective_rpc("determine_num_available_blocks", timeout_s=self._limits.pool_call_s)
        num_blocks, num_host_blocks = min(device for device, _ in counts), min(host for _, host in counts)
        budgets = [figures.get("pool_budget", "no budget told") for figures in self.worker_stats()]
        ranks = zip([device for device, _ in counts], self._facts, budgets, strict=True)
        parts = [f"rank {rank}: {_pool_of_rank(num_blocks, *one)}" for rank, one in enumerate(ranks)]
        logger.info("KV pool: %d blocks, %d in host memory; %s", num_blocks, num_host_blocks, "; ".join(parts))
        return num_blocks, num_host_blocks

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Allocate the KV pool on every rank, sizes in blocks, block 0 included. Once after `start`, before the first step;
        `restart` does it itself. Blocks while ranks allocate and capture graphs. Raises `WorkerError` when the sizes can't
        be had; the workers are to be restarted then."""
        sizes = (num_device_blocks, num_host_blocks)
        self.collective_rpc("initialize_cache", sizes, timeout_s=self._limits.pool_call_s)
        self._cache_size = sizes
        self.worker_stats()
        if self._lost_s is not None:
            self._recorder.recovery_s = time.monotonic() - self._lost_s
            self._lost_s = None

    def worker_stats(self) -> list[dict[str, Any]]:
        """What each rank says of itself, in rank order. Asks the ranks, and waits for steps that are under way."""
        by_rank: list[dict[str, Any]] = self.collective_rpc("stats")
        self._recorder.saw_stats(by_rank)
        return by_rank

    def sleep(self, level: int = 1) -> None:
        """Give device memory back: the KV pool, and the weights (1: kept in host memory, 2: dropped). Nothing may be in
        flight. Blocks until every rank sleeps. The workers have forgotten every sequence; steps raise `Asleep` until
        `wake_up`.

        Raises ValueError for another level. After any other error some ranks may sleep and some not: restart.
        """
        if level not in (1, 2):
            raise ValueError(f"level: must be 1 or 2, got {level!r}")
        self._recorder.idle()
        self.collective_rpc("sleep", (level,), timeout_s=self._sleep_limit_s(self._limits.move_bytes_per_s))
        self._missing.update(WAKE_TAGS)
        self._is_on_disk |= level == 2

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take back what `tags` name of `WAKE_TAGS`, or all; harmless when it is there. Blocks meanwhile: weights that were
        dropped are read from disk like in a start, by `max_parallel_loading_workers` ranks at a time. With the KV pool,
        which is empty, a new epoch begins.

        Raises ValueError for other tags, and `WorkerError` with a `WeightsChanged` when the weights are not those of before
        the sleep. After any error the ranks are to be restarted.
        """
        wanted = list(WAKE_TAGS if tags is None else tags)
        if unknown := set(wanted) - set(WAKE_TAGS):
            raise ValueError(f"tags: must be of {', '.join(WAKE_TAGS)}, got {', '.join(sorted(unknown))}")
        wanted = [tag for tag in wanted if tag in self._missing]
        if not wanted:
            return
        epoch = self._epoch + ("kv_cache" in wanted)
        is_read = self._is_on_disk and "weights" in wanted
        num_at_a_time = self._config.max_parallel_loading_workers if is_read else None
        limit_s = self._sleep_limit_s(self._limits.read_bytes_per_s if is_read else self._limits.move_bytes_per_s)
        for ranks in _groups(self.world_size, num_at_a_time or self.world_size):
            self._call("wake_up", (wanted, epoch), {}, ranks, limit_s=limit_s).result()
        self._epoch = epoch
        self._missing.difference_update(wanted)
        self._is_on_disk &= not is_read

    def _sleep_limit_s(self, bytes_per_s: float) -> float:
        """How long it may take to move the weights of all ranks at this speed, and to do the rest."""
        return self._limits.sleep_call_s + sum(facts.weight_bytes for facts in self._facts) / bytes_per_s

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

    def mark_idle(self) -> None:
        """There is nothing to run: the time until the next step is not the host's."""
        self._recorder.idle()

    @abstractmethod
    def step_limit_s(self, num_tokens: int) -> float:
        """How long a step of so many tokens may take before it counts as stuck."""

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
        """Call one of `WORKER_METHODS` on every rank, after the steps and calls that were sent before.

        Returns the results in rank order, or the one of `unique_reply_rank`; with `non_block` a `CallFuture` for the same.
        `timeout_s`: 60 s when not told (`Limits.call_s`); with `non_block` it is the limit of the future's `result`, from
        when that is called, unless `result` is given another. Raises `UnknownMethod` and ValueError (no such rank) before
        anything is sent, `WorkerError` (the worker's own error, with its traceback, or an answer that makes no sense),
        `ExecutorTimeout` (the late reply is dropped and counted) and `WorkerDied`.
        """
        if method not in WORKER_METHODS:
            known = ", ".join(sorted(WORKER_METHODS))
            raise UnknownMethod(f"{method!r} is not a method of a worker; there are {known}")
        if unique_reply_rank is not None and unique_reply_rank not in range(self.world_size):
            raise ValueError(f"unique_reply_rank: must be one of 0 to {self.world_size - 1}, got {unique_reply_rank!r}")
        future = self._call(method, args, kwargs or {}, range(self.world_size), unique_reply_rank, timeout_s)
        return future if non_block else future.result()

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
    def _start_workers(self) -> list[ModelFacts]:
        """Bring up the workers of this epoch, or leave none behind. Returns the facts by rank."""

    @abstractmethod
    def _call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ranks: Sequence[int],
        reply_rank: int | None = None,
        limit_s: float | None = None,
    ) -> CallFuture:
        """Send a call to these ranks. Its outcome is their results in this order, or the one of `reply_rank`.
        `limit_s`: how long `result` waits when it is not told; `Limits.call_s` by default."""

    @abstractmethod
    def _discard_workers(self) -> None:
        """End the workers at once, dead, stuck or well."""

    @abstractmethod
    def _num_active_workers(self) -> int:
        """Workers that are up."""


def _groups(world_size: int, num_at_a_time: int) -> list[range]:
    return [
        range(first, min(first + num_at_a_time, world_size)) for first in range(0, world_size, max(1, num_at_a_time))
    ]


def _pool_of_rank(num_blocks: int, num_fit: int, facts: ModelFacts, budget: str) -> str:
    pool_mib, weight_mib = num_blocks * facts.kv_bytes_per_block / 2**20, facts.weight_bytes / 2**20
    return (
        f"{num_fit} fit ({budget}), {num_blocks} x {facts.kv_bytes_per_block} bytes = {pool_mib:.1f} MiB "
        f"beside {weight_mib:.1f} MiB of weights"
    )
