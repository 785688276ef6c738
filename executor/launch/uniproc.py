"""`UniprocExecutor`: the worker lives in this process. For notebooks, tests and debugging."""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from millrace.executor.base import Executor
from millrace.executor.errors import Asleep, StartError, WorkerDied, WorkerError
from millrace.executor.limits import Limits
from millrace.executor.rank.worker import Worker
from millrace.executor.watchdog import Pace
from millrace.executor.wire.failures import needs_traceback, to_failure
from millrace.executor.wire.messages import ModelFacts, StepPlan, StepResult, WorkerConfig

_LOOK_EVERY_S = 10.0
"""How often it is looked how much device memory the worker holds."""

logger = logging.getLogger("millrace.executor")


class UniprocExecutor(Executor):
    """Owns one worker object. A step runs inside `execute_model`; its future is always done."""

    name = "uni"
    can_restart = True

    def __init__(
        self,
        config: WorkerConfig,
        *,
        worker_module: str = "millrace.worker",
        log_level: str = "INFO",
        limits: Limits | None = None,
    ) -> None:
        """Takes the other executors' options; `log_level` is this process's own affair."""
        super().__init__(config, limits)
        if self.world_size != 1:
            raise ValueError(f"executor uni runs one rank, {self.world_size} are wanted; take mp")
        self._worker_module = worker_module
        self._worker: Worker | None = None
        self._pace = Pace(self._limits)
        self._look_at_s = 0.0

    def __repr__(self) -> str:
        return f"UniprocExecutor(epoch={self._epoch}, is_started={self._worker is not None})"

    # --- life ---

    def _start_workers(self) -> list[ModelFacts]:
        phase = "import"

        def enter(name: str) -> None:
            nonlocal phase
            phase = name

        handled = sys.exception()
        try:
            create_worker = importlib.import_module(self._worker_module).create_worker
            worker: Worker = create_worker(0, 1, self._epoch, self._config, "")
            facts = worker.start(enter)
        except Exception as error:
            self._recorder.num_failed_workers += 1
            failure = to_failure(error)
            logger.debug("traceback of the worker:\n%s", failure.traceback)
            _drop_frames(error, handled)  # they hold what was loaded so far
            raise StartError(phase, 0, failure.message, is_retryable=failure.is_retryable, failure=failure) from error
        self._worker = worker
        self._pace = Pace(self._limits, is_cpu=facts.device == "cpu")
        return [facts]

    def shutdown(self) -> None:
        self._discard_workers()

    def _discard_workers(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            worker.shutdown()
        except Exception:  # a lost device refuses this too; what comes next says whether it is lost for good
            logger.exception("the worker did not end in order")

    def _num_active_workers(self) -> int:
        return int(self._worker is not None)

    # --- work ---

    def _call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ranks: Sequence[int],
        reply_rank: int | None = None,
        limit_s: float | None = None,
    ) -> _Done:
        worker, began_s = self._require_worker(), time.monotonic()
        self._recorder.sent(began_s)
        done = _Done(lambda: getattr(worker, method)(*args, **kwargs))
        self._record(done, began_s)
        return done.as_list() if reply_rank is None else done

    def execute_model(self, plan: StepPlan) -> _Done:
        worker, began_s = self._require_worker(), time.monotonic()
        if self._missing:
            raise Asleep(f"the worker sleeps: it misses {', '.join(sorted(self._missing))}")
        self._recorder.sent(began_s)
        self._recorder.sent_step(began_s, 0, 0)
        done = _Done(lambda: worker.execute_model(plan))
        if isinstance(done.outcome, StepResult):
            result, now_s = done.outcome, time.monotonic()
            self._recorder.completed_step(began_s, now_s, result.device_s, len(result.token_ids))
            self._pace.measure(now_s - began_s, sum(row.num_tokens for row in plan.rows))
        self._record(done, began_s)
        self._look(worker)
        return done

    def step_limit_s(self, num_tokens: int) -> float:
        """Nobody can end a step in this process, but its health can say that it is stuck."""
        return self._pace.limit_s(num_tokens)

    def _look(self, worker: Worker) -> None:
        if time.monotonic() >= self._look_at_s:
            try:
                self._recorder.saw_stats([worker.stats()])
            except Exception:  # the last figures stay; what is wrong with the device, a step or a check will tell
                logger.exception("the worker can't tell its figures")
            self._look_at_s = time.monotonic() + _LOOK_EVERY_S

    def _record(self, done: _Done, began_s: float) -> None:
        now_s = time.monotonic()
        self._recorder.completed(now_s - began_s, now_s, is_failure=done.is_failure)

    def check_health(self) -> None:
        worker = self._require_worker()
        if not self._missing:  # the device may be somebody else's while the worker sleeps
            _Done(worker.check_health).result()
            self._look(worker)

    def _require_worker(self) -> Worker:
        if self._worker is None:
            raise WorkerDied(0, "the executor is not running")
        return self._worker


class _Done:
    """A future that ran when it was made; it keeps the result, or the error for whoever asks."""

    def __init__(self, work: Any) -> None:
        self.outcome: Any = None
        self._error: WorkerError | None = None
        handled = sys.exception()
        try:
            self.outcome = work()
        except Exception as error:
            failure = to_failure(error)
            if needs_traceback(failure):
                logger.error("%s", failure.traceback.rstrip())
            self._error = WorkerError(0, failure)
            # They hold every tensor of the step, and this object: until the next collection of cycles.
            _drop_frames(error, handled)
            self._error.__cause__ = error

    @property
    def is_failure(self) -> bool:
        return self._error is not None

    def done(self) -> bool:
        return True

    def result(self, timeout_s: float | None = None) -> Any:
        if self._error is not None:
            raise self._error
        return self.outcome

    def as_list(self) -> _Done:
        """The same outcome, as the one rank's entry of a list."""
        self.outcome = [self.outcome]
        return self


def _drop_frames(error: BaseException, handled: BaseException | None) -> None:
    """Let go of what the frames hold that `error` went through, and the errors that led to it, but for what our caller was
    handling before: that is not ours."""
    error.__traceback__ = None
    for earlier in (error.__cause__, error.__context__):
        if earlier is not None and earlier is not handled and earlier.__traceback__ is not None:
            _drop_frames(earlier, handled)
