"""The crash policy: after how many lost steps a sequence runs alone, and after how many it fails."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.engine_service.core.sequence import Sequence, StopRules
from millrace.executor.wire.messages import RowSampling, SeqId

ALONE_AFTER_CRASHES = 2
"""A sequence that was in this many lost steps without progress runs alone, so that no other sequence suffers."""
QUARANTINE_AFTER_CRASHES = 5
"""After three more lost steps, now alone, the sequence itself is to blame: it fails."""

_PROBE_ID = SeqId(0)
"""Requests count from 1."""
_GREEDY = RowSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, candidate=0, min_tokens=0, end_token_ids=[]
)


class Suspects:
    """Owns the sequences that have to run alone until they make progress, in the order in which they run."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def add(self, sequence: Sequence, *, is_first: bool) -> None:
        """Take the sequence in, if it is a suspect."""
        if sequence.crash_count >= ALONE_AFTER_CRASHES:
            self._sequences.insert(0 if is_first else len(self._sequences), sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._sequences:
            self._sequences.remove(sequence)

    def first(self) -> Sequence | None:
        """Return the sequence that has to run alone now. Those that have got a token since are cleared."""
        while self._sequences and self._sequences[0].crash_count < ALONE_AFTER_CRASHES:
            self._sequences.pop(0)
        return self._sequences[0] if self._sequences else None

    def rebuild(self, waiting: Iterable[Sequence]) -> list[Sequence]:
        """Find the suspects among the sequences of a new epoch. Return those to quarantine instead."""
        blamed = [sequence for sequence in waiting if sequence.crash_count >= ALONE_AFTER_CRASHES]
        self._sequences = [sequence for sequence in blamed if sequence.crash_count < QUARANTINE_AFTER_CRASHES]
        return [sequence for sequence in blamed if sequence.crash_count >= QUARANTINE_AFTER_CRASHES]


def make_probe() -> Sequence:
    """Return a harmless sequence of one token that runs alone. If its step is lost too, the machine is to blame."""
    rules = StopRules(max_tokens=1, min_tokens=0, end_token_ids=frozenset())
    return Sequence(_PROBE_ID, [0], _GREEDY, rules, crash_count=ALONE_AFTER_CRASHES)
