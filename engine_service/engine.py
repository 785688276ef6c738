"""The heart: schedule, execute, apply. Knows neither Redis nor text files; `service` and `offline` stand on it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable

import msgspec

from millrace.engine_service.core.scheduler import Advance, Scheduler, SchedulerConfig, SchedulerStats
from millrace.engine_service.core.sequence import StopReason
from millrace.engine_service.core.token_budget import TokenBudget
from millrace.engine_service.epochs import Epochs, FailedSequence, Failure, too_large
from millrace.engine_service.errors import EngineDead, EngineError, WorkersLost
from millrace.engine_service.generation import Generation
from millrace.executor.base import Executor, StepFuture
from millrace.executor.errors import Asleep, ExecutorError, WorkerError
from millrace.executor.metrics import ExecutorMetrics
from millrace.executor.wire.messages import ModelFacts, SeqId, StepPlan

logger = logging.getLogger("millrace.engine")

_STILL_ALIVE_S = 10.0
"""What workers get to show that they can go on after one of them ran out of memory."""

_WEIGHTS_CHANGED = "WeightsChanged"
"""The worker's error, by name: this side does not import it."""


class Progress(msgspec.Struct, frozen=True):
    """What a step did to one generation."""

    generation: Generation
    finish_reason: StopReason | None
    """Set when it is over. Its sequence is then gone from the scheduler."""
    failure: Failure | None = None


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one engine and what it stands on."""

    executor: ExecutorMetrics
    scheduler: SchedulerStats
    pool_use: float
    """Share of the KV pool's blocks that sequences hold, 0 to 1."""
    token_budget: int
    """Tokens that a step may have now; less than configured after the device ran out of memory."""
    sleep_level: int


