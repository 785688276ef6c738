"""Brings the workers up with their KV pool, and up again: pauses between attempts, fewer ranks when some do not come back,
more later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from millrace.engine_service.errors import ConfigurationError, EngineDead
from millrace.executor.base import Executor
from millrace.executor.errors import ExecutorTimeout, StartError, WorkerDied, WorkerError
from millrace.executor.sizes import smaller_sizes
from millrace.executor.wire.messages import Failure

logger = logging.getLogger("millrace.engine")

RESTART_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses before the attempts to bring the workers back; after the last one there are fewer ranks, or no engine."""

_DEVICE_ERROR = "DeviceError"
"""The worker's error, by name: this side does not import it."""

GROW_AFTER_S = 60.0
"""An engine that runs with fewer ranks than it should tries its full size after this long, then after twice as long, ..."""
MAX_GROW_AFTER_S = 3600.0


class Recovery:
    """Owns the decision with how many ranks the workers run.

    Raises `ConfigurationError` when they refuse the very start that was asked for: another attempt would end the same way.
    Options that have worked once, or with which fewer ranks than asked for can't run, are not to blame: then, and when no
    attempt succeeded, it raises `EngineDead`, by the failure at the sizes with which it began."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._wanted = executor.parallel_sizes
        self._has_run = False
        self._grow_after_s = GROW_AFTER_S
        self._grow_at_s = float("inf")

    @property
    def is_small(self) -> bool:
        """Whether ranks are missing."""
        return self._executor.parallel_sizes != self._wanted

    def start(self) -> None:
        self._bring_up(self._executor.start)

    def restart(self) -> None:
        self._bring_up(self._executor.restart)

    def is_time_to_grow(self) -> bool:
        return self.is_small and time.monotonic() >= self._grow_at_s

    def grow(self) -> None:
        """One attempt at full size; when it fails, all is as before but for the time."""
        small = self._executor.parallel_sizes
        logger.info("trying whether all %s ranks are back", _say(self._wanted))
        self._executor.resize(*self._wanted)
        try:
            self._attempt(self._executor.restart)
        except StartError as error:
            logger.warning("%s; going on with %s ranks", error, _say(small))
            self._grow_after_s = min(2 * self._grow_after_s, MAX_GROW_AFTER_S)
            self._fall_to(small, error.rank)
            self.restart()
        else:
            self._grow_after_s = GROW_AFTER_S
            logger.warning("all %s ranks are back", _say(self._wanted))

    def _bring_up(self, attempt: Callable[[], object]) -> None:
        first_error = None
        for sizes in self._sizes():
            error = self._with_retries(attempt)
            if error is None:
                self._has_run = True
                return
            if not (error.is_retryable or self._has_run or self.is_small):
                raise ConfigurationError(str(error)) from error
            first_error = first_error or error
            if sizes is None:
                raise _dead(first_error, error)
            logger.error("%s; falling to %s ranks", error, _say(sizes))
            self._fall_to(sizes, error.rank)
            attempt = self._executor.restart

    def _sizes(self) -> Iterator[tuple[int, int] | None]:
        """What to fall to when the present size, and then each that came out of here, fails. None: nothing is left."""
        if self._executor.can_resize:
            yield from smaller_sizes(*self._executor.parallel_sizes)
        yield None

    def _fall_to(self, sizes: tuple[int, int], lost_rank: int) -> None:
        self._executor.resize(*sizes, lost_rank=lost_rank)
        self._grow_at_s = time.monotonic() + self._grow_after_s

    def _with_retries(self, attempt: Callable[[], object]) -> StartError | None:
        """The last error when all attempts failed, or when there is no use in another one."""
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
        """The workers and their pool. Raises `StartError`, whatever went wrong."""
        try:
            attempt()
            if not self._executor.has_cache:
                self._executor.initialize_cache(*self._executor.determine_num_available_blocks())
        except WorkerError as error:
            retryable, failure = error.failure.is_retryable, error.failure
            raise StartError("kv_pool", error.rank, failure.message, is_retryable=retryable, failure=failure) from error
        except WorkerDied as error:
            raise StartError("kv_pool", error.rank, error.reason, is_retryable=True) from error
        except ExecutorTimeout as error:
            raise StartError("kv_pool", error.rank, str(error), is_retryable=True) from error


def _dead(first: StartError, last: StartError) -> EngineDead:
    """`last`: with the fewest ranks."""
    message = f"the workers do not start: {first}"
    if last is not first:
        message += f"; with fewer ranks: {last}"
    dead = EngineDead(message, _cause(first.failure))
    dead.__cause__ = first
    return dead


def _cause(failure: Failure | None) -> str:
    """As in `EngineDead`. A device that can't be used, where one could be before, is lost."""
    if failure is None:
        return "error"
    return "device_lost" if failure.kind == _DEVICE_ERROR else failure.cause


def _say(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]} x {sizes[1]}"
