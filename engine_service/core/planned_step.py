"""One step from its planning to its result."""

from __future__ import annotations

from millrace.engine_service.core.sequence import Sequence
from millrace.executor.wire.messages import NewSequence, StepId, StepRow


class PlannedStep:
    """Owns a plan while it is made, and what has to be undone when the step fails."""

    def __init__(self, step_id: StepId, budget: int, max_rows: int) -> None:
        self.step_id = step_id
        self.budget = budget
        """Tokens that the step can still take."""
        self.max_rows = max_rows
        self.sequences: list[Sequence] = []
        self.rows: list[StepRow] = []
        """One for each of `sequences`."""
        self.new: list[NewSequence] = []
        self.registered: list[int] = []
        """Blocks that are cached since the step was planned."""
        self.is_short_of_blocks = False

    @property
    def is_full(self) -> bool:
        return self.budget == 0 or len(self.rows) >= self.max_rows

    def add(self, sequence: Sequence, row: StepRow) -> None:
        self.sequences.append(sequence)
        self.rows.append(row)
        self.budget -= row.num_tokens

    def drop(self, sequence: Sequence) -> None:
        """Remove a preempted sequence from the plan, if it is there."""
        if sequence in self.sequences:
            number = self.sequences.index(sequence)
            self.budget += self.rows[number].num_tokens
            del self.sequences[number], self.rows[number]
            self.new = [new for new in self.new if new.seq_id != sequence.seq_id]
