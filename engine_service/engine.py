"""The engine loop: schedule, execute, apply. It does not know Redis; `serving/service.py` and `offline.py` build on it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from copy import deepcopy

import msgspec

from millrace.engine_service.core.scheduler import Advance, Scheduler, SchedulerConfig, SchedulerStats
from millrace.engine_service.core.sequence import StopReason
from millrace.engine_service.errors import Asleep, EngineDead, EngineError, WorkersLost
from millrace.engine_service.generation import Generation
from millrace.engine_service.worker_group import FailedSequence, SequenceFailure, WorkerGroup, no_longer_fits
from millrace.executor.base import Executor, StepFuture
from millrace.executor.errors import ExecutorError, StepLost, WorkerError
from millrace.executor.histogram import STEP_BOUNDS_S, Histogram
from millrace.executor.metrics import ExecutorMetrics
from millrace.executor.wire.messages import ModelFacts, SeqId, StepPlan

logger = logging.getLogger("millrace.engine")

_HEALTH_CHECK_S = 10.0
"""Time for the workers to show that they can go on after one of them ran out of memory."""

_GRAMMAR_WAIT_S = 0.01
"""How long a step without rows waits for a grammar. A sequence that arrives meanwhile waits as long."""

_WEIGHTS_CHANGED = "WeightsChanged"
"""An error of the worker, by name: the engine does not import the worker."""


class Progress(msgspec.Struct, frozen=True):
    """What changed for one generation: it has ended, failed, or, if its sequence is followed, got a token."""

    generation: Generation
    finish_reason: StopReason | None
    """Set when the generation has ended. The scheduler has dropped its sequence."""
    failure: SequenceFailure | None = None


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one engine, its executor and its scheduler."""

    executor: ExecutorMetrics
    scheduler: SchedulerStats
    inter_token_s: Histogram
    """From one token of a sequence to the next, where each is of the step after the last one."""
    pool_use: float
    """Share of the KV pool's blocks that sequences hold, 0 to 1."""
    token_budget: int
    """Tokens that a step may have now; less than configured after the device ran out of memory."""
    sleep_level: int


