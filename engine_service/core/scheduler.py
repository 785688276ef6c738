"""The sequences of an engine, and its steps from the plan to the result."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from millrace.engine_service.core.block_pool import BlockPool, PoolStats
from millrace.engine_service.core.crash_policy import Suspects
from millrace.engine_service.core.micro_batch import MicroBatch
from millrace.engine_service.core.planned_step import PlannedStep
from millrace.engine_service.core.prefill_pace import PrefillPace
from millrace.engine_service.core.running_sequences import RunningSequences
from millrace.engine_service.core.sequence import Sequence, StopReason
from millrace.engine_service.core.step_planner import StepPlanner
from millrace.engine_service.core.token_budget import TokenBudget
from millrace.engine_service.core.waiting_queue import WaitingQueue
from millrace.executor.wire.messages import NO_TOKEN, RowFailure, StepId, StepPlan, StepResult


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the scheduler. The engine reads `run_ahead`, and `WorkerGroup` reads `force_swap` and
    `is_pool_automatic`."""

    max_num_seqs: int
    """Sequences in one step."""
    max_num_batched_tokens: int
    """Tokens in one step, prefill and decode together."""
    enable_prefix_caching: bool = True
    """Whether sequences that begin alike share the blocks of their beginning."""
    force_swap: bool = False
    """Whether blocks move to the host tier even if to compute them again is faster."""
    run_ahead: bool | None = None
    """Whether the engine plans a step while the one before it runs. None: where the workers run beside the engine."""
    is_pool_automatic: bool = False
    """Whether no option sets the size of the KV pool."""
    inter_token_latency_s: float = 0.1
    """How long prompts may make a step while somebody reads the output of a decoding sequence."""


class Advance(msgspec.Struct, frozen=True):
    """The outcome of a step for one sequence."""

    sequence: Sequence
    finish_reason: StopReason | None
    failure: RowFailure | None = None


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_prompt_tokens: int
    """Prompt tokens that were computed: no cached ones, and some of preempted sequences again."""
    pool: PoolStats


