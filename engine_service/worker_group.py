"""The workers as a group: start them, replace lost ones, run with fewer ranks and grow again, and find who is to blame."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec

from millrace.engine_service.core.block_pool import BlockPool
from millrace.engine_service.core.crash_policy import make_probe
from millrace.engine_service.core.host_tier import HostTier
from millrace.engine_service.core.scheduler import Scheduler, SchedulerConfig
from millrace.engine_service.core.sequence import Sequence
from millrace.engine_service.errors import ConfigurationError, EngineDead
from millrace.executor.base import Executor
from millrace.executor.errors import ExecutorError, ExecutorTimeout, StartError, WorkerDied, WorkerError
from millrace.executor.sizes import smaller_sizes
from millrace.results.errors import one_line

logger = logging.getLogger("millrace.engine")

TOO_LARGE = "too_large"
"""The kind of `SequenceFailure` of a sequence that an engine with all its ranks could compute."""

RESTART_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses before the attempts to start the workers with the same number of ranks."""
MAX_FRUITLESS_RESTARTS = 10
"""Restarts in a row without a computed step. At the next loss the machine is at fault, and the engine ends."""
GROW_AFTER_S = 60.0
"""Time after which an engine with fewer ranks tries its full size. It doubles with each failed attempt."""
MAX_GROW_AFTER_S = 3600.0

CACHE_SHARE = 0.25
"""Share of an automatic KV pool in host memory that prompts may fill which no running sequence uses."""

_LESS_MEMORY = "lower kv_cache_memory, max_num_batched_tokens or max_num_seqs, or use a smaller model"
_LOADING = "load_model"
_DEVICE_ERROR, _OF_MODEL = "DeviceError", ("ModelError", "WeightsDiffer")
"""Errors of the worker, by name: the engine does not import the worker."""


class SequenceFailure(msgspec.Struct, frozen=True):
    """Why a generation ended without a result."""

    kind: str
    message: str


FailedSequence: TypeAlias = tuple[Sequence, SequenceFailure]
"""A sequence that did not survive the end of an epoch. The scheduler has dropped it."""


