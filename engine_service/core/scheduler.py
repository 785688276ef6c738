"""Decide what each step computes: decodes first, then prompts in chunks, under one token budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

import msgspec

from millrace.engine_service.core.block_pool import BlockPool, PoolStats
from millrace.engine_service.core.crash_policy import Suspects
from millrace.engine_service.core.planned_step import PlannedStep
from millrace.engine_service.core.sequence import Sequence, StopReason
from millrace.engine_service.core.token_budget import TokenBudget
from millrace.executor.wire.messages import (
    NO_TOKEN,
    RowFailure,
    SeqId,
    StepId,
    StepPlan,
    StepResult,
    StepRow,
)


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int
    """Sequences in one step."""
    max_num_batched_tokens: int
    """Tokens in one step, prefill and decode together."""
    enable_prefix_caching: bool = True
    """Whether sequences that begin alike share the blocks of their beginning."""


class Advance(msgspec.Struct, frozen=True):
    """The outcome of a step for one sequence."""

    sequence: Sequence
    finish_reason: StopReason | None
    failure: RowFailure | None = None


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    num_running: int
    num_waiting: int
    num_preemptions: int
    pool: PoolStats


class Scheduler:
    """Owns the queue of waiting sequences, the running sequences, the token budget and the block pool.

    `schedule()` makes the plan of the next step and advances the sequences as if the step had succeeded; `apply()` applies
    its result. Between the two the step is in flight, and its sequences keep their blocks. When a step is lost with its
    workers, `restart()` puts all sequences back to waiting and keeps their tokens.

    A block is cached as soon as a step is planned that fills it: steps run in order, and within one all keys and values of a
    layer are written before any are read. So of sequences that arrive together one computes what they share. When the step
    fails, what it was to fill is taken out of the cache.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, epoch: int) -> None:
        self._max_num_seqs = config.max_num_seqs
        self.token_budget = TokenBudget(config.max_num_batched_tokens)
        self.pool = pool
        self.epoch = epoch
        self._is_caching = config.enable_prefix_caching
        self._waiting: OrderedDict[SeqId, Sequence] = OrderedDict()
        self._num_waiting_blocks = 0
        """Blocks that the waiting sequences need to be admitted, were nothing cached."""
        self._running: dict[SeqId, Sequence] = {}
        """In the order of admission: the last one is preempted first."""
        self._suspects = Suspects()
        self._finished: list[SeqId] = []
        """Sequences that the next plan tells the workers to forget."""
        self._in_flight: dict[StepId, PlannedStep] = {}
        """The oldest step first."""
        self._last_step_id = 0
        self._num_preemptions = 0

    def __repr__(self) -> str:
        return f"Scheduler({len(self._running)} running, {len(self._waiting)} waiting, {self.pool})"

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def free_tokens(self) -> int:
        """Tokens that the pool can still hold after all waiting sequences are admitted; negative when they do not fit."""
        return (self.pool.num_free - self._num_waiting_blocks) * self.pool.block_size

    def add(self, sequence: Sequence, *, is_first: bool = False) -> None:
        """Queue a sequence, at the end or before all others. The caller has checked `fits`."""
        self._push(sequence, is_first=is_first)
        self._suspects.add(sequence, is_first=is_first)

    def remove(self, sequence: Sequence) -> None:
        """Drop a sequence: ended by its text, cancelled, or lost to another engine. Does nothing when it is gone."""
        if self._running.pop(sequence.seq_id, None) is not None:
            self._release_blocks(sequence)
        else:
            self._pop(sequence)
        self._suspects.remove(sequence)

    # --- a step ---

    def schedule(self, max_in_flight: int = 1) -> StepPlan | None:
        """Return the plan of the next step, or None when nothing can run before a step in flight has returned.

        `max_in_flight`: the number of pipeline stages. Each step takes its share of the sequences and the next step takes
        others, so that all stages have work.
        """
        suspect = self._suspects.first()
        if len(self._in_flight) >= max_in_flight or (suspect is not None and self._in_flight):
            return None
        share = self._max_num_seqs
        if max_in_flight > 1:
            share = max(1, -(-(len(self._running) + self._num_admissible()) // max_in_flight))
        step = PlannedStep(StepId(self._last_step_id + 1), self.token_budget.tokens, share)
        if suspect is not None:
            self._schedule_alone(suspect, step)
        else:
            self._schedule_running(step)
            self._admit_waiting(step)
        if not step.rows:
            return None
        self._last_step_id += 1
        self._in_flight[step.step_id] = step
        for sequence in step.sequences:
            sequence.num_in_flight += 1
        finished, self._finished = self._finished, []
        depth = len(self._in_flight)
        return StepPlan(step.step_id, self.epoch, depth, rows=step.rows, new=step.new, finished=finished)

    def apply(self, result: StepResult) -> list[Advance]:
        """Append the sampled tokens to their sequences. Sequences that ended or failed are dropped.

        If this is interrupted, the step is still in flight: `requeue_in_flight` then puts back the remaining sequences.
        """
        self.token_budget.count_good_step()
        advances = [self._fail(failure) for failure in result.failures if failure.seq_id in self._running]
        position = 0
        for seq_id, num_tokens in zip(result.seq_ids, result.num_tokens, strict=True):
            token_ids = result.token_ids[position : position + num_tokens]
            position += num_tokens
            if seq_id in self._running:  # else it was removed while the step ran
                advances.append(self._extend(self._running[seq_id], token_ids, result.step_id))
        for sequence in self._in_flight.pop(result.step_id).sequences:
            sequence.num_in_flight -= 1
        return advances

    def repeat_finished(self, plan: StepPlan) -> None:
        """Put the plan's `finished` ids into the next plan too, since this one may not have reached the workers."""
        self._finished += plan.finished

    def requeue_in_flight(self) -> int:
        """Drop the steps in flight and blame no sequence. Their sequences wait again with their tokens.

        Return the number of sequences.
        """
        sequences = [sequence for sequence in self._running.values() if sequence.num_in_flight]
        for step in self._in_flight.values():
            self.pool.unregister(step.registered)
        self._clear_in_flight()
        for sequence in reversed(sequences):
            del self._running[sequence.seq_id]
            self._release_blocks(sequence)
            self._push(sequence, is_first=True)
        return len(sequences)

    def restart(self, epoch: int) -> list[Sequence]:
        """Begin an epoch with new workers and an empty KV pool: all sequences wait, in their old order, with their tokens.

        A crash is counted for each sequence of the lost steps. Return those to quarantine; they are dropped.
        """
        self.epoch = epoch
        self._finished = []
        self.pool.reset_cache()
        for sequence in reversed(self._running.values()):
            sequence.crash_count += sequence.num_in_flight > 0
            self.pool.free(sequence.reset())
            self._push(sequence, is_first=True)
        self._running.clear()
        self._clear_in_flight()
        quarantined = self._suspects.rebuild(self._waiting.values())
        for sequence in quarantined:
            self._pop(sequence)
        return quarantined

    def replace_pool(self, pool: BlockPool) -> list[Sequence]:
        """Use a pool of another size; only after `restart`. Return the sequences that no longer fit; they are dropped."""
        assert not self._running
        self.pool = pool
        too_large = [sequence for sequence in self._waiting.values() if not self.fits(sequence)]
        for sequence in too_large:
            self.remove(sequence)
        return too_large

    def fits(self, sequence: Sequence) -> bool:
        """Whether the pool can hold the whole sequence, to its last token, when nothing else uses it."""
        return sequence.num_prompt_tokens + sequence.stop_rules.max_tokens <= self.pool.capacity_tokens

    # --- choosing sequences ---

    def _schedule_running(self, step: PlannedStep) -> None:
        """Plan the sequences that do not wait for a step in flight: decodes, then prefills."""
        decodes = [sequence for sequence in self._running.values() if sequence.num_uncomputed == 1]
        prefills = [sequence for sequence in self._running.values() if sequence.num_uncomputed > 1]
        for sequence in decodes + prefills:
            if step.is_full:
                return
            is_running = sequence.seq_id in self._running  # not if an earlier one has preempted it
            if is_running and self._ensure_blocks(sequence, step):
                self._add_row(sequence, step)
        for sequence, row in zip(step.sequences, step.rows, strict=True):  # until here a row could be dropped again
            self._register_blocks(sequence, row, step)

    def _admit_waiting(self, step: PlannedStep) -> None:
        """Admit in the order of the queue. When the first sequence lacks blocks, no other one overtakes it."""
        while self._waiting and not step.is_full and not step.is_short_of_blocks:
            sequence = next(iter(self._waiting.values()))
            hit_blocks = self._find_blocks(sequence)
            if len(self._running) >= self._max_num_seqs or not self._can_admit(sequence, hit_blocks):
                return
            self._admit(sequence, hit_blocks, step)

    def _schedule_alone(self, sequence: Sequence, step: PlannedStep) -> None:
        if sequence.seq_id in self._waiting:
            while not self._can_admit(sequence, hit_blocks := self._find_blocks(sequence)):
                self._preempt(next(reversed(self._running.values())), step)
            self._admit(sequence, hit_blocks, step)
        elif self._ensure_blocks(sequence, step):
            self._register_blocks(sequence, self._add_row(sequence, step), step)

    # --- blocks ---

    def _num_admissible(self) -> int:
        """Return how many waiting sequences could be admitted now, one after the other."""
        num_free = self.pool.num_free
        head = list(islice(self._waiting.values(), max(0, self._max_num_seqs - len(self._running))))
        for number, sequence in enumerate(head):
            num_free -= self.pool.blocks_for(sequence.num_tokens + 1)
            if num_free < 0:
                return number
        return len(head)

    def _find_blocks(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks that the sequence begins with. At least one token is left to compute."""
        if not self._is_caching:
            return []
        most = (sequence.num_tokens - 1) // self.pool.block_size
        return self.pool.find(sequence.hash_blocks(self.pool.block_size)[:most])

    def _can_admit(self, sequence: Sequence, hit_blocks: list[int]) -> bool:
        """Whether its known tokens fit now, and one more, so that it is not preempted at once."""
        num_missing = self.pool.blocks_for(sequence.num_tokens + 1) - len(hit_blocks)
        return self.pool.can_allocate(num_missing + self.pool.num_free_among(hit_blocks))

    def _ensure_blocks(self, sequence: Sequence, step: PlannedStep) -> bool:
        """Preempt the youngest sequences until the pool has the blocks that this one needs for the step. Return False when
        it was preempted itself, or has to wait for a step in flight."""
        while not self.pool.can_allocate(self._missing_blocks(sequence, step)):
            step.is_short_of_blocks = True
            victim = self._victim_for(sequence)
            if victim is not None:
                self._preempt(victim, step)
            if victim is None or victim is sequence:
                return False
        return True

    def _missing_blocks(self, sequence: Sequence, step: PlannedStep) -> int:
        num_tokens = sequence.num_computed + min(step.budget, sequence.num_uncomputed)
        return self.pool.blocks_for(num_tokens) - len(sequence.block_ids)

    def _victim_for(self, sequence: Sequence) -> Sequence | None:
        """Return the youngest sequence that is not in flight, or `sequence` itself when it is the youngest. None: all
        younger ones, or itself, are in flight, so it waits until their steps return."""
        for number, candidate in enumerate(reversed(self._running.values())):
            if not candidate.num_in_flight and (candidate is not sequence or number == 0):
                return candidate
            if candidate is sequence:
                return None
        raise AssertionError(f"{sequence} is not running")

    def _preempt(self, sequence: Sequence, step: PlannedStep) -> None:
        """Put it back to the head of the queue. It keeps its tokens and loses its computed keys and values."""
        step.drop(sequence)
        del self._running[sequence.seq_id]
        self._release_blocks(sequence)
        self._push(sequence, is_first=True)
        self._num_preemptions += 1

    def _release_blocks(self, sequence: Sequence) -> None:
        if sequence.is_known_to_workers:
            self._finished.append(sequence.seq_id)
        self.pool.free(sequence.reset())

    def _register_blocks(self, sequence: Sequence, row: StepRow, step: PlannedStep) -> None:
        """Cache the blocks that the row fills."""
        if not self._is_caching:
            return
        start, end = row.start // self.pool.block_size, sequence.num_computed // self.pool.block_size
        if start < end:
            hashes = sequence.hash_blocks(self.pool.block_size)
            step.registered += self.pool.register(sequence.block_ids[start:end], hashes[start:end])

    # --- the queue ---

    def _push(self, sequence: Sequence, *, is_first: bool) -> None:
        self._waiting[sequence.seq_id] = sequence
        if is_first:
            self._waiting.move_to_end(sequence.seq_id, last=False)
        self._num_waiting_blocks += self.pool.blocks_for(sequence.num_tokens + 1)

    def _pop(self, sequence: Sequence) -> None:
        if self._waiting.pop(sequence.seq_id, None) is not None:
            self._num_waiting_blocks -= self.pool.blocks_for(sequence.num_tokens + 1)

    def _clear_in_flight(self) -> None:
        for step in self._in_flight.values():
            for sequence in step.sequences:
                sequence.num_in_flight = 0
        self._in_flight.clear()

    # --- rows ---

    def _admit(self, sequence: Sequence, hit_blocks: list[int], step: PlannedStep) -> None:
        self._pop(sequence)
        self._running[sequence.seq_id] = sequence
        self.pool.share(hit_blocks)
        self.pool.count_query(sequence.num_tokens, len(hit_blocks) * self.pool.block_size)
        sequence.admit(hit_blocks, self.pool.block_size)
        step.new.append(sequence.as_new())
        self._register_blocks(sequence, self._add_row(sequence, step, hit_blocks), step)

    def _add_row(self, sequence: Sequence, step: PlannedStep, hit_blocks: Iterable[int] = ()) -> StepRow:
        num_tokens = min(step.budget, sequence.num_uncomputed)
        blocks = self.pool.allocate(self._missing_blocks(sequence, step))
        start = sequence.num_computed
        lag = NO_TOKEN
        if num_tokens == sequence.num_uncomputed:
            lag = 0 if sequence.sampled_step is None else step.step_id - sequence.sampled_step
        sequence.schedule(num_tokens, blocks)
        row = StepRow(sequence.seq_id, start, num_tokens, lag, [*hit_blocks, *blocks])
        step.add(sequence, row)
        return row

    # --- results ---

    def _extend(self, sequence: Sequence, token_ids: list[int], step_id: int) -> Advance:
        reason = sequence.extend(token_ids, step_id)
        if reason is not None:
            self.remove(sequence)
        return Advance(sequence, reason)

    def _fail(self, failure: RowFailure) -> Advance:
        sequence = self._running[failure.seq_id]
        self.pool.unregister(sequence.block_ids[sequence.num_hit_blocks :])  # they may hold NaN
        self.remove(sequence)
        return Advance(sequence, None, failure)

    # --- inspection ---

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_preemptions=self._num_preemptions,
            pool=self.pool.stats(),
        )

    def check_integrity(self) -> None:
        """Assert that each block has the users that it counts, that a block in two tables holds the same tokens in both,
        that the tables cover the computed tokens, and that no sequence is both running and waiting."""
        self.pool.check_integrity(sequence.block_ids for sequence in self._running.values())
        content: dict[int, bytes] = {}
        for sequence in self._running.values():
            assert sequence.num_computed <= len(sequence.block_ids) * self.pool.block_size, sequence
            assert sequence.num_uncomputed >= 1 or sequence.num_in_flight, sequence
            for position, block_id in enumerate(sequence.block_ids):
                users = self.pool.num_users(block_id)
                if users > 1:
                    block_hash = sequence.hash_blocks(self.pool.block_size)[position]
                    assert content.setdefault(block_id, block_hash) == block_hash, f"block {block_id} is shared wrongly"
        for sequence in self._waiting.values():
            assert not sequence.block_ids and sequence.num_computed == sequence.num_in_flight == 0, sequence
            assert sequence.seq_id not in self._running, sequence
        waiting = sum(self.pool.blocks_for(sequence.num_tokens + 1) for sequence in self._waiting.values())
        assert waiting == self._num_waiting_blocks, "the sum of the waiting sequences' blocks is wrong"
