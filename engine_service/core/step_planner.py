"""Decide what a step computes: decodes first, then prompts in chunks, under one token budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millrace.engine_service.core.micro_batch import MicroBatch
from millrace.engine_service.core.planned_step import PlannedStep
from millrace.engine_service.core.prefill_pace import PrefillPace
from millrace.engine_service.core.running_sequences import RunningSequences
from millrace.engine_service.core.sequence import Sequence
from millrace.engine_service.core.waiting_queue import WaitingQueue
from millrace.executor.wire.messages import StepRow


class StepPlanner:
    """Fills plans with rows: it moves sequences from the waiting ones to the running ones, and back when the pool is short
    of blocks. Counts the preemptions."""

    def __init__(
        self,
        running: RunningSequences,
        waiting: WaitingQueue,
        pace: PrefillPace,
        is_in_flight: Callable[[Sequence], bool],
        *,
        max_num_seqs: int,
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._pace = pace
        self._is_in_flight = is_in_flight
        self._max_num_seqs = max_num_seqs
        self.num_preemptions = 0

    def plan(self, step: PlannedStep, *, run_ahead: bool) -> None:
        """Add rows to a step. `run_ahead`: also rows that feed tokens of a step in flight."""
        self._schedule_decodes(step)
        self._limit_prompts(step)
        self._schedule_ready(step, run_ahead=run_ahead)
        self._admit_waiting(step)

    def plan_alone(self, sequence: Sequence, step: PlannedStep) -> None:
        """Give the next row to this sequence, and to no other."""
        for member in step.micro_batch.members:
            self._pause(member, step.micro_batch)
        if sequence in self._waiting:
            while not self._running.can_admit(sequence, hit_blocks := self._running.find_blocks(sequence)):
                self._preempt(next(reversed(self._running)), step)
            self._admit(sequence, hit_blocks, step)
            return
        if sequence.clock is not None:
            self._pause(sequence, step.micro_batch)
        if self._try_row(sequence, step):
            self._share_row(sequence, step)

    def requeue(self, sequence: Sequence) -> None:
        """Put a running sequence back to the head of the queue, with its tokens and without its keys and values."""
        self._running.release(sequence)
        self._waiting.count_stopped(sequence)
        self._waiting.push(sequence, is_first=True)

    def _schedule_decodes(self, step: PlannedStep) -> None:
        """Let the decode rows of the micro-batch go on, as many as the step can take."""
        micro_batch = step.micro_batch
        due, pool, num_groups = micro_batch.take_due(), self._running.pool, self._running.pool.layout.num_groups
        for sequence in due:
            if sequence.num_decode_rows_left == 0:
                sequence.leave_clock()
                self._running.forget_at_workers(sequence)
        for sequence in micro_batch.members[min(step.budget, step.max_rows) :]:
            self._pause(sequence, micro_batch)
        for sequence in due:
            if sequence.clock is micro_batch and self._ensure_blocks(sequence, num_groups, step):
                block_ids = pool.allocate(num_groups)
                sequence.block_ids += block_ids
                for block_id in block_ids:
                    step.new_blocks.append((sequence, block_id))
                micro_batch.set_due(sequence)
        step.budget -= len(micro_batch.members)
        step.max_rows -= len(micro_batch.members)

    def _limit_prompts(self, step: PlannedStep) -> None:
        """Keep the step short if somebody reads the output of a decoding sequence, also of another micro-batch: in a
        pipeline its next step waits for this one."""
        has_prompts = bool(self._running.ready or self._waiting.has_ready)
        if has_prompts and any(each.is_watched and each.clock is not None for each in self._running):
            step.budget = self._pace.limit(step.budget)

    def _schedule_ready(self, step: PlannedStep, *, run_ahead: bool) -> None:
        """Plan the running sequences without a decode row that goes on: paused ones, then prompts.

        A prompt that takes the whole step leaves half of it to those that need less, running or next in the queue."""
        ready = [each for each in self._running.ready.values() if run_ahead or not each.num_pending]
        self._try_rows((each for each in ready if each.num_uncomputed <= 1), step)
        prompts = [each for each in ready if each.num_uncomputed > 1]
        most = next((each.num_uncomputed for each in prompts if each.num_uncomputed > step.budget), None)
        if most is None:
            self._try_rows(prompts, step)
        else:
            for_long = step.budget - step.budget // 2
            step.budget -= for_long
            self._try_rows((each for each in prompts if each.num_uncomputed < most), step)
            num_free, max_sequences = self._running.pool.num_free, self._max_num_seqs - len(self._running)
            for_waiting = min(step.budget, self._waiting.num_tokens_to_admit(num_free, max_sequences, most))
            step.budget += for_long - for_waiting
            self._try_rows((each for each in prompts if each.num_uncomputed >= most), step)
            step.budget += for_waiting
        for sequence, _ in step.added:  # until here a row could be dropped again
            self._share_row(sequence, step)

    def _try_rows(self, sequences: Iterable[Sequence], step: PlannedStep) -> None:
        for sequence in sequences:
            if step.is_full:
                return
            if sequence.seq_id in self._running.ready:  # not if an earlier one has preempted it
                self._try_row(sequence, step)

    def _admit_waiting(self, step: PlannedStep) -> None:
        """Admit in the order of the queue, but for prefixes. If the next one lacks blocks, or the step has no space for its
        log-probabilities, no other one overtakes it."""
        while self._waiting.has_ready and not step.is_full and not step.is_short_of_blocks:
            if len(self._running) >= self._max_num_seqs:
                return
            sequence, hit_blocks = self._waiting.choose(self._running.find_blocks, self._is_in_flight)
            if self._is_in_flight(sequence):
                return
            source = self._find_source(sequence, step)
            if source is not None and self._running.pool.can_allocate(self._running.pool.layout.num_groups):
                self._fork(sequence, source, step)
            elif step.can_return(
                sequence, self._running.pool.layout.num_tokens_in(hit_blocks), 1
            ) and self._running.can_admit(sequence, hit_blocks):
                self._admit(sequence, hit_blocks, step)
            else:
                return

    def _pause(self, sequence: Sequence, micro_batch: MicroBatch) -> None:
        micro_batch.pause(sequence)
        self._running.ready[sequence.seq_id] = sequence

    def _ensure_blocks(self, sequence: Sequence, num_blocks: int, step: PlannedStep) -> bool:
        """Preempt other sequences until the pool has the blocks that this one needs for the step. Return False when it was
        preempted itself. Before that, give back the blocks that its windows have passed."""
        pool, num_computed = self._running.pool, sequence.num_computed
        self._running.register_blocks(sequence, num_computed, step.registered)
        pool.free_hidden(sequence.block_ids, num_computed)
        while not pool.can_allocate(num_blocks):
            step.is_short_of_blocks = True
            victim = self._running.choose_victim()
            self._preempt(victim, step)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, step: PlannedStep) -> None:
        """Requeue a sequence that may have a row in this step. It keeps its pending tokens too."""
        step.drop(sequence)
        self.requeue(sequence)
        self.num_preemptions += 1

    def _admit(self, sequence: Sequence, hit_blocks: list[int], step: PlannedStep) -> None:
        self._waiting.admit(sequence)
        step.registered += self._running.admit(sequence, hit_blocks)
        step.new.append(sequence.as_new())
        self._add_row(sequence, step, step.max_row_tokens(sequence), list(sequence.block_ids))
        self._share_row(sequence, step)

    def _find_source(self, sequence: Sequence, step: PlannedStep) -> Sequence | None:
        """Return a sequence with the same tokens, of which the step computes the last one."""
        if not step.sources or sequence.must_score_prompt or not step.can_return(sequence, sequence.num_tokens, 0):
            return None
        return step.sources.get(sequence.content(self._running.pool.layout.block_size))

    def _fork(self, sequence: Sequence, source: Sequence, step: PlannedStep) -> None:
        """Admit a sequence with the tokens of another one, which takes its first token from the same logits."""
        self._waiting.admit(sequence)
        step.copy += self._running.fork(sequence, source)
        step.new.append(sequence.as_new())
        row = StepRow(sequence.seq_id, sequence.num_tokens, 0, list(sequence.block_ids))
        step.add_fork(sequence, row, source)
        sequence.schedule(0, [], step.step_id)

    def _share_row(self, sequence: Sequence, step: PlannedStep) -> None:
        """Let other sequences use what the last row of a sequence computes."""
        self._running.register_blocks(sequence, sequence.num_computed, step.registered)
        if self._running.is_sharing and sequence.num_computed == sequence.num_tokens:
            step.sources.setdefault(sequence.content(self._running.pool.layout.block_size), sequence)

    def _try_row(self, sequence: Sequence, step: PlannedStep) -> bool:
        """Add the next row of a running sequence. Return False if the step has no space for it, or if the pool is short of
        blocks and the sequence was preempted."""
        num_tokens = step.max_row_tokens(sequence)
        if not num_tokens or not self._ensure_blocks(
            sequence, self._running.num_missing_blocks(sequence, num_tokens), step
        ):
            return False
        self._add_row(sequence, step, num_tokens)
        return True

    def _add_row(self, sequence: Sequence, step: PlannedStep, num_tokens: int, hit_blocks: Iterable[int] = ()) -> None:
        blocks = self._running.pool.allocate(self._running.num_missing_blocks(sequence, num_tokens))
        step.add(sequence, StepRow(sequence.seq_id, sequence.num_computed, num_tokens, [*hit_blocks, *blocks]))
        sequence.schedule(num_tokens, blocks, step.step_id)
