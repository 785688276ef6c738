"""The waiting sequences of one tenant, and its turns."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterator

from millrace.engine_service.core.sequence import Sequence
from millrace.executor.wire.messages import SeqId


class TenantLine:
    """Owns the sequences of a tenant that wait for its turns, and the turns.

    Each sequence brings a turn, but no turn belongs to it: the next turn is for the sequence of the highest priority, of
    these for the oldest. Iterates in this order.
    """

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.num_running = 0
        """Sequences of the tenant that run."""
        self.turns: deque[int] = deque()
        """Their numbers, the next one first: as many as there are sequences."""
        self.place: tuple[bool, int, TenantLine] | None = None
        """Whether the tenant has running sequences, and its next turn: what the lines are sorted by. None without turns."""
        self._by_priority: dict[int, OrderedDict[SeqId, Sequence]] = {}
        self._priorities: list[int] = []
        """The keys, sorted."""

    def __iter__(self) -> Iterator[Sequence]:
        for priority in reversed(self._priorities):
            yield from self._by_priority[priority].values()

    def in_turn(self, has_running: bool) -> Iterator[tuple[bool, int, Sequence]]:
        """Yield each sequence with the place that the line has when it is admitted. `has_running`: in the first one."""
        for turn, sequence in zip(self.turns, self, strict=True):
            yield has_running, turn, sequence
            has_running = True

    def add(self, sequence: Sequence, turn: int) -> None:
        """Add a sequence and the turn that it brings, which is the last one."""
        if sequence.priority not in self._by_priority:
            self._by_priority[sequence.priority] = OrderedDict()
            insort(self._priorities, sequence.priority)
        self._by_priority[sequence.priority][sequence.seq_id] = sequence
        self.turns.append(turn)

    def remove(self, sequence: Sequence, *, takes_turn: bool) -> None:
        """Remove a sequence with the next turn, or with the last one: so the others move up if it is only dropped."""
        equals = self._by_priority[sequence.priority]
        del equals[sequence.seq_id]
        if not equals:
            del self._by_priority[sequence.priority]
            del self._priorities[bisect_left(self._priorities, sequence.priority)]
        del self.turns[0 if takes_turn else -1]
