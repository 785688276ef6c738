"""Decides what each step computes: decodes first, then prompts in chunks, under one token budget."""

from __future__ import annotations

from collections import deque
from itertools import islice

import msgspec

from millrace.engine_service.core.block_pool import BlockPool
from millrace.engine_service.core.sequence import Sequence, StopReason
from millrace.executor.wire.messages import (
    NO_TOKEN,
    NewSequence,
    RowFailure,
    SeqId,
    StepId,
    StepPlan,
    StepResult,
    StepRow,
)

ALONE_AFTER_CRASHES = 2
"""A sequence that was part of this many lost steps without progress runs alone, so that it cannot take others along."""
QUARANTINE_AFTER_CRASHES = 5
"""Three more losses while alone, and it is the sequence that kills the workers: it fails."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int
    """Sequences in one step."""
    max_num_batched_tokens: int
    """Tokens in one step, prefill and decode together."""


class Advance(msgspec.Struct, frozen=True):
    """What a step brought to one sequence."""

    sequence: Sequence
    finish_reason: StopReason | None
    failure: RowFailure | None = None


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preemptions: int


class Scheduler:
    """Owns the queue of waiting sequences, the running ones and the block pool.

    `schedule()` makes the plan of the next step and moves the sequences on as if it had succeeded; `apply()` takes its
    result in. Between the two the step is in flight, and its sequences keep their blocks. When a step is lost with its
    workers, `restart()` puts everything back to waiting, tokens kept.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, epoch: int) -> None:
        self.config = config
        self.pool = pool
        self.epoch = epoch
        self._waiting: deque[Sequence] = deque()
        self._running: dict[SeqId, Sequence] = {}
        """In the order of admission: the last one is preempted first."""
        self._suspects: list[Sequence] = []
        """Sequences that have to run alone, until they make progress."""
        self._to_forget: list[SeqId] = []
        self._in_flight: dict[StepId, list[SeqId]] = {}
        """By step, oldest first."""
        self._last_step_id = 0
        self._num_preemptions = 0

    def __repr__(self) -> str:
        return f"Scheduler({len(self._running)} running, {len(self._waiting)} waiting, {self.pool})"

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def free_tokens(self) -> int:
        """Tokens that the pool can still take once everything that waits is in."""
        waiting = sum(self.pool.blocks_for(sequence.num_tokens + 1) for sequence in self._waiting)
        return (self.pool.num_free - waiting) * self.pool.block_size

    def add(self, sequence: Sequence) -> None:
        """Queue it. The caller has made sure that it fits into the pool when it is alone."""
        self._waiting.append(sequence)
        if sequence.crash_count >= ALONE_AFTER_CRASHES:
            self._suspects.append(sequence)

    def add_alone(self, sequence: Sequence) -> None:
        """Queue it before everything else, to run with nobody beside it."""
        assert sequence.crash_count >= ALONE_AFTER_CRASHES
        self._waiting.appendleft(sequence)
        self._suspects.insert(0, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Drop it wherever it is: finished by its text, cancelled, or lost to another engine. Harmless when it is gone."""
        if self._running.pop(sequence.seq_id, None) is not None:
            self._give_up_blocks(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._suspects:
            self._suspects.remove(sequence)

    # --- a step ---

    def schedule(self, max_in_flight: int = 1) -> StepPlan | None:
        """The next step, or None when nothing can run before a step in flight has come back.

        A pipeline has work for all its stages when `max_in_flight` is their number: each step then takes its share of the
        sequences, and the next one others.
        """
        suspect = self._suspect()
        if len(self._in_flight) >= max_in_flight or (suspect is not None and self._in_flight):
            return None
        share = -(-(self.num_running + self._num_admissible()) // max_in_flight)
        step = _Step(StepId(self._last_step_id + 1), self.config.max_num_batched_tokens, max(1, share))
        if suspect is not None:
            self._schedule_alone(suspect, step)
        else:
            self._schedule_running(step)
            self._admit_waiting(step)
        if not step.rows:
            return None
        self._last_step_id += 1
        self._in_flight[step.step_id] = [row.seq_id for row in step.rows]
        finished, self._to_forget = self._to_forget, []
        depth = len(self._in_flight)
        return StepPlan(step.step_id, self.epoch, depth, rows=step.rows, new=step.new, finished=finished)

    def apply(self, result: StepResult) -> list[Advance]:
        """Take in what the step sampled; sequences that ended, or failed, are gone from here afterwards.

        After an interruption the step is in flight still: `requeue_in_flight` puts back whom it has not reached.
        """
        advances = [self._fail(failure) for failure in result.failures if failure.seq_id in self._running]
        position = 0
        for seq_id, num_tokens in zip(result.seq_ids, result.num_tokens, strict=True):
            token_ids = result.token_ids[position : position + num_tokens]
            position += num_tokens
            if seq_id in self._running:  # else it was removed while the step ran
                advances.append(self._extend(self._running[seq_id], token_ids, result.step_id))
        del self._in_flight[result.step_id]
        return advances

    def unsend(self, plan: StepPlan) -> None:
        """The plan may not have reached the workers: what it told them to forget is told once more."""
        self._to_forget += plan.finished

    def requeue_in_flight(self) -> int:
        """What is in flight failed, and nobody is to blame: its sequences wait again, with their tokens, and are met anew.

        Returns the number of sequences.
        """
        seq_ids = [seq_id for seq_id in self._running if self._is_in_flight(seq_id)]
        self._in_flight.clear()
        for seq_id in reversed(seq_ids):
            sequence = self._running.pop(seq_id)
            self._give_up_blocks(sequence)
            self._waiting.appendleft(sequence)
        return len(seq_ids)

    def restart(self, epoch: int) -> list[Sequence]:
        """The workers are new and the KV pool is empty: everything waits again, in its old order, with its tokens.

        Sequences of the lost steps carry the blame. Returns those that were alone in one once too often; they are gone.
        """
        self.epoch = epoch
        self._to_forget = []
        for sequence in reversed(self._running.values()):
            sequence.crash_count += self._is_in_flight(sequence.seq_id)
            self.pool.free(sequence.reset())
            self._waiting.appendleft(sequence)
        self._running.clear()
        self._in_flight.clear()
        quarantined = [sequence for sequence in self._waiting if sequence.crash_count >= QUARANTINE_AFTER_CRASHES]
        for sequence in quarantined:
            self._waiting.remove(sequence)
        self._suspects = [sequence for sequence in self._waiting if sequence.crash_count >= ALONE_AFTER_CRASHES]
        return quarantined

    def replace_pool(self, pool: BlockPool) -> list[Sequence]:
        """After `restart`: the new workers hold another number of blocks. Returns the sequences that fit no more; they
        are gone."""
        assert not self._running
        self.pool = pool
        misfits = [sequence for sequence in self._waiting if not self.fits(sequence)]
        for sequence in misfits:
            self.remove(sequence)
        return misfits

    def fits(self, sequence: Sequence) -> bool:
        """Whether the pool holds it to its last token, when it is alone."""
        return sequence.num_prompt_tokens + sequence.stop_rules.max_tokens <= self.pool.capacity_tokens

    # --- who runs ---

    def _schedule_running(self, step: _Step) -> None:
        """Of those that wait for no result of a step in flight."""
        decodes = [sequence for sequence in self._running.values() if sequence.num_uncomputed == 1]
        prefills = [sequence for sequence in self._running.values() if sequence.num_uncomputed > 1]
        for sequence in decodes + prefills:
            if step.is_full:
                return
            if sequence.seq_id in self._running and self._make_room(sequence, step):  # else it was preempted meanwhile
                self._plan_row(sequence, step)

    def _admit_waiting(self, step: _Step) -> None:
        """First come, first served: the head of the queue waits for its blocks and nobody overtakes it."""
        while self._waiting and not step.is_full and not step.is_short_of_blocks:
            sequence = self._waiting[0]
            if len(self._running) >= self.config.max_num_seqs or not self._can_admit(sequence):
                return
            self._waiting.popleft()
            self._admit(sequence, step)

    def _schedule_alone(self, sequence: Sequence, step: _Step) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            while not self._can_admit(sequence):
                self._preempt(next(reversed(self._running.values())), step)
            self._admit(sequence, step)
        elif self._make_room(sequence, step):
            self._plan_row(sequence, step)

    def _suspect(self) -> Sequence | None:
        while self._suspects and self._suspects[0].crash_count < ALONE_AFTER_CRASHES:
            self._suspects.pop(0)  # a token came out: it is cleared
        return self._suspects[0] if self._suspects else None

    # --- blocks ---

    def _num_admissible(self) -> int:
        """How many of those that wait could be admitted now, one after the other."""
        num_free = self.pool.num_free
        head = list(islice(self._waiting, max(0, self.config.max_num_seqs - self.num_running)))
        for number, sequence in enumerate(head):
            num_free -= self.pool.blocks_for(sequence.num_tokens + 1)
            if num_free < 0:
                return number
        return len(head)

    def _can_admit(self, sequence: Sequence) -> bool:
        """Whether all its known tokens fit now, and one more, so that it does not have to leave at once."""
        return self.pool.can_allocate(self.pool.blocks_for(sequence.num_tokens + 1))

    def _make_room(self, sequence: Sequence, step: _Step) -> bool:
        """Free blocks for its share of the step, at the cost of the youngest. False when it had to go itself, or has to
        wait for a step in flight."""
        while not self.pool.can_allocate(self._missing_blocks(sequence, step)):
            step.is_short_of_blocks = True
            victim = self._victim_for(sequence)
            if victim is not None:
                self._preempt(victim, step)
            if victim is None or victim is sequence:
                return False
        return True

    def _missing_blocks(self, sequence: Sequence, step: _Step) -> int:
        num_tokens = sequence.num_computed + min(step.budget, sequence.num_uncomputed)
        return self.pool.blocks_for(num_tokens) - len(sequence.block_ids)

    def _victim_for(self, sequence: Sequence) -> Sequence | None:
        """The youngest that is not in flight, or the sequence itself when it is the youngest. None: all younger ones, or
        itself, are in flight, so it waits until they are back."""
        for number, candidate in enumerate(reversed(self._running.values())):
            if not self._is_in_flight(candidate.seq_id) and (candidate is not sequence or number == 0):
                return candidate
            if candidate is sequence:
                return None
        raise AssertionError(f"{sequence} does not run")

    def _is_in_flight(self, seq_id: SeqId) -> bool:
        return any(seq_id in seq_ids for seq_ids in self._in_flight.values())

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        """Back to the head of the queue; what it computed is lost, its tokens are not."""
        step.drop(sequence)
        del self._running[sequence.seq_id]
        self._give_up_blocks(sequence)
        self._waiting.appendleft(sequence)
        self._num_preemptions += 1

    def _give_up_blocks(self, sequence: Sequence) -> None:
        if sequence.is_known_to_workers:
            self._to_forget.append(sequence.seq_id)
        self.pool.free(sequence.reset())

    # --- rows ---

    def _admit(self, sequence: Sequence, step: _Step) -> None:
        self._running[sequence.seq_id] = sequence
        step.new.append(sequence.as_new())
        self._plan_row(sequence, step)

    def _plan_row(self, sequence: Sequence, step: _Step) -> None:
        num_tokens = min(step.budget, sequence.num_uncomputed)
        blocks = self.pool.allocate(self._missing_blocks(sequence, step))
        start = sequence.num_computed
        lag = NO_TOKEN
        if num_tokens == sequence.num_uncomputed:
            lag = 0 if sequence.sampled_step is None else step.step_id - sequence.sampled_step
        sequence.schedule(num_tokens, blocks)
        step.budget -= num_tokens
        step.rows.append(StepRow(sequence.seq_id, start, num_tokens, lag, blocks))

    # --- results ---

    def _extend(self, sequence: Sequence, token_ids: list[int], step_id: int) -> Advance:
        reason = sequence.extend(token_ids, step_id)
        if reason is not None:
            self.remove(sequence)
        return Advance(sequence, reason)

    def _fail(self, failure: RowFailure) -> Advance:
        sequence = self._running[failure.seq_id]
        self.remove(sequence)
        return Advance(sequence, None, failure)

    # --- figures ---

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=self.pool.num_free,
            num_preemptions=self._num_preemptions,
        )

    def check_integrity(self) -> None:
        """Blocks are free or in one running sequence's table; tables cover what is computed; nobody is in two places."""
        self.pool.check_integrity(sequence.block_ids for sequence in self._running.values())
        for sequence in self._running.values():
            assert sequence.num_computed <= len(sequence.block_ids) * self.pool.block_size, sequence
            assert sequence.num_uncomputed >= 1 or self._is_in_flight(sequence.seq_id), sequence
        for sequence in self._waiting:
            assert not sequence.block_ids and sequence.num_computed == 0, sequence
            assert sequence.seq_id not in self._running, sequence


class _Step:
    """A plan in the making."""

    def __init__(self, step_id: StepId, budget: int, max_rows: int) -> None:
        self.step_id = step_id
        self.budget = budget
        """Tokens that it can still take."""
        self.max_rows = max_rows
        self.rows: list[StepRow] = []
        self.new: list[NewSequence] = []
        self.is_short_of_blocks = False

    @property
    def is_full(self) -> bool:
        return self.budget == 0 or len(self.rows) >= self.max_rows

    def drop(self, sequence: Sequence) -> None:
        """Take a preempted sequence out of the plan again, if it is in it already."""
        kept = [row for row in self.rows if row.seq_id != sequence.seq_id]
        self.budget += sum(row.num_tokens for row in self.rows) - sum(row.num_tokens for row in kept)
        self.rows = kept
        self.new = [new for new in self.new if new.seq_id != sequence.seq_id]
