"""Brings the workers up with their KV pool, and up again: pauses between attempts, fewer ranks when some do not come back,
more later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from engine_service.errors import ConfigurationError, EngineDead
from executor.base import Executor
from executor.errors import ExecutorTimeout, StartError, WorkerDied, WorkerError
from executor.sizes import smaller_sizes

logger = logging.getLogger("millrace.engine")

RESTART_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses before the attempts to bring the workers back; after the last one there are fewer ranks, or no engine."""

GROW_AFTER_S = 60.0
"""An engine that runs with fewer ranks than it should tries its full size after this long, then after twice as long, ..."""
MAX_GROW_AFTER_S = 3600.0


class Recovery:
    """Owns the decision with how many ranks the workers run. Raises `ConfigurationError` when no attempt can succeed, and
    `EngineDead` when none did."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._wanted = executor.parallel_sizes
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
        for sizes in self._sizes():
            error = self._with_retries(attempt)
            if error is None:
                return
            if sizes is None:
                raise _dead(error)
            logger.error("rank %d does not come back; falling to %s ranks", error.rank, _say(sizes))
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
        """The last error when all attempts failed."""
        last_error = None
        for pause_s in RESTART_BACKOFF_S:
            time.sleep(pause_s)
            try:
                self._attempt(attempt)
                return None
            except StartError as error:
                if not error.is_retryable:
                    raise ConfigurationError(str(error)) from error
                logger.error("%s; trying again", error)
                last_error = error
                attempt = self._executor.restart  # the workers may be up, without a pool
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


def _dead(error: StartError) -> EngineDead:
    dead = EngineDead(f"the workers do not start: {error}", error.failure.cause if error.failure else "error")
    dead.__cause__ = error
    return dead


def _say(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]} x {sizes[1]}"
