"""The contract of executors. `rank.worker` has the contract of one rank."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from millrace.executor.limits import Limits
from millrace.executor.metrics import ExecutorMetrics, Recorder
from millrace.executor.sleep import SleepState
from millrace.executor.wire.messages import Call, ModelFacts, StepPlan, StepResult, WorkerConfig

logger = logging.getLogger("millrace.executor")

T = TypeVar("T", covariant=True)


class Future(Protocol[T]):
    """The outcome of one step or call, now or later."""

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the outcome and return it. Raises `WorkerError`, `ExecutorTimeout`, `WorkerDied` and `StepLost`."""


StepFuture = Future[StepResult]


class Executor(ABC):
    """Runs step plans on workers. One thread at a time calls its methods. Any thread may read `stats` and the properties.

    Order of calls: `begin_start`, `start`, `determine_num_available_blocks`, `initialize_cache`, then any number of steps,
    calls, `sleep` and `wake_up`, then `shutdown`. After the loss of a worker every call raises `WorkerDied` until `restart`,
    which begins a new epoch: the KV pool is empty and as large as before, and plans of the old epoch are refused.

    Every method that waits for workers may raise `WorkerError`, `ExecutorTimeout` and `WorkerDied`, see `collective_rpc`.
    `Limits` has the time limits. No limit applies where the worker runs in this process.
    """

    name: str
    can_restart: bool
    """Whether the executor survives the death of its workers."""
    can_resize: bool = False
    """Whether it can go on with fewer ranks."""

    @property
    @abstractmethod
    def is_asynchronous(self) -> bool:
        """Whether the workers compute a step while the caller does something else."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        worker_module: str = "millrace.worker",
        log_level: str = "INFO",
        limits: Limits | None = None,
    ) -> None:
        """`worker_module`: the package of the worker, see `rank.worker`. `log_level`: of the processes of the ranks."""
        self._config = config
        self._worker_module = worker_module
        self._log_level = log_level
        self._limits = limits or Limits()
        self._wanted_world_size = self.world_size
        self._recorder = Recorder()
        self._sleep_state = SleepState()
        self._epoch = 0
        self._num_starts = 0
        self._facts: list[ModelFacts] = []
        """By rank."""
        self._lost_s: float | None = None
        """When the workers were lost. None while there are workers that can go on."""
        self._cache_size: tuple[int, int] | None = None
        self.swap_s = 0.0
        """The time in which the slowest rank moves a block to the host tier and back."""

    @property
    def epoch(self) -> int:
        """Number of the present KV pool: 1 after the first start. A start, a restart and `wake_up` of the pool add one."""
        return self._epoch

    @property
    def num_device_blocks(self) -> int:
        """Size of the KV pool. 0 before it is allocated, and after a `resize`."""
        return self._cache_size[0] if self._cache_size is not None else 0

    @property
    def num_host_blocks(self) -> int:
        """Size of the host tier. 0 without one, and where there is no KV pool."""
        return self._cache_size[1] if self._cache_size is not None else 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._config.tensor_parallel_size * self._config.pipeline_parallel_size

    @property
    def parallel_sizes(self) -> tuple[int, int]:
        """(tensor parallel, pipeline parallel) of the present or the next start."""
        return self._config.tensor_parallel_size, self._config.pipeline_parallel_size

    @property
    def facts(self) -> ModelFacts:
        """The result of the last `start`."""
        assert self._facts, "the executor has not been started"
        return self._facts[0]

    @property
    def weights_checksums(self) -> list[int]:
        """By rank: see `ModelFacts.weights_checksum`."""
        return [facts.weights_checksum for facts in self._facts]

    @property
    def is_asleep(self) -> bool:
        """Whether the workers have released something that a step needs."""
        return self._sleep_state.is_asleep

    # --- start and end ---

    def start(self) -> ModelFacts:
        """Start the workers and load the model: once, or after a `shutdown`. Blocks until every rank is ready. Returns
        the facts of rank 0.

        Raises `StartError`. No worker of ours is left then. If `is_retryable`, `start` or `restart` may be called again.
        """
        self._epoch += 1
        self._num_starts += 1
        self._sleep_state = SleepState()
        self._recorder.mark_idle()
        self._facts = self._start_workers()
        if self._config.device == "auto":  # decided once: the CPU does not replace a GPU that is lost later
            self._config = replace(self._config, device=self.facts.device.partition(":")[0])
        return self.facts

    def restart(self) -> None:
        """Replace the workers, in whatever state they are, and begin a new epoch with a KV pool of the same size; after a
        `resize` without a pool. Only where `can_restart`. Blocks like `start` and `initialize_cache`. Pending calls fail.

        Raises what `start` and `initialize_cache` raise, and may be called again after that.
        """
        self._lost_s = self._lost_s or time.monotonic()
        self._discard_workers()
        self.start()
        if self._cache_size is not None:
            self.initialize_cache(*self._cache_size)

    def resize(self, tensor_parallel_size: int, pipeline_parallel_size: int, *, lost_rank: int | None = None) -> None:
        """Let the next `restart` start ranks for these sizes. After it, measure and allocate the KV pool anew.

        `lost_rank`: a rank of the present sizes that did not start. Its device is not used until all ranks are wanted
        again. Raises ValueError where not `can_resize`.
        """
        sizes = (tensor_parallel_size, pipeline_parallel_size)
        if sizes == self.parallel_sizes:
            return
        if not self.can_resize:
            raise ValueError(f"executor {self.name} can't change its number of ranks")
        self._cache_size = None
        self._config = replace(self._config, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])

    def begin_start(self) -> None:  # noqa: B027  # nothing to do for executors without processes of their own
        """Let the processes of the workers begin before `start`, which then waits for them. May be omitted. Returns at
        once. When it fails, `start` does all of it."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers and leave nothing behind. May be called at any time, any number of times."""

    # --- the KV pool ---

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """Return (device blocks, host blocks) that fit on every rank; the device's include block 0. Call it between `start`
        and `initialize_cache`. Blocks while ranks profile their largest step. Logs the size of the pool.

        Raises `WorkerError` with a `ModelError` when no block fits, or, unless `num_blocks` is configured, when not one
        sequence of the configured `max_model_len` fits.
        """
        counts = self.collective_rpc("determine_num_available_blocks", timeout_s=self._limits.pool_call_s)
        num_blocks, num_host_blocks = min(device for device, _ in counts), min(host for _, host in counts)
        budgets = [stats.get("pool_budget", "no budget reported") for stats in self.worker_stats()]
        self._log_pool(num_blocks, [device for device, _ in counts], budgets)
        if num_host_blocks:
            tokens = num_host_blocks * self._config.block_size
            logger.info("host tier of the KV cache: %d blocks on each rank, %d tokens", num_host_blocks, tokens)
        return num_blocks, num_host_blocks

    def _log_pool(self, num_blocks: int, num_fit: list[int], budgets: list[str]) -> None:
        pool_mib = [num_blocks * facts.kv_bytes_per_block / 2**20 for facts in self._facts]
        ranks = [
            f"rank {rank}: {num_blocks:,} blocks x {facts.kv_bytes_per_block:,} bytes = {pool_mib[rank]:,.1f} MiB besides "
            f"{facts.weight_bytes / 2**20:,.1f} MiB of weights, budget {num_fit[rank]:,} blocks ({budgets[rank]})"
            for rank, facts in enumerate(self._facts)
        ]
        size = f"{self.facts.kv_layout.capacity_tokens(num_blocks - 1):,} tokens, {sum(pool_mib):,.1f} MiB"
        logger.info("KV cache: %s; %s", size, "; ".join(ranks))

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Allocate the KV pool and its host tier on every rank, sizes in blocks. Call it once after `start`, and after
        `restart` only if there was a `resize`. Blocks while ranks allocate. After a `WorkerError` restart the workers."""
        sizes = (num_device_blocks, num_host_blocks)
        self.swap_s = max(self.collective_rpc("initialize_cache", sizes, timeout_s=self._limits.pool_call_s))
        self._cache_size = sizes
        self.worker_stats()
        if self._lost_s is not None:
            self._recorder.recovery_s = time.monotonic() - self._lost_s
            self._lost_s = None

    def worker_stats(self) -> list[dict[str, Any]]:
        """Return `Worker.stats` of each rank, in rank order. Blocks until the steps in flight are done."""
        by_rank: list[dict[str, Any]] = self.collective_rpc("stats")
        self._recorder.set_worker_stats(by_rank)
        return by_rank

    def sleep(self, level: int = 1) -> None:
        """Release the KV pool, all sequences, and the weights (1: kept in host memory, 2: dropped). No step or call may be
        in flight. Blocks until every rank sleeps. No step may be sent until `wake_up`, also where an interruption has come.

        Raises ValueError for another level. After any other error some ranks may sleep and others not: restart them.
        """
        if level not in (1, 2):
            raise ValueError(f"level: must be 1 or 2, got {level!r}")
        self._recorder.mark_idle()
        try:
            self.collective_rpc("sleep", (level,), timeout_s=self._sleep_limit_s(self._limits.move_bytes_per_s))
        finally:  # after an interruption too: `wake_up` takes back whatever has been released
            self._sleep_state.sleep(level)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take back those of `tags`, or of `WAKE_TAGS`, that are released. Blocks meanwhile. At most
        `max_parallel_loading_workers` ranks at a time read dropped weights. With the KV pool a new epoch begins.

        Raises ValueError for other tags, and `WorkerError` with a `WeightsChanged` when the weights differ from those
        before the sleep. After any error except ValueError restart the ranks.
        """
        wanted = self._sleep_state.released(tags)
        if not wanted:
            return
        epoch = self._epoch + ("kv_cache" in wanted)
        num_at_a_time, bytes_per_s = self.world_size, self._limits.move_bytes_per_s
        if self._sleep_state.is_reading(wanted):
            num_at_a_time = self._config.max_parallel_loading_workers or self.world_size
            bytes_per_s = self._limits.read_bytes_per_s
        limit_s = self._sleep_limit_s(bytes_per_s)
        call = Call(call_id=0, method="wake_up", args=[wanted, epoch, self._sleep_state.new_weights])
        checksums: list[int] = []
        for first in range(0, self.world_size, num_at_a_time):
            ranks = range(self.world_size)[first : first + num_at_a_time]
            checksums += self._call(call, ranks, limit_s).result()
        self._facts = [
            replace(facts, weights_checksum=checksum) for facts, checksum in zip(self._facts, checksums, strict=True)
        ]
        self._epoch = epoch
        self._sleep_state.wake(wanted)

    def change_weights(self, directory: str) -> None:
        """Let the workers read other weights from `directory`, in the same dtype, in the next start or in `wake_up` after
        `sleep(2)`, which has to follow."""
        self._config = replace(self._config, weights=directory, dtype=self.facts.dtype)
        self._sleep_state.new_weights = directory

    def _sleep_limit_s(self, bytes_per_s: float) -> float:
        """Return the time limit of a call that moves the weights of all ranks, and pins their host tiers, at this speed."""
        num_bytes = sum(facts.weight_bytes + self._config.swap_space_bytes for facts in self._facts)
        return self._limits.sleep_call_s + num_bytes / bytes_per_s

    # --- steps and calls ---

    @abstractmethod
    def execute_model(self, plan: StepPlan) -> StepFuture:
        """Send one step to the workers. Returns at once where the workers are processes of their own. The result is that of
        the output rank. The error or the death of any rank ends the step."""

    @abstractmethod
    def compile_grammar(self, number: int, grammar: str) -> None:
        """Let the workers compile a grammar beside their steps. The numbers of the calls grow. Raises `WorkerDied`."""

    @property
    @abstractmethod
    def last_compiled(self) -> int:
        """The grammars up to this number are compiled on every rank. 0 after a start."""

    @abstractmethod
    def wait_for_grammar(self, timeout_s: float) -> None:
        """Wait until a rank has compiled a grammar, or about as long. Raises `WorkerDied`."""

    def mark_idle(self) -> None:
        """Do not count the time until the next step as the host's: there is no work."""
        self._recorder.mark_idle()

    @abstractmethod
    def step_limit_s(self, num_tokens: int) -> float:
        """Return after how many seconds a step of this size counts as stuck."""

    def collective_rpc(self, method: str, args: tuple[Any, ...] = (), *, timeout_s: float | None = None) -> list[Any]:
        """Call one of `WORKER_METHODS` on every rank, after the steps and calls that were sent before, and return the
        results in rank order. `timeout_s`: `Limits.call_s` by default. Raises `WorkerError` (the worker's own error, with
        its traceback, or an invalid reply), `ExecutorTimeout` and `WorkerDied`."""
        return self._call(Call(call_id=0, method=method, args=list(args)), range(self.world_size), timeout_s).result()

    @abstractmethod
    def check_health(self) -> None:
        """Raise `WorkerDied` when a worker has ended or is stuck. Cheap enough to call every second."""

    def stats(self) -> ExecutorMetrics:
        """Return the metrics since the executor was made. Never blocks, and sends nothing."""
        return self._recorder.metrics(
            name=self.name,
            world_size=self.world_size,
            wanted_world_size=self._wanted_world_size,
            epoch=self._epoch,
            num_active_workers=self._num_active_workers(),
            num_restarts=max(0, self._num_starts - 1),
            num_blocks=self.num_device_blocks,
        )

    # --- for implementations ---

    @abstractmethod
    def _start_workers(self) -> list[ModelFacts]:
        """Start the workers of this epoch, or leave none behind. Returns the facts by rank."""

    @abstractmethod
    def _call(self, call: Call, ranks: range, limit_s: float | None) -> Future[list[Any]]:
        """Send a call, under an id of its own, to these ranks. Its outcome is the list of their results. `limit_s`: the
        default limit of `result`; `Limits.call_s` by default."""

    @abstractmethod
    def _discard_workers(self) -> None:
        """End the workers at once, in whatever state they are."""

    @abstractmethod
    def _num_active_workers(self) -> int:
        """Return the number of workers that run."""