class Engine:
    """Owns the executor, the scheduler and the generations under way. Used by one thread, but for what says otherwise."""

    def __init__(self, executor: Executor, config: SchedulerConfig, block_size: int) -> None:
        self._executor = executor
        self._config = config
        self._generations: dict[SeqId, Generation] = {}
        self._epochs = Epochs(executor, config, block_size)
        self._budget = TokenBudget(config.max_num_batched_tokens)
        self._under_way: deque[tuple[StepPlan, StepFuture]] = deque()
        """Steps that the workers have and we have no result of, oldest first."""
        self._pending_updates: list[Progress] = []
        """Came about outside of `step`; told with the next one."""
        self._deepest_sleep = 0
        self._is_leaving = False
        self._step_limits: tuple[float, float] | None = None
        """Of the step that we wait for: since when, and when it is stuck, by the monotonic clock."""
        self._facts: ModelFacts | None = None
        self._scheduler: Scheduler | None = None

    def __repr__(self) -> str:
        return f"Engine({len(self._generations)} generations, {self._scheduler}, {self._executor})"

    # --- life ---

    def start(self) -> ModelFacts:
        """Start the workers and make the KV pool. Raises `ConfigurationError` when this can't work, else `EngineDead`."""
        self._scheduler = self._epochs.start()
        facts, capacity = self._executor.facts, self._scheduler.pool.capacity_tokens
        self._facts = msgspec.structs.replace(facts, max_model_len=min(facts.max_model_len, capacity))
        if capacity < facts.max_model_len:
            logger.warning(
                "the KV pool holds %d tokens, so sequences end there and not at the model's %d; give it more memory",
                capacity,
                facts.max_model_len,
            )
        return self._facts

    def shutdown(self) -> None:
        self._under_way.clear()
        self._executor.shutdown()

    def leave(self) -> None:
        """The process is about to end: workers that are lost from now on are not replaced. For signal handlers too."""
        self._is_leaving = True

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake_up`; see `Executor.sleep`. What is under way waits with its tokens."""
        before = self.sleep_level
        self._pending_updates += self._settle()
        try:
            self._executor.sleep(level)
            self._executor.worker_stats()
        except ExecutorError as error:
            self._pending_updates += self._restart(error)
            raise EngineError(f"the workers did not fall asleep and were restarted: {error}") from error
        self._deepest_sleep = max(level, before)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take it back, all or what `tags` name; see `Executor.wake_up`. Workers that were lost meanwhile are replaced.

        Raises `EngineDead` when the weights are not those of before: what is under way can't go on with others; and
        `WorkersLost` while it leaves.
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

    # --- work ---

    @property
    def facts(self) -> ModelFacts:
        assert self._facts is not None, "the engine has not been started"
        return self._facts

    @property
    def scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "the engine has not been started"
        return self._scheduler

    @property
    def has_work(self) -> bool:
        return bool(self._pending_updates or self._under_way) or self.scheduler.has_work

    def add(self, generation: Generation) -> None:
        """Queue a generation that is not over yet."""
        assert generation.finish_reason is None
        if not self.scheduler.fits(generation.sequence):
            self._pending_updates.append(Progress(generation, None, too_large(self.scheduler.pool)))
            return
        self._generations[generation.sequence.seq_id] = generation
        self.scheduler.add(generation.sequence)

    def abort(self, generation: Generation) -> None:
        """Drop a generation; its blocks are free for the next step. Harmless when it is over."""
        self._pending_updates = [one for one in self._pending_updates if one.generation is not generation]
        if self._generations.pop(generation.sequence.seq_id, None) is not None:
            self.scheduler.remove(generation.sequence)
            self._mark_idle()

    def step(self) -> list[Progress]:
        """Keep every stage of the workers busy, and wait for the oldest step: what it brought. Empty when there was nothing
        to run. Raises `Asleep` while it sleeps, and `WorkersLost` while it leaves."""
        if self._executor.is_asleep:
            raise Asleep("the engine sleeps: call wake_up first")
        told, self._pending_updates = self._pending_updates, []
        if self._epochs.is_time_to_grow() and not self._is_leaving:
            told += self._settle() + self._fail_lost(self._epochs.grow())
        told += self._send_steps()
        return told + (self._collect() if self._under_way else [])

    def check_workers(self) -> list[Progress]:
        """For idle times: bring the workers back when they have died, all of them when some were missing. Those that die
        asleep are only replaced by `wake_up`, since the device may be somebody else's until then."""
        try:
            self._executor.check_health()
        except ExecutorError as error:
            return [] if self._executor.is_asleep or self._is_leaving else self._restart(error)
        if self._executor.is_asleep or not self._epochs.is_time_to_grow():
            return []
        return self._fail_lost(self._epochs.grow())

    def _send_steps(self) -> list[Progress]:
        """One for each stage, as far as there is work. Returns what the loss of the workers brings, mostly nothing."""
        num_stages = self._executor.parallel_sizes[1]
        while (plan := self.scheduler.schedule(num_stages)) is not None:
            self._set_step_limits(plan)
            try:
                self._under_way.append((plan, self._executor.execute_model(plan)))
            except ExecutorError as error:
                return self._recover(error, plan)
            except BaseException:  # interrupted: the workers may have this step or not
                self.scheduler.unsend(plan)
                self._requeue()
                raise
        return []

    def _collect(self) -> list[Progress]:
        """What the oldest step under way brought."""
        plan, future = self._under_way[0]
        self._set_step_limits(plan)
        try:
            result = future.result()
        except ExecutorError as error:
            return self._recover(error, plan)
        try:
            self._under_way.popleft()
            self._step_limits = None
            self._epochs.count_good_step()
            self._count_good_step()
            progress = [self._take(advance) for advance in self.scheduler.apply(result)]
            self._mark_idle()
            return progress
        except BaseException:  # interrupted: nobody would collect this step again
            self._requeue()
            raise

    def _mark_idle(self) -> None:
        """When nothing is left: the time until there is something again is not the host's."""
        if not self._under_way and not self.scheduler.has_work:
            self._executor.mark_idle()

    def _set_step_limits(self, plan: StepPlan) -> None:
        now_s = time.monotonic()
        self._step_limits = (now_s, now_s + self._executor.step_limit_s(sum(row.num_tokens for row in plan.rows)))

    def _settle(self) -> list[Progress]:
        """Wait for all that is under way."""
        progress: list[Progress] = []
        while self._under_way:
            progress += self._collect()
        return progress

    def _take(self, advance: Advance) -> Progress:
        generation = self._generations[advance.sequence.seq_id]
        if advance.failure is not None:
            del self._generations[advance.sequence.seq_id]
            return Progress(generation, None, Failure(advance.failure.kind, advance.failure.message))
        reason = generation.advance(advance.finish_reason)
        if reason is not None:
            self.abort(generation)
        return Progress(generation, reason)

    # --- too little memory, lost workers ---

    def _recover(self, error: ExecutorError, plan: StepPlan) -> list[Progress]:
        if isinstance(error, WorkerError) and error.failure.cause == "out_of_memory" and self._shrink(plan):
            return []
        return self._restart(error)

    def _shrink(self, plan: StepPlan) -> bool:
        """Smaller steps from now on; the workers go on if they all can. A pipeline can't: its stages are out of step."""
        if not self._budget.shrink(sum(row.num_tokens for row in plan.rows)):
            return False
        self._set_budget()
        num_sequences = self._requeue()
        logger.warning(
            "out of memory: steps of at most %d tokens for now, %d sequences wait again",
            self._budget.tokens,
            num_sequences,
        )
        if self._executor.parallel_sizes[1] > 1:
            return False
        try:
            self._executor.collective_rpc("check_health", timeout_s=_STILL_ALIVE_S)
        except ExecutorError:
            return False
        return True

    def _requeue(self) -> int:
        """Give up what is under way; returns how many sequences wait again."""
        self._under_way.clear()
        self._step_limits = None
        return self.scheduler.requeue_in_flight()

    def _count_good_step(self) -> None:
        self._budget.count_good_step()
        if self.scheduler.config.max_num_batched_tokens != self._budget.tokens:
            self._set_budget()

    def _set_budget(self) -> None:
        self.scheduler.config = msgspec.structs.replace(self._config, max_num_batched_tokens=self._budget.tokens)

    def _restart(self, error: ExecutorError) -> list[Progress]:
        if self._is_leaving:
            raise WorkersLost(str(error)) from error
        self._under_way.clear()
        self._step_limits = None
        return self._fail_lost(self._epochs.restart(error))

    def _fail_lost(self, failed: list[FailedSequence]) -> list[Progress]:
        return [Progress(self._generations.pop(one.sequence.seq_id), None, one.failure) for one in failed]

    # --- for other threads too ---

    @property
    def sleep_level(self) -> int:
        """0: awake, 1: asleep with the weights in host memory, 2: without them."""
        return self._deepest_sleep if self._executor.is_asleep else 0

    @property
    def is_repairing(self) -> bool:
        """Whether the workers are being replaced, which may last for minutes."""
        return self._epochs.repair is not None

    @property
    def is_started(self) -> bool:
        return self._facts is not None

    def metrics(self) -> EngineMetrics:
        """Figures for logs and metrics; asks nobody and never blocks."""
        scheduler = self.scheduler.stats()
        return EngineMetrics(
            executor=self._executor.stats(),
            scheduler=scheduler,
            pool_use=1 - scheduler.num_free_blocks / max(1, self.scheduler.pool.num_blocks - 1),
            token_budget=self._budget.tokens,
            sleep_level=self.sleep_level,
        )

    def unhealthy_reason(self, now_s: float) -> str | None:
        """Why the engine does not move though it should, in one line; None when all is well. Never blocks."""
        repair, limits = self._epochs.repair, self._step_limits
        if repair is not None:
            return f"the workers are being restarted: {repair}"
        if limits is not None and now_s > limits[1]:
            return f"a step has lasted {now_s - limits[0]:.0f} s"
        return None