class Scheduler:
    """Owns the waiting and the running sequences, the token budget and the steps in flight.

    `schedule()` makes the plan of the next step and advances the sequences as if the step had succeeded; `apply()` applies
    its result. Between the two the step is in flight. Steps run in the order in which they were planned, so a later one
    can be given the blocks that a step in flight still uses. When a step is lost with its workers, `restart()` puts all
    sequences back to waiting and keeps their tokens.

    A block is cached as soon as a step is planned that fills it with known tokens: within a step all keys and values of a
    layer are written before any are read. So of sequences that arrive together one computes what they share. When the step
    fails, what it was to fill is taken out of the cache.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, epoch: int) -> None:
        self._max_num_seqs = config.max_num_seqs
        self.token_budget = TokenBudget(config.max_num_batched_tokens)
        self.epoch = epoch
        self._pace = PrefillPace(config.inter_token_latency_s)
        self._waiting = WaitingQueue(pool.layout)
        self._running = RunningSequences(pool, is_sharing=config.enable_prefix_caching)
        self._micro_batches: list[MicroBatch] = []
        self._suspects = Suspects()
        self._in_flight: deque[PlannedStep] = deque()
        """The oldest step first."""
        self._last_step_id = 0
        self._num_prompt_tokens = 0
        self._planner = StepPlanner(
            self._running, self._waiting, self._pace, self._is_in_flight, max_num_seqs=config.max_num_seqs
        )

    @property
    def pool(self) -> BlockPool:
        return self._running.pool

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def free_tokens(self) -> int:
        """Tokens that the pool can still hold after all waiting sequences are admitted; negative when they do not fit."""
        return self.pool.layout.capacity_tokens(self.pool.num_free - self._waiting.num_blocks)

    def add(self, sequence: Sequence, *, is_first: bool = False) -> None:
        """Queue a sequence, at the end or before all others. The caller has checked `fits`."""
        if not self._running.is_sharing:
            sequence.share_nothing()
        self._waiting.push(sequence, is_first=is_first)
        self._suspects.add(sequence, is_first=is_first)

    def remove(self, sequence: Sequence) -> None:
        """Drop a sequence: ended by its text, cancelled, or lost to another engine. Does nothing when it is gone."""
        sequence.has_ended = True
        if sequence in self._running:
            # The steps that computed all but the last token are through, so the blocks are good.
            self._running.register_blocks(sequence, min(sequence.num_computed, sequence.num_tokens - 1), [])
            self._running.release(sequence)
            self._waiting.count_stopped(sequence)
        else:
            self._waiting.remove(sequence)
        self._suspects.remove(sequence)

    # --- grammars ---

    @property
    def has_held(self) -> bool:
        """Whether a sequence waits for the workers to compile its grammar."""
        return self._waiting.has_held

    @property
    def has_only_held(self) -> bool:
        """Whether nothing runs or can run before a grammar is compiled."""
        return self._waiting.has_held and not (self._waiting.has_ready or self._running)

    def take_grammars(self) -> list[tuple[int, str]]:
        """Return (number, grammar) of those to announce to the workers."""
        return self._waiting.grammars.take()

    def set_compiled(self, last_compiled: int) -> None:
        """Note that all workers have compiled the grammars up to this number."""
        self._waiting.release(last_compiled)

    # --- a step ---

    def schedule(self, num_stages: int = 1, *, run_ahead: bool = False) -> StepPlan | None:
        """Return the plan of the next step, or None when nothing can run before a step in flight has returned.

        `num_stages`: the stages of the pipeline. The sequences are divided into as many micro-batches, so that all stages
        have work. `run_ahead`: plan one step more than there are stages, with rows that feed tokens of a step in flight.
        """
        if len(self._in_flight) >= num_stages + run_ahead:
            return None
        suspect = self._suspects.first()
        if suspect is not None:
            return None if self._in_flight else self._plan(next(self._open_micro_batches(1, False)), suspect=suspect)
        for micro_batch in self._open_micro_batches(num_stages, run_ahead):
            plan = self._plan(micro_batch, num_stages, run_ahead=run_ahead)
            if plan is not None:
                return plan
        return None

    def apply(self, result: StepResult) -> list[Advance]:
        """Append the sampled tokens to their sequences. Sequences that ended or failed are dropped. Return those, and the
        sequences with a new token that are followed.

        If this is interrupted, the step is still in flight: `requeue_in_flight` then puts back its sequences.
        """
        step = self._in_flight[0]
        assert step.step_id == result.step_id, f"step {result.step_id} came before step {step.step_id}"
        self.token_budget.count_good_step()
        self._pace.measure(step.num_decodes, step.num_prompt_tokens, result.device_s)
        self._num_prompt_tokens += step.num_prompt_tokens
        layout = self.pool.layout
        self.pool.host.recompute_s = self._pace.token_s * layout.block_size / layout.num_groups
        if result.logprobs or result.prompt_logprobs:
            step.keep_logprobs(result)
        advances: list[Advance] = []
        failures = iter(result.failures)
        for sequence, token_id in zip(step.sampled, result.token_ids, strict=True):
            failure = next(failures) if token_id == NO_TOKEN else None
            if failure is not None:  # what it wrote may be NaN; it may have ended or been preempted since
                self.pool.unregister_hashes(sequence.block_hashes[sequence.num_hit_columns :])
            if sequence.has_ended:  # while the step ran
                continue
            if failure is not None:
                advances.append(self._fail(sequence, failure))
                continue
            reason = sequence.append(token_id)
            if reason is not None:
                self.remove(sequence)
            if reason is not None or sequence.is_followed:
                advances.append(Advance(sequence, reason))
        self._in_flight.popleft()
        return advances

    def requeue_in_flight(self) -> int:
        """Drop the steps in flight and blame no sequence. Their sequences wait again with their tokens.

        Return the number of sequences.
        """
        affected = [sequence for sequence in self._running if self._is_in_flight(sequence)]
        known = set(affected)
        self.pool.host.undo_next()  # before `drop`, which forgets what it was to undo
        for step in self._in_flight:
            self.pool.unregister(step.registered)
            self.pool.host.drop(step.swaps.keys)
            self._running.finished += step.finished  # the workers may not have dropped them
            affected += [each for each in step.paused if each in self._running and each not in known]
        self._in_flight.clear()
        for sequence in reversed(affected):
            self._planner.requeue(sequence)
        return len(affected)

    def restart(self, epoch: int) -> list[Sequence]:
        """Begin an epoch with new workers and an empty KV pool: all sequences wait, in their old order, with their tokens.

        A crash is counted for each sequence of the lost steps. Return those to quarantine; they are dropped.
        """
        self.epoch = epoch
        self.pool.reset_cache()
        self._waiting.hold_all()
        for sequence in reversed(list(self._running)):
            sequence.crash_count += self._is_in_flight(sequence)
            self._planner.requeue(sequence)
        self._in_flight.clear()
        self._running.take_finished()
        for micro_batch in self._micro_batches:
            micro_batch.clear()
        quarantined = self._suspects.rebuild(self._waiting)
        for sequence in quarantined:
            self._waiting.remove(sequence)
        return quarantined

    def replace_pool(self, pool: BlockPool) -> list[Sequence]:
        """Use a pool of another size; only after `restart`. Return the sequences that no longer fit; they are dropped."""
        assert not self._running
        self._running.pool = pool
        too_large = [sequence for sequence in self._waiting if not self.fits(sequence)]
        for sequence in too_large:
            self.remove(sequence)
        return too_large

    def fits(self, sequence: Sequence) -> bool:
        """Whether the pool can hold the whole sequence, to its last token, when nothing else uses it."""
        return sequence.num_prompt_tokens + sequence.stop_rules.max_tokens <= self.pool.longest_sequence

    # --- plans ---

    def _open_micro_batches(self, num_stages: int, run_ahead: bool) -> Iterator[MicroBatch]:
        """Yield the micro-batches that can have another step, beginning after that of the last step."""
        while len(self._micro_batches) < num_stages:
            self._micro_batches.append(MicroBatch(len(self._micro_batches), self.pool.layout))
        last = self._in_flight[-1].micro_batch.number if self._in_flight else -1
        for offset in range(1, num_stages + 1):
            micro_batch = self._micro_batches[(last + offset) % num_stages]
            if sum(step.micro_batch is micro_batch for step in self._in_flight) <= run_ahead:
                yield micro_batch

    def _plan(
        self, micro_batch: MicroBatch, num_stages: int = 1, *, run_ahead: bool = False, suspect: Sequence | None = None
    ) -> StepPlan | None:
        max_rows = self._max_num_seqs
        if num_stages > 1:
            num_admissible = self._waiting.num_admissible(self.pool.num_free, self._max_num_seqs - len(self._running))
            max_rows = max(1, -(-(len(self._running) + num_admissible) // num_stages))
        step = PlannedStep(StepId(self._last_step_id + 1), micro_batch, self.token_budget.tokens, max_rows)
        if suspect is not None:
            self._planner.plan_alone(suspect, step)
        else:
            self._planner.plan(step, run_ahead=run_ahead)
        return self._complete(step)

    def _complete(self, step: PlannedStep) -> StepPlan | None:
        """Count the step as planned and return its plan; None if it has no rows."""
        micro_batch = step.micro_batch
        step.num_decodes = num_decodes = len(micro_batch.members)
        if not num_decodes and not step.added:
            if self._in_flight:  # it may have to write what this plan has cached
                self._in_flight[-1].registered += step.registered
            return None
        self._last_step_id = step.step_id
        joining = [sequence for sequence, _ in step.added if sequence.num_computed >= sequence.num_tokens]
        for sequence in joining:
            del self._running.ready[sequence.seq_id]
        step.finished = self._running.take_finished()
        step.paused, micro_batch.paused = [each for each in micro_batch.paused if each.clock is None], []
        micro_batch.count_step(step.step_id, joining)
        step.sampled = micro_batch.members
        step.swaps = self.pool.host.take_swaps()
        self._in_flight.append(step)
        return StepPlan(
            step.step_id,
            self.epoch,
            len(self._in_flight),
            num_decodes + step.num_prompt_tokens,
            len(step.sampled),
            rows=[row for _, row in step.added],
            new=step.new,
            finished=step.finished,
            paused=[sequence.seq_id for sequence in step.paused],
            new_blocks=[(sequence.seq_id, block_id) for sequence, block_id in step.new_blocks],
            micro_batch=micro_batch.number,
            swap_out=step.swaps.swap_out,
            swap_in=step.swaps.swap_in,
            copy=step.copy,
        )

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return bool(self._in_flight) and sequence.last_step >= self._in_flight[0].step_id

    # --- results ---

    def _fail(self, sequence: Sequence, failure: RowFailure) -> Advance:
        sequence.num_registered_columns = len(sequence.block_ids)  # `remove` caches none: they may hold what has failed
        self.remove(sequence)
        return Advance(sequence, None, failure)

    # --- inspection ---

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_preemptions=self._planner.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            pool=self.pool.stats(),
        )
