"""The heart: schedule, execute, apply. Knows neither Redis nor text files; `service` and `offline` stand on it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from engine_service.core.block_pool import BlockPool
from engine_service.core.scheduler import ALONE_AFTER_CRASHES, Advance, Scheduler, SchedulerConfig, SchedulerStats
from engine_service.core.sequence import FinishReason, Sequence, StopRules
from engine_service.errors import EngineDead, EngineError
from engine_service.generation import Generation
from engine_service.recovery import Recovery
from engine_service.token_budget import TokenBudget
from executor.base import Executor
from executor.errors import Asleep, ExecutorError, WorkerError
from executor.messages import ModelFacts, RowSampling, SeqId, StepPlan
from executor.metrics import ExecutorMetrics

logger = logging.getLogger("millrace.engine")

MAX_FRUITLESS_RESTARTS = 10
"""Losses of the workers in a row, without one new token from anybody, after which it must be the machine."""


_STILL_ALIVE_S = 10.0
"""What workers get to show that they can go on after one of them ran out of memory."""

_PROBE_ID = SeqId(0)
"""Requests count from 1."""
_GREEDY = RowSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, candidate=0, min_tokens=0, end_token_ids=[]
)


class Failure(msgspec.Struct, frozen=True):
    """Why a generation ended without a result."""

    kind: str
    message: str


class Progress(msgspec.Struct, frozen=True):
    """What a step did to one generation."""

    generation: Generation
    finish_reason: FinishReason | None
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
    is_asleep: bool


class Engine:
    """Owns the executor, the scheduler and the generations under way. Used by one thread."""

    def __init__(self, executor: Executor, config: SchedulerConfig, block_size: int) -> None:
        self._executor = executor
        self._config = config
        self._block_size = block_size
        self._generations: dict[SeqId, Generation] = {}
        self._recovery = Recovery(executor)
        self._budget = TokenBudget(config.max_num_batched_tokens)
        self._misfits: list[Generation] = []
        """Came while the pool is smaller than it was promised to be; they fail with the next step."""
        self._fruitless_restarts = 0
        self._facts: ModelFacts | None = None
        self._scheduler: Scheduler | None = None

    def __repr__(self) -> str:
        return f"Engine({len(self._generations)} generations, {self._scheduler}, {self._executor})"

    # --- life ---

    def start(self) -> ModelFacts:
        """Start the workers and make the KV pool. Raises `ConfigurationError` when this can't work, else `EngineDead`."""
        self._recovery.start()
        facts, pool = self._executor.facts, self._make_pool()
        self._facts = msgspec.structs.replace(facts, max_model_len=min(facts.max_model_len, pool.capacity_tokens))
        self._scheduler = Scheduler(self._config, pool, self._executor.epoch)
        self._log_start(facts, pool)
        return self._facts

    def _make_pool(self) -> BlockPool:
        device_blocks, host_blocks = self._executor.determine_num_available_blocks()
        self._executor.initialize_cache(device_blocks, host_blocks)
        return BlockPool(device_blocks, self._block_size)

    def _log_start(self, facts: ModelFacts, pool: BlockPool) -> None:
        if pool.capacity_tokens < facts.max_model_len:
            logger.warning(
                "the KV pool holds %d tokens, so sequences end there and not at the model's %d; give it more memory",
                pool.capacity_tokens,
                facts.max_model_len,
            )

    def shutdown(self) -> None:
        self._executor.shutdown()

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake_up`; see `Executor.sleep`. What is under way waits with its tokens."""
        try:
            self._executor.sleep(level)
        except ExecutorError as error:
            self._restart(error)
            raise EngineError(f"the workers did not fall asleep and were restarted: {error}") from error

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take it back, all or what `tags` name; see `Executor.wake_up`."""
        try:
            self._executor.wake_up(tags)
        except ExecutorError as error:
            self._restart(error)
        else:
            self.scheduler.restart(self._executor.epoch)

    def metrics(self) -> EngineMetrics:
        """Figures for logs and metrics; asks nobody and never blocks."""
        scheduler = self.scheduler.stats()
        return EngineMetrics(
            executor=self._executor.stats(),
            scheduler=scheduler,
            pool_use=1 - scheduler.num_free_blocks / max(1, self.scheduler.pool.num_blocks - 1),
            token_budget=self._budget.tokens,
            is_asleep=self._executor.is_asleep,
        )

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
        return bool(self._misfits) or self.scheduler.has_work

    def add(self, generation: Generation) -> None:
        """Queue a generation that is not over yet."""
        assert generation.finish_reason is None
        if not self.scheduler.fits(generation.sequence):
            self._misfits.append(generation)
            return
        self._generations[generation.sequence.seq_id] = generation
        self.scheduler.add(generation.sequence)

    def abort(self, generation: Generation) -> None:
        """Drop a generation; its blocks are free for the next step. Harmless when it is over."""
        if generation in self._misfits:
            self._misfits.remove(generation)
        if self._generations.pop(generation.sequence.seq_id, None) is not None:
            self.scheduler.remove(generation.sequence)

    def step(self) -> list[Progress]:
        """One step of the batch: what it brought. Empty when there was nothing to run. Raises `Asleep` while it sleeps."""
        if self._executor.is_asleep:
            raise Asleep("the engine sleeps: call wake_up first")
        failed = self._refuse_misfits() + self._grow_when_due()
        plan = self.scheduler.schedule()
        if plan is None:
            return failed
        try:
            result = self._executor.execute_model(plan).result()
        except ExecutorError as error:
            return failed + self._recover(error, plan)
        self._fruitless_restarts = 0
        self._count_good_step()
        return failed + [self._take(advance) for advance in self.scheduler.apply(result)]

    def check_workers(self) -> list[Progress]:
        """For idle times: bring the workers back when they have died, all of them when some were missing."""
        try:
            self._executor.check_health()
        except ExecutorError as error:
            return self._restart(error)
        return self._grow_when_due()

    def _take(self, advance: Advance) -> Progress:
        generation = self._generations[advance.sequence.seq_id]
        if advance.failure is not None:
            del self._generations[advance.sequence.seq_id]
            return Progress(generation, None, Failure(advance.failure.kind, advance.failure.message))
        reason = generation.advance(advance.finish_reason)
        if reason is not None:
            self.abort(generation)
        return Progress(generation, reason)

    # --- too little memory ---

    def _recover(self, error: ExecutorError, plan: StepPlan) -> list[Progress]:
        if isinstance(error, WorkerError) and error.failure.cause == "out_of_memory" and self._shrink(plan):
            return []
        return self._restart(error)

    def _shrink(self, plan: StepPlan) -> bool:
        """Smaller steps from now on; the workers go on if they all can."""
        if not self._budget.shrink(sum(row.num_tokens for row in plan.rows)):
            return False
        self._set_budget()
        num_sequences = self.scheduler.requeue_in_flight()
        logger.warning(
            "out of memory: steps of at most %d tokens for now, %d sequences wait again",
            self._budget.tokens,
            num_sequences,
        )
        try:
            self._executor.collective_rpc("check_health", timeout_s=_STILL_ALIVE_S)
        except ExecutorError:
            return False
        return True

    def _count_good_step(self) -> None:
        self._budget.count_good_step()
        if self.scheduler.config.max_num_batched_tokens != self._budget.tokens:
            self._set_budget()

    def _set_budget(self) -> None:
        self.scheduler.config = msgspec.structs.replace(self._config, max_num_batched_tokens=self._budget.tokens)

    # --- loss of the workers ---

    def _restart(self, error: ExecutorError) -> list[Progress]:
        if not self._executor.can_restart:
            raise EngineDead(f"{error}; who started the workers has to start them again") from error
        logger.error("%s; restarting the workers", error)
        self._fruitless_restarts += 1
        if self._fruitless_restarts > MAX_FRUITLESS_RESTARTS:
            raise EngineDead(f"the workers were lost {MAX_FRUITLESS_RESTARTS} times without a token between") from error
        self._recovery.restart()
        return self._begin_epoch()

    def _grow_when_due(self) -> list[Progress]:
        """With ranks missing, see from time to time whether they are back."""
        if not self._recovery.is_time_to_grow():
            return []
        self._recovery.grow()
        return self._begin_epoch()

    def _begin_epoch(self) -> list[Progress]:
        """The workers are new: whoever is blamed for that too often, or fits no more, is over."""
        quarantined = self.scheduler.restart(self._executor.epoch)
        misfits = [] if self._executor.has_cache else self.scheduler.replace_pool(self._make_pool())
        if quarantined:
            self._require_sound_machine()
        return [self._quarantine(sequence) for sequence in quarantined] + [
            self._too_large(self._generations.pop(sequence.seq_id)) for sequence in misfits
        ]

    def _refuse_misfits(self) -> list[Progress]:
        misfits, self._misfits = self._misfits, []
        return [self._too_large(generation) for generation in misfits]

    def _too_large(self, generation: Generation) -> Progress:
        capacity = self.scheduler.pool.capacity_tokens
        message = f"with the ranks that are left the KV pool holds {capacity} tokens, too few for this job"
        return Progress(generation, None, Failure("too_large", message))

    def _require_sound_machine(self) -> None:
        """Before a sequence is blamed: one token of a harmless one. When that is lost too, it is not the sequence."""
        rules = StopRules(max_tokens=1, min_tokens=0, end_token_ids=frozenset())
        self.scheduler.add_alone(Sequence(_PROBE_ID, [0], _GREEDY, rules, crash_count=ALONE_AFTER_CRASHES))
        plan = self.scheduler.schedule()
        assert plan is not None
        try:
            self.scheduler.apply(self._executor.execute_model(plan).result())
        except ExecutorError as error:
            raise EngineDead(f"the workers can't even compute one token: {error}") from error

    def _quarantine(self, sequence: Sequence) -> Progress:
        message = (
            f"the workers were lost {sequence.crash_count} times while they computed this job, the last times alone"
        )
        return Progress(self._generations.pop(sequence.seq_id), None, Failure("crashed", message))
