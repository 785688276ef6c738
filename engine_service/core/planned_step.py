"""One step from its planning to its result."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial

from millrace.engine_service.core.host_tier import Swaps
from millrace.engine_service.core.micro_batch import MicroBatch
from millrace.engine_service.core.sequence import Sequence
from millrace.executor.wire.messages import MAX_RECORD_BYTES, NO_TOKEN, NewSequence, SeqId, StepId, StepResult, StepRow


class PlannedStep:
    """Owns a plan while it is made, and what has to be undone when the step fails."""

    def __init__(self, step_id: StepId, micro_batch: MicroBatch, budget: int, max_rows: int) -> None:
        self.step_id = step_id
        self.micro_batch = micro_batch
        self.budget = budget
        """Tokens that the step can still take."""
        self.max_rows = max_rows
        """Rows that it can still take."""
        self._record_bytes = 0
        """Size of the log-probability records of `added`."""
        self.added: list[tuple[Sequence, StepRow]] = []
        """The rows that are not decode rows which go on."""
        self.new: list[NewSequence] = []
        self.sources: dict[tuple[bytes, tuple[int, ...]], Sequence] = {}
        """Sequences that others may fork from, by their contents: they have a row that computes their last known token."""
        self.copy: list[tuple[int, int]] = []
        """(source, destination) blocks of forks."""
        self.new_blocks: list[tuple[Sequence, int]] = []
        """New blocks of decode rows that continue."""
        self.registered: list[int] = []
        """Blocks that are cached since the step was planned."""
        self.is_short_of_blocks = False
        # From here on: set when the plan is complete.
        self.num_decodes = 0
        """Decode rows that go on."""
        self.sampled: list[Sequence] = []
        """The sequences that get a token, in the order of the result."""
        self.paused: list[Sequence] = []
        self.finished: list[SeqId] = []
        self.swaps = Swaps()

    @property
    def is_full(self) -> bool:
        return self.budget == 0 or self.max_rows <= 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all other rows; but for paused ones, of prompts."""
        return sum(row.num_tokens for _, row in self.added)

    def max_row_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens the next row of a sequence may have. 0 if the step cannot return its log-probabilities."""
        num_tokens = min(self.budget, sequence.num_uncomputed)
        if not sequence.has_records:
            return num_tokens
        size_of = partial(sequence.row_record_bytes, sequence.num_computed)
        return bisect_right(range(1, num_tokens + 1), self._free_record_bytes, key=size_of)

    def can_return(self, sequence: Sequence, start: int, num_tokens: int) -> bool:
        """Whether the step can return the log-probabilities of such a row too."""
        return not sequence.has_records or sequence.row_record_bytes(start, num_tokens) <= self._free_record_bytes

    @property
    def _free_record_bytes(self) -> int:
        # The decode rows that go on never exceed the limit: each began in a step that also had those before it.
        return MAX_RECORD_BYTES - self.micro_batch.record_bytes - self._record_bytes

    def add(self, sequence: Sequence, row: StepRow) -> None:
        self.added.append((sequence, row))
        self.budget -= row.num_tokens
        self._count_row(sequence, row)

    def add_fork(self, sequence: Sequence, row: StepRow, source: Sequence) -> None:
        """Add a row of no tokens behind that of its source. It takes a token of the budget all the same, since a step has no
        memory for more logits than tokens."""
        place = next(number for number, (other, _) in enumerate(self.added, start=1) if other is source)
        self.added.insert(place, (sequence, row))
        self.budget -= 1
        self._count_row(sequence, row)

    def _count_row(self, sequence: Sequence, row: StepRow) -> None:
        self.max_rows -= 1
        if sequence.has_records:
            self._record_bytes += sequence.row_record_bytes(row.start, row.num_tokens)

    def keep_logprobs(self, result: StepResult) -> None:
        """Give the sequences their log-probabilities. May be repeated before the tokens are appended."""
        records = iter(result.logprobs)
        for sequence, token_id in zip(self.sampled, result.token_ids, strict=True):
            if sequence.logprobs is not None:
                record = next(records)
                if token_id != NO_TOKEN and not sequence.has_ended:
                    sequence.keep_logprobs(record)
        records = iter(result.prompt_logprobs)
        for sequence, row in self.added:
            if sequence.prompt_logprobs is not None and row.start < sequence.num_prompt_tokens - 1:
                sequence.keep_prompt_logprobs(row.start, next(records))

    def drop(self, sequence: Sequence) -> None:
        """Remove a preempted sequence from the plan, if it is there."""
        for number, (other, row) in enumerate(self.added):
            if other is sequence:
                self.budget += row.num_tokens
                self.max_rows += 1
                self._record_bytes -= sequence.row_record_bytes(row.start, row.num_tokens)
                del self.added[number]
                return
        self.new_blocks = [pair for pair in self.new_blocks if pair[0] is not sequence]
