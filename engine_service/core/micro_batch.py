"""The sequences that decode: one token each in every step of their micro-batch."""

from __future__ import annotations

from millrace.engine_service.core.sequence import Sequence, StepClock
from millrace.executor.wire.kv_layout import KVLayout


class MicroBatch(StepClock):
    """Owns the decode rows of one micro-batch. There are as many micro-batches as pipeline stages.

    A step costs what changes: the members count their computed tokens by the steps of the micro-batch, so nothing is written
    for a member that goes on. A calendar says at which step one needs a block or has its last row.
    """

    def __init__(self, number: int, layout: KVLayout) -> None:
        super().__init__()
        self.number = number
        self._block_size, self._num_groups = layout.block_size, layout.num_groups
        self._members: list[Sequence] = []
        self._calendar: dict[int, list[Sequence]] = {}
        """By the value of `num_steps`."""
        self.paused: list[Sequence] = []
        """Members that left and that the workers still have as decode rows."""

    @property
    def members(self) -> list[Sequence]:
        """The sequences whose decode rows go on, in the order of the rows. Never changed in place: steps keep it."""
        if self.has_lost_members:
            self.has_lost_members = False
            self._members = [sequence for sequence in self._members if sequence.clock is self]
        return self._members

    def take_due(self) -> list[Sequence]:
        """Return the members that need a block for the next step, or have no row left."""
        # One that has left and come back may have two entries for this step.
        due = dict.fromkeys(self._calendar.pop(self.num_steps, []))
        return [sequence for sequence in due if sequence.clock is self and sequence.due_at == self.num_steps]

    def pause(self, sequence: Sequence) -> None:
        """Let a member's row not go on. The sequence stays known to the workers."""
        sequence.leave_clock()
        self.paused.append(sequence)

    def count_step(self, step_id: int, joining: list[Sequence]) -> None:
        """Count a step, in which `joining` get a token: they are members from now on."""
        members = self.members
        self.num_steps += 1
        self.last_step = step_id
        self._members = members + joining if joining else members
        for sequence in joining:
            sequence.join_clock(self)
            self.set_due(sequence)

    def set_due(self, sequence: Sequence) -> None:
        """Enter into the calendar when the member needs blocks or has no row left, whichever is first."""
        num_tokens = len(sequence.block_ids) // self._num_groups * self._block_size
        num_steps = min(num_tokens - sequence.num_computed, sequence.num_decode_rows_left)
        sequence.due_at = self.num_steps + num_steps
        self._calendar.setdefault(sequence.due_at, []).append(sequence)

    def clear(self) -> None:
        """Forget everything: the workers are new."""
        self._members = []
        self._calendar.clear()
        self.paused.clear()
        self.has_lost_members = False
