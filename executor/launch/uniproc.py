"""`UniprocExecutor`: the worker runs in this process. For notebooks, tests and debugging."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from millrace.executor.base import Executor
from millrace.executor.errors import StartError, StepLost, WorkerDied, WorkerError
from millrace.executor.phases import timed
from millrace.executor.rank.lost_device import keep_to_the_end
from millrace.executor.rank.worker import Worker
from millrace.executor.watchdog import Pace
from millrace.executor.wire.failures import is_interruption, needs_traceback, to_failure
from millrace.executor.wire.messages import Call, Failure, ModelFacts, StepPlan, StepResult, WorkerConfig

_SAMPLE_EVERY_S = 10.0
"""Time between two samples of the worker's device memory."""
_COMPILE_POLL_S = 0.001

logger = logging.getLogger("millrace.executor")


class UniprocExecutor(Executor):
    """Owns one worker object. On a CPU a step runs inside `execute_model`; on a GPU it begins there."""

    name = "uni"
    can_restart = True

    def __init__(self, config: WorkerConfig, **options: Any) -> None:
        """`log_level` has no effect: this process has its own."""
        super().__init__(config, **options)
        if self.world_size != 1:
            raise ValueError(f"executor: uni runs one rank, but {self.world_size} are configured; use mp")
        if _inherits_torch:  # a fork copies no threads, and OpenMP waits for the parent's forever
            raise ValueError(
                "executor: uni cannot run in this process, which was forked from one that had loaded torch; use mp, or "
                "multiprocessing's start method spawn"
            )
        self._worker: Worker | None = None
        self._steps: deque[_LaunchedStep] = deque()
        """Those whose results are not collected, the oldest first."""
        self._pace = Pace(self._limits)
        self._next_sample_s = 0.0
        self._has_lost_device = False

    def __repr__(self) -> str:
        return f"UniprocExecutor(epoch={self._epoch}, is_started={self._worker is not None})"

    # --- start and end ---

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
            _raise_interruption(error, handled)
            self._recorder.num_failed_workers += 1
            failure = to_failure(error)
            logger.debug("traceback of the worker:\n%s", failure.traceback)
            _release(error, failure, handled)  # its frames keep alive what was loaded so far
            raise StartError(phase, 0, failure.message, is_retryable=failure.is_retryable, failure=failure) from error
        self._worker = worker
        self._pace = Pace(self._limits, is_cpu=facts.device == "cpu")
        return [facts]

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        super().initialize_cache(num_device_blocks, num_host_blocks)
        self._do_idle_work()

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        super().wake_up(tags)
        self._do_idle_work()

    def _do_idle_work(self) -> None:
        """Let the worker do it now, since nothing of this executor runs between the steps."""
        worker = self._require_worker()
        if worker.has_idle_work:
            with timed(logger, "graphs"):
                while worker.has_idle_work:
                    worker.do_idle_work()

    def shutdown(self) -> None:
        self._discard_workers()

    def _discard_workers(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if self._has_lost_device:
            keep_to_the_end(worker)
            return
        try:
            worker.shutdown()
        except Exception as error:
            if is_interruption(error):
                raise
            logger.exception("the shutdown of the worker failed")

    def _num_active_workers(self) -> int:
        return int(self._worker is not None)

    # --- steps and calls ---

    def _call(self, call: Call, ranks: range, limit_s: float | None) -> _FinishedCall:
        method = getattr(self._require_worker(), call.method)
        began_s = time.monotonic()
        self._recorder.num_requests += 1
        done = _FinishedCall(lambda: [method(*call.args)])
        self._record(done, began_s)
        return done

    @property
    def is_asynchronous(self) -> bool:
        return self.facts.device != "cpu"

    def execute_model(self, plan: StepPlan) -> _LaunchedStep:
        worker, began_s = self._require_worker(), time.monotonic()
        assert not self.is_asleep
        self._recorder.num_requests += 1
        self._recorder.step_sent(began_s, 0, plan.depth - 1)
        if plan.depth == 1:
            self._steps.clear()  # the worker drops their results too
        launch = _FinishedCall(lambda: worker.launch(plan))
        step = _LaunchedStep(worker, launch, self._steps, lambda done: self._finish_step(worker, plan, began_s, done))
        self._steps.append(step)
        return step

    def _finish_step(self, worker: Worker, plan: StepPlan, began_s: float, done: _FinishedCall) -> None:
        if isinstance(done.outcome, StepResult):
            result, now_s = done.outcome, time.monotonic()
            num_tokens = len(result.token_ids) - len(result.failures)
            self._recorder.step_done(began_s, now_s, result.device_s, num_tokens)
            self._pace.measure(now_s - began_s, plan.num_tokens)
        self._record(done, began_s)
        self._sample_device(worker)

    def compile_grammar(self, number: int, grammar: str) -> None:
        self._require_worker().compile_grammar(number, grammar)

    @property
    def last_compiled(self) -> int:
        return self._worker.last_compiled if self._worker is not None else 0

    def wait_for_grammar(self, timeout_s: float) -> None:
        time.sleep(_COMPILE_POLL_S)

    def step_limit_s(self, num_tokens: int) -> float:
        # Nothing can end a step in this process, but the health of the engine can report that it is stuck.
        return self._pace.limit_s(num_tokens)

    def _sample_device(self, worker: Worker) -> None:
        if time.monotonic() >= self._next_sample_s:
            try:
                self._recorder.set_worker_stats([worker.stats()])
            except Exception as error:  # keep the last sample; if the device is lost, a step or a health check fails
                if is_interruption(error):
                    raise
                logger.exception("reading the worker's stats failed")
            self._next_sample_s = time.monotonic() + _SAMPLE_EVERY_S

    def _record(self, done: _FinishedCall, began_s: float) -> None:
        self._recorder.request_done(time.monotonic() - began_s, is_failure=done.error is not None)
        self._has_lost_device |= done.has_lost_device

    def check_health(self) -> None:
        worker = self._require_worker()
        if not self.is_asleep:  # another process may use the device while the worker sleeps
            check = _FinishedCall(worker.check_health)
            self._has_lost_device |= check.has_lost_device
            check.result()
            self._sample_device(worker)

    def _require_worker(self) -> Worker:
        if self._worker is None:
            raise WorkerDied(0, "the executor is not running")
        return self._worker


class _FinishedCall:
    """A future that runs its work when it is made, and keeps the result or the error. Implements `Future`."""

    def __init__(self, work: Any) -> None:
        self.outcome: Any = None
        self.error: WorkerError | None = None
        handled = sys.exception()
        try:
            self.outcome = work()
        except Exception as error:
            _raise_interruption(error, handled)
            failure = to_failure(error)
            if needs_traceback(failure):
                logger.error("%s", failure.traceback.rstrip())
            self.error = WorkerError(0, failure)
            # The frames keep every tensor of the step alive, and this object, until the next collection of cycles.
            _release(error, failure, handled)
            self.error.__cause__ = error

    @property
    def has_lost_device(self) -> bool:
        return self.error is not None and self.error.failure.cause == "device_lost"

    def result(self, timeout_s: float | None = None) -> Any:
        if self.error is not None:
            raise self.error
        return self.outcome


class _LaunchedStep:
    """The future of a step that has begun. Implements `Future`."""

    def __init__(
        self,
        worker: Worker,
        launch: _FinishedCall,
        steps: deque[_LaunchedStep],
        on_done: Callable[[_FinishedCall], None],
    ) -> None:
        """`steps`: those that are not collected, the oldest first."""
        self._worker = worker
        self._launch = launch
        self._steps = steps
        self._on_done = on_done
        self._collected: _FinishedCall | None = None

    def result(self, timeout_s: float | None = None) -> StepResult:
        while self._collected is None:
            if self not in self._steps:
                raise StepLost("an interruption has lost the result of the step")
            self._steps.popleft()._collect()
        result: StepResult = self._collected.result()
        return result

    def _collect(self) -> None:
        self._collected = self._launch if self._launch.error is not None else _FinishedCall(self._worker.collect)
        self._on_done(self._collected)


_inherits_torch = False
"""Whether this process was forked with torch in it."""


def _note_fork() -> None:
    global _inherits_torch
    _inherits_torch = "torch" in sys.modules


os.register_at_fork(after_in_child=_note_fork)


def _raise_interruption(error: Exception, handled: BaseException | None) -> None:
    """Raise what a signal handler has raised, if `error` is that or comes from it: nothing has failed, as with Ctrl-C.
    `handled`: what the caller was handling before."""
    causes: list[BaseException] = [error]
    for cause in causes:
        if is_interruption(cause):
            raise cause
        for earlier in (cause.__cause__, cause.__context__):
            if earlier is not None and earlier is not handled and all(earlier is not known for known in causes):
                causes.append(earlier)


def _release(error: BaseException, failure: Failure, handled: BaseException | None) -> None:
    """Release what the frames of an error hold, unless the device is lost."""
    if failure.cause == "device_lost":
        keep_to_the_end(error.__traceback__)
    _drop_frames(error, handled)


def _drop_frames(error: BaseException, handled: BaseException | None) -> None:
    """Drop the frames of `error` and of its causes, except those of `handled`, which the caller was handling before."""
    error.__traceback__ = None
    for earlier in (error.__cause__, error.__context__):
        if earlier is not None and earlier is not handled and earlier.__traceback__ is not None:
            _drop_frames(earlier, handled)
