"""One step from its planning to its result."""

from __future__ import annotations

from millrace.engine_service.core.host_tier import Swaps
from millrace.engine_service.core.micro_batch import MicroBatch
from millrace.engine_service.core.sequence import Sequence
from millrace.executor.wire.messages import NO_TOKEN, NewSequence, SeqId, StepId, StepResult, StepRow


class PlannedStep:
    """Owns a plan while it is made, and what has to be undone when the step fails."""

    def __init__(self, step_id: StepId, micro_batch: MicroBatch, budget: int, max_rows: int) -> None:
        self.step_id = step_id
        self.micro_batch = micro_batch
        self.budget = budget
        """Tokens that the step can still take."""
        self.max_rows = max_rows
        """Rows that it can still take."""
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

    def add(self, sequence: Sequence, row: StepRow) -> None:
        self.added.append((sequence, row))
        self.budget -= row.num_tokens
        self.max_rows -= 1

    def add_fork(self, sequence: Sequence, row: StepRow, source: Sequence) -> None:
        """Add a row of no tokens behind that of its source. It takes a token of the budget all the same, since a step has no
        memory for more logits than tokens."""
        place = next(number for number, (other, _) in enumerate(self.added, start=1) if other is source)
        self.added.insert(place, (sequence, row))
        self.budget -= 1
        self.max_rows -= 1

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
                del self.added[number]
                self.new = [new for new in self.new if new.seq_id != sequence.seq_id]
                return
        self.new_blocks = [pair for pair in self.new_blocks if pair[0] is not sequence]