class WorkerGroup:
    """Decides when the workers are replaced, with how many ranks, and which sequences survive that.

    A later epoch begins with the sequences of the one before. `start` raises `ConfigurationError` when the workers refuse
    the options, since another attempt would end the same way. Options that have worked once, or that only fewer ranks
    refuse, are not the cause: then, and when all attempts fail, a method raises `EngineDead` with the first failure.
    """

    def __init__(self, executor: Executor, config: SchedulerConfig) -> None:
        self._executor = executor
        self._config = config
        self._full_sizes = executor.parallel_sizes
        self._has_run = False
        self._num_fruitless_restarts = 0
        self._grow_after_s = GROW_AFTER_S
        self._grow_at_s = float("inf")
        self._checksums_by_sizes: dict[tuple[int, int], list[int]] = {}
        """Checksums of the weights by rank, from the first start with these parallel sizes, or from `change_weights`."""
        self.scheduler: Scheduler  # from `start` on
        self.restart_reason: str | None = None
        """Set while the workers are replaced. Other threads may read it."""
        self._last_loss = ""
        """Why the workers were replaced last."""

    def start(self) -> None:
        """Start the workers and make the scheduler, which stays the same in all epochs."""
        self._bring_up(self._executor.start)
        self._check_weights()
        config = self._config
        if self._executor.facts.is_recurrent and config.enable_prefix_caching:
            logger.info("prefix caching is off, since the model has recurrent layers: their states are not kept")
            config = msgspec.structs.replace(config, enable_prefix_caching=False)
        self.scheduler = Scheduler(config, self._make_pool(), self._executor.epoch)

    def restart(self, error: ExecutorError) -> list[FailedSequence]:
        """Replace the workers after this error. Raises `EngineDead` when that fails or does not help."""
        if not self._executor.can_restart:
            raise _dead(f"{error}; restart the program that started the workers", error)
        logger.error("%s; restarting the workers", error)
        self._num_fruitless_restarts += 1
        if self._num_fruitless_restarts > MAX_FRUITLESS_RESTARTS:
            raise _dead(f"{error}; the {self._num_fruitless_restarts}th loss in a row without a computed step", error)
        self._last_loss = one_line(str(error))
        with self._restarting(self._last_loss):
            self._bring_up(self._executor.restart)
        return self._begin_epoch()

    def is_growth_due(self) -> bool:
        """Whether ranks are missing and it is time to try the full size."""
        return self._has_fewer_ranks and time.monotonic() >= self._grow_at_s

    def grow(self) -> list[FailedSequence]:
        """Make one attempt with all ranks; if it fails, continue with those of before. No step may be in flight."""
        small = self._executor.parallel_sizes
        with self._restarting("all ranks are tried again"):
            logger.info("trying to start all %s ranks", _format_sizes(self._full_sizes))
            self._executor.resize(*self._full_sizes)
            try:
                self._attempt(self._executor.restart)
            except StartError as error:
                logger.warning("%s; continuing with %s ranks", error, _format_sizes(small))
                self._grow_after_s = min(2 * self._grow_after_s, MAX_GROW_AFTER_S)
                self._fall_to(small, error.rank)
                self._bring_up(self._executor.restart)
            else:
                self._grow_after_s = GROW_AFTER_S
                logger.info("all %s ranks are back", _format_sizes(self._full_sizes))
        return self._begin_epoch()

    def count_good_step(self) -> None:
        """Note that the workers have computed a step."""
        self._num_fruitless_restarts = 0

    def change_weights(self, directory: str) -> None:
        """Let the workers sleep, and wake up with the weights in `directory`, which later ones have to load too. After an
        error, restart the workers or let them sleep."""
        self._checksums_by_sizes.clear()
        self._executor.change_weights(directory)
        self._executor.sleep(2)
        self._executor.wake_up()
        self._check_weights()

    @contextlib.contextmanager
    def _restarting(self, reason: str) -> Iterator[None]:
        self.restart_reason = reason
        try:
            yield
        finally:
            self.restart_reason = None

    # --- attempts ---

    @property
    def _has_fewer_ranks(self) -> bool:
        return self._executor.parallel_sizes != self._full_sizes

    def _bring_up(self, attempt: Callable[[], object]) -> None:
        """Start the workers with the present sizes, then with smaller ones until a start succeeds."""
        first_error = None
        for smaller in self._fallback_sizes():
            error = self._try_with_pauses(attempt)
            if error is None:
                self._has_run = True
                return
            if not (error.is_retryable or self._has_run or self._has_fewer_ranks):
                # What is wrong with a model's directory is the same for each rank. Other errors need the rank and the phase.
                is_of_model = error.failure is not None and error.failure.kind in _OF_MODEL and error.phase == _LOADING
                raise ConfigurationError(error.message if is_of_model else str(error)) from error
            first_error = first_error or error
            if smaller is None:
                also = f"; with fewer ranks: {error}" if error is not first_error else ""
                raise _dead(f"the workers do not start: {first_error}{also}", first_error)
            logger.error("%s; continuing with %s ranks", error, _format_sizes(smaller))
            self._fall_to(smaller, error.rank)
            attempt = self._executor.restart

    def _fallback_sizes(self) -> Iterator[tuple[int, int] | None]:
        """Yield the sizes to fall to, one for each start that fails; None when no smaller ones are left."""
        if self._executor.can_resize:
            yield from smaller_sizes(*self._executor.parallel_sizes)
        yield None

    def _fall_to(self, sizes: tuple[int, int], lost_rank: int) -> None:
        self._executor.resize(*sizes, lost_rank=lost_rank)
        self._grow_at_s = time.monotonic() + self._grow_after_s

    def _try_with_pauses(self, attempt: Callable[[], object]) -> StartError | None:
        """Return the last error when every attempt failed or another one is of no use; None when one succeeded."""
        last_error = None
        for pause_s in RESTART_BACKOFF_S:
            if last_error is not None:
                logger.error("%s; trying again", last_error)
                attempt = self._executor.restart  # the workers may be up, without a pool
            time.sleep(pause_s)
            try:
                self._attempt(attempt)
                return None
            except StartError as error:
                last_error = error
            if not (last_error.is_retryable and self._executor.can_restart):
                break
        return last_error

    def _attempt(self, attempt: Callable[[], object]) -> None:
        """Start the workers and allocate their KV pool. Raises `StartError` for every kind of failure."""
        try:
            attempt()
            if self._executor.num_device_blocks == 0:
                self._executor.initialize_cache(*self._executor.determine_num_available_blocks())
        except WorkerError as error:
            retryable, failure = error.failure.is_retryable, error.failure
            raise StartError("kv_pool", error.rank, failure.message, is_retryable=retryable, failure=failure) from error
        except (WorkerDied, ExecutorTimeout) as error:
            reason = error.reason if isinstance(error, WorkerDied) else str(error)
            raise StartError("kv_pool", error.rank, reason, is_retryable=True) from error

    # --- the next epoch ---

    def _begin_epoch(self) -> list[FailedSequence]:
        """Move the sequences to the new workers. Return those that are quarantined or that fit no more."""
        self._check_weights()
        quarantined = self.scheduler.restart(self._executor.epoch)
        pool, executor = self.scheduler.pool, self._executor
        is_same_size = (pool.num_blocks, pool.host.num_blocks) == (executor.num_device_blocks, executor.num_host_blocks)
        too_large = [] if is_same_size else self.scheduler.replace_pool(self._make_pool())
        if quarantined:
            self._probe_machine()
        return [(sequence, _crashed(sequence, self._last_loss)) for sequence in quarantined] + [
            (sequence, no_longer_fits(self.scheduler.pool)) for sequence in too_large
        ]

    def _make_pool(self) -> BlockPool:
        executor = self._executor
        num_blocks = executor.num_device_blocks
        is_frugal = self._config.is_pool_automatic and executor.facts.device == "cpu"
        num_reserved = int((1 - CACHE_SHARE) * num_blocks) if is_frugal else 0
        host = HostTier(executor.num_host_blocks, executor.swap_s, is_forced=self._config.force_swap)
        return BlockPool(num_blocks, executor.facts.kv_layout, host=host, num_reserved=num_reserved)

    def _check_weights(self) -> None:
        """Raise `EngineDead` when the new workers loaded other weights: a generation must end with the model that began
        it. The first start with these parallel sizes has nothing to compare with."""
        now = self._executor.weights_checksums
        before = self._checksums_by_sizes.setdefault(self._executor.parallel_sizes, now)
        changed = [rank for rank, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]
        if changed:
            self._executor.shutdown()
            raise EngineDead(
                f"rank {changed[0]}: the weights are not what they were before the workers were replaced; restore the "
                "model's files and restart the engine, or let LLM.reload_weights read other weights"
            )

    def _probe_machine(self) -> None:
        """Compute one token of a harmless sequence. If that fails too, the machine is to blame, and not a sequence."""
        self.scheduler.add(make_probe(), is_first=True)
        plan = self.scheduler.schedule()
        assert plan is not None
        try:
            self.scheduler.apply(self._executor.execute_model(plan).result())
        except ExecutorError as error:
            raise _dead(f"the workers can't even compute one token: {error}", error) from error


def _dead(message: str, error: ExecutorError) -> EngineDead:
    """Return the error that ends the engine because of `error`."""
    failure = error.failure if isinstance(error, WorkerError | StartError) else None
    cause = failure.cause if failure is not None else "error"
    if failure is not None and failure.kind == _DEVICE_ERROR:  # a device that was usable before
        cause = "device_lost"
    if cause == "out_of_memory":
        message = f"{message}; {_LESS_MEMORY}"
    dead = EngineDead(message, cause)
    dead.__cause__ = error
    return dead


def no_longer_fits(pool: BlockPool) -> SequenceFailure:
    """The failure of a sequence that fitted when it was admitted, before ranks were lost."""
    message = f"with the remaining ranks the KV pool holds {pool.longest_sequence} tokens, too few for this job"
    return SequenceFailure(TOO_LARGE, message)


def _crashed(sequence: Sequence, last_loss: str) -> SequenceFailure:
    times = f"the workers were lost {sequence.crash_count} times while they computed this job, the last times alone"
    return SequenceFailure("crashed", f"{times}: {last_loss}")


def _format_sizes(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]} x {sizes[1]}"