class Engine:
    """Owns the executor, the scheduler and the open generations. One thread uses it, except for the last section."""

    def __init__(self, executor: Executor, config: SchedulerConfig) -> None:
        self._executor = executor
        self._generations: dict[SeqId, Generation] = {}
        self._workers = WorkerGroup(executor, config)
        self._run_ahead = config.run_ahead
        self._in_flight: deque[tuple[StepPlan, StepFuture]] = deque()
        """Steps that were sent to the workers and have no result yet, oldest first."""
        self._inter_token_s = Histogram(STEP_BOUNDS_S)
        self._result_s: dict[int, float] = {}
        """By micro-batch: when its last result came."""
        self._pending_updates: list[Progress] = []
        """Changes from outside of `step`, which returns them with its own."""
        self._deepest_sleep = 0
        self._is_draining = False
        self._step_limits: tuple[float, float] | None = None
        """For the step that the engine waits for: when the wait began, and when it counts as stuck (monotonic clock)."""
        self._facts: ModelFacts | None = None

    def __repr__(self) -> str:
        scheduler = self.scheduler if self.is_started else None
        return f"Engine({len(self._generations)} generations, {scheduler}, {self._executor})"

    # --- start, sleep, shutdown ---

    def start(self) -> ModelFacts:
        """Start the workers and make the KV pool. Raises `ConfigurationError` when this can't work, else `EngineDead`."""
        self._workers.start()
        facts, capacity = self._executor.facts, self.scheduler.pool.longest_sequence
        self._facts = msgspec.structs.replace(facts, max_model_len=min(facts.max_model_len, capacity))
        if capacity < facts.max_model_len:
            logger.warning(
                "the KV pool holds %d tokens, so sequences end there and not at the model's %d; for longer ones increase "
                "num_blocks, kv_cache_memory or gpu_memory_utilization",
                capacity,
                facts.max_model_len,
            )
        return self._facts

    def shutdown(self) -> None:
        """Stop the workers for good. May be called at any time, any number of times."""
        self._is_draining = True
        self._in_flight.clear()
        self._executor.shutdown()

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def begin_drain(self) -> None:
        """Stop replacing lost workers, since the process is about to exit. Signal handlers may call it."""
        self._is_draining = True

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory until `wake_up`; see `Executor.sleep`. Open generations keep their tokens and wait."""
        before = self.sleep_level
        self._pending_updates += self._collect_all()
        try:
            self._executor.sleep(level)
            self._executor.worker_stats()
        except ExecutorError as error:
            self._pending_updates += self._restart(error)
            raise EngineError(f"the workers did not fall asleep and were restarted: {error}") from error
        self._deepest_sleep = max(level, before)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Restore everything, or what `tags` name; see `Executor.wake_up`. Workers that died meanwhile are replaced.

        Raises `EngineDead` when the weights have changed, since open generations can't go on with others, and
        `WorkersLost` while the engine drains.
        """
        if not self._executor.is_asleep:
            return
        try:
            self._executor.wake_up(tags)
            self._executor.worker_stats()
        except ExecutorError as error:
            if isinstance(error, WorkerError) and error.failure.kind == _WEIGHTS_CHANGED:
                raise EngineDead(str(error)) from error
            self._pending_updates += self._restart(error)
        else:
            self.scheduler.restart(self._executor.epoch)

    def reload_weights(self, directory: str) -> None:
        """Replace the weights by those in `directory`, of the same shapes, and be awake, without cached prompts. No
        generation may be open. After an `EngineError` because of wrong files the engine sleeps at level 2."""
        assert not self._generations
        self._collect_all()
        try:
            self._workers.change_weights(directory)
            self._executor.worker_stats()
        except ExecutorError as error:
            if isinstance(error, WorkerError) and error.failure.cause == "error":
                self.sleep(2)  # other ranks may have loaded their part
                rule = "the weights are gone: call reload_weights again, with the directory of a good checkpoint"
                raise EngineError(f"{error}; {rule}") from error
            self._restart(error)
        else:
            self.scheduler.restart(self._executor.epoch)

    # --- generations ---

    @property
    def facts(self) -> ModelFacts:
        assert self._facts is not None, "the engine has not been started"
        return self._facts

    @property
    def scheduler(self) -> Scheduler:
        return self._workers.scheduler

    @property
    def has_work(self) -> bool:
        return bool(self._pending_updates or self._in_flight) or self.scheduler.has_work

    def add(self, generation: Generation) -> None:
        """Queue a generation that has not ended yet."""
        assert generation.finish_reason is None
        if not self.scheduler.fits(generation.sequence):
            self._pending_updates.append(Progress(generation, None, no_longer_fits(self.scheduler.pool)))
            return
        self._generations[generation.sequence.seq_id] = generation
        self.scheduler.add(generation.sequence)

    def abort(self, generation: Generation) -> None:
        """Drop a generation; its blocks are free for the next step. Does nothing when it has ended."""
        self._pending_updates = [one for one in self._pending_updates if one.generation is not generation]
        if self._generations.pop(generation.sequence.seq_id, None) is not None:
            self.scheduler.remove(generation.sequence)
            self._mark_idle()

    # --- steps ---

    def step(self) -> list[Progress]:
        """Send as many steps as may be in flight, then wait for the oldest one. Return what changed, which may be nothing.

        Raises `Asleep` while the engine sleeps, `WorkersLost` while it drains, and `EngineDead`.
        """
        if self._executor.is_asleep:
            raise Asleep("the engine sleeps: call wake_up first")
        progress, self._pending_updates = self._pending_updates, []
        if self._workers.is_growth_due() and not self._is_draining:
            progress += self._collect_all() + self._fail_lost(self._workers.grow())
        progress += self._send_steps()
        if self._in_flight:
            progress += self._collect()
        if self.scheduler.has_held:
            progress += self._compile_grammars()
        return progress

    def check_workers(self) -> None:
        """Replace workers that died while the engine was idle, and try all ranks when some were missing.

        Workers that die asleep are not replaced before `wake_up`: until then another program may use the device.
        """
        try:
            self._executor.check_health()
        except ExecutorError as error:
            if not self._executor.is_asleep and not self._is_draining:
                self._pending_updates += self._restart(error)
            return
        if not self._executor.is_asleep and self._workers.is_growth_due():
            self._pending_updates += self._fail_lost(self._workers.grow())

    def _compile_grammars(self) -> list[Progress]:
        """Announce the grammars of waiting sequences to the workers, and let those be admitted whose grammars are compiled.
        Wait for a grammar if there is nothing else to do. Return what changed when the workers were lost."""
        try:
            for number, grammar in self.scheduler.take_grammars():
                self._executor.compile_grammar(number, grammar)
            if self.scheduler.has_only_held:
                self._executor.wait_for_grammar(_GRAMMAR_WAIT_S)
        except ExecutorError as error:
            return self._restart(error)
        self.scheduler.set_compiled(self._executor.last_compiled)
        return []

    def _send_steps(self) -> list[Progress]:
        """Send one step for each stage, and with run-ahead one more. Return what changed when the workers were lost."""
        num_stages = self._executor.parallel_sizes[1]
        run_ahead = self._executor.is_asynchronous if self._run_ahead is None else self._run_ahead
        while (plan := self.scheduler.schedule(num_stages, run_ahead=run_ahead)) is not None:
            self._set_step_limits(plan)
            for new in plan.new:
                generation = self._generations[new.seq_id]
                generation.scheduled_s = generation.scheduled_s or time.time()
            try:
                self._in_flight.append((plan, self._executor.execute_model(plan)))
            except ExecutorError as error:
                return self._handle_step_error(error, plan)
            except BaseException:  # interrupted: the workers may have this step or not
                self._requeue_in_flight()
                raise
        return []

    def _collect(self) -> list[Progress]:
        """Wait for the oldest step in flight and apply its result."""
        plan, future = self._in_flight[0]
        self._set_step_limits(plan)
        try:
            result = future.result()
        except ExecutorError as error:
            return self._handle_step_error(error, plan)
        try:
            self._in_flight.popleft()
            self._step_limits = None
            self._workers.count_good_step()
            self._record_intervals(plan)
            progress = [self._apply(advance) for advance in self.scheduler.apply(result)]
            self._mark_idle()
            return progress
        except BaseException:  # interrupted: this step can't be collected again
            self._requeue_in_flight()
            raise

    def _collect_all(self) -> list[Progress]:
        progress: list[Progress] = []
        while self._in_flight:
            progress += self._collect()
        return progress

    def _apply(self, advance: Advance) -> Progress:
        generation = self._generations[advance.sequence.seq_id]
        if advance.failure is not None:
            del self._generations[advance.sequence.seq_id]
            return Progress(generation, None, SequenceFailure(advance.failure.kind, advance.failure.message))
        reason = generation.advance(advance.finish_reason)
        if reason is not None:
            self.abort(generation)
        return Progress(generation, reason)

    def _mark_idle(self) -> None:
        """Exclude the time without work from the host's time."""
        if not self._in_flight and not self.scheduler.has_work:
            self._executor.mark_idle()

    def _record_intervals(self, plan: StepPlan) -> None:
        """Count the time since the last step of the micro-batch once for each row that has a token of both steps."""
        now_s = time.monotonic()
        num_decodes = plan.num_tokens - sum(row.num_tokens for row in plan.rows)
        if num_decodes:
            self._inter_token_s.add(now_s - self._result_s[plan.micro_batch], num_decodes)
        self._result_s[plan.micro_batch] = now_s

    def _set_step_limits(self, plan: StepPlan) -> None:
        now_s = time.monotonic()
        self._step_limits = (now_s, now_s + self._executor.step_limit_s(plan.num_tokens))

    # --- failed steps ---

    def _handle_step_error(self, error: ExecutorError, plan: StepPlan) -> list[Progress]:
        """Make the steps smaller if that helps; else replace the workers."""
        if isinstance(error, StepLost):
            self._requeue_in_flight()
            return []
        if isinstance(error, WorkerError) and error.failure.cause == "out_of_memory" and self._shrink_steps(plan):
            return []
        return self._restart(error)

    def _shrink_steps(self, plan: StepPlan) -> bool:
        """Reduce the token budget and requeue the steps in flight. Return whether the workers can go on."""
        budget = self.scheduler.token_budget
        if not budget.shrink(plan.num_tokens):
            return False
        num_sequences = self._requeue_in_flight()
        logger.warning(
            "out of memory: steps have at most %d tokens for now, %d sequences were requeued",
            budget.tokens,
            num_sequences,
        )
        if self._executor.parallel_sizes[1] > 1:
            return False  # the failed stage of a pipeline is a step behind the others
        try:
            self._executor.collective_rpc("check_health", timeout_s=_HEALTH_CHECK_S)
        except ExecutorError:
            return False
        return True

    def _requeue_in_flight(self) -> int:
        """Drop the steps in flight and let their sequences wait again. Return the number of sequences."""
        self._in_flight.clear()
        self._step_limits = None
        return self.scheduler.requeue_in_flight()

    def _restart(self, error: ExecutorError) -> list[Progress]:
        """Replace the workers. Return the failures of sequences that did not survive."""
        if self._is_draining:
            raise WorkersLost(str(error)) from error
        self._in_flight.clear()
        self._step_limits = None
        return self._fail_lost(self._workers.restart(error))

    def _fail_lost(self, failed: list[FailedSequence]) -> list[Progress]:
        return [Progress(self._generations.pop(sequence.seq_id), None, failure) for sequence, failure in failed]

    # --- for other threads too; never blocks ---

    @property
    def sleep_level(self) -> int:
        """0: awake, 1: asleep with the weights in host memory, 2: asleep without them."""
        return self._deepest_sleep if self._executor.is_asleep else 0

    @property
    def is_restarting_workers(self) -> bool:
        """Whether the workers are being replaced, which may take minutes."""
        return self._workers.restart_reason is not None

    @property
    def is_started(self) -> bool:
        return self._facts is not None

    def metrics(self) -> EngineMetrics:
        """Return figures for logs and metrics, without asking the workers."""
        scheduler = self.scheduler.stats()
        return EngineMetrics(
            executor=self._executor.stats(),
            scheduler=scheduler,
            inter_token_s=deepcopy(self._inter_token_s),
            pool_use=1 - scheduler.pool.num_free / max(1, self.scheduler.pool.num_blocks - 1),
            token_budget=self.scheduler.token_budget.tokens,
            sleep_level=self.sleep_level,
        )

    def unhealthy_reason(self, now_s: float) -> str | None:
        """Return in one line why the engine makes no progress though it should; None when it is healthy."""
        reason, limits = self._workers.restart_reason, self._step_limits
        if reason is not None:
            return f"the workers are being restarted: {reason}"
        if limits is not None and now_s > limits[1]:
            return f"a step has lasted {now_s - limits[0]:.0f} s"
        return None
