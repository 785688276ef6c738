"""The order in which waiting sequences are admitted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain, islice

from millrace.engine_service.core.announced_grammars import AnnouncedGrammars
from millrace.engine_service.core.sequence import Sequence
from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import SeqId

_MAX_LOOKAHEAD = 8
"""Waiting sequences among which the one with most cached blocks is admitted first."""
_MAX_PASSED_OVER = 16


class WaitingQueue:
    """Owns the waiting sequences in their order, and the sum of the blocks that they need.

    A sequence whose grammar the workers have not compiled is held: it is not chosen, and others go before it.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._ready: OrderedDict[SeqId, Sequence] = OrderedDict()
        self._held: OrderedDict[SeqId, tuple[Sequence, int]] = OrderedDict()
        """With the numbers of their grammars."""
        self.grammars = AnnouncedGrammars()
        self.num_blocks = 0
        """Blocks that the sequences need to be admitted, were nothing cached."""

    def __len__(self) -> int:
        return len(self._ready) + len(self._held)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._ready.values(), (sequence for sequence, _ in self._held.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._ready or sequence.seq_id in self._held

    @property
    def has_ready(self) -> bool:
        """Whether there is a sequence to choose."""
        return bool(self._ready)

    @property
    def has_held(self) -> bool:
        return bool(self._held)

    def push(self, sequence: Sequence, *, is_first: bool = False) -> None:
        """Add a sequence at the end, or before all others."""
        grammar = sequence.sampling.grammar
        number = self.grammars.number(grammar) if grammar else 0
        if number > self.grammars.last_compiled:
            self._held[sequence.seq_id] = sequence, number
            if is_first:
                self._held.move_to_end(sequence.seq_id, last=False)
        else:
            self._push_ready(sequence, is_first=is_first)
        sequence.num_waiting_blocks = self._num_blocks_to_admit(sequence)
        self.num_blocks += sequence.num_waiting_blocks

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Does nothing when it is not there."""
        if sequence in self:
            self._ready.pop(sequence.seq_id, None)
            self._held.pop(sequence.seq_id, None)
            self.num_blocks -= sequence.num_waiting_blocks

    def release(self, last_compiled: int) -> None:
        """Let sequences be chosen whose grammars have numbers up to this one. Those with an output go before all others."""
        if last_compiled <= self.grammars.last_compiled:
            return
        self.grammars.last_compiled = last_compiled
        released = [sequence for sequence, number in self._held.values() if number <= last_compiled]
        for sequence in released:
            del self._held[sequence.seq_id]
        resumed = [sequence for sequence in released if sequence.output_token_ids]
        for sequence in [each for each in released if not each.output_token_ids]:
            self._push_ready(sequence)
        for sequence in reversed(resumed):
            self._push_ready(sequence, is_first=True)

    def hold_all(self) -> None:
        """Hold every sequence with a grammar: the workers are new."""
        self.grammars.forget()
        for sequence in [each for each in self if each.sampling.grammar]:
            self.remove(sequence)
            self.push(sequence)

    def choose(
        self, find_blocks: Callable[[Sequence, int], list[int]], is_in_flight: Callable[[Sequence], bool]
    ) -> tuple[Sequence, list[int]]:
        """Return the sequence to admit next, and its cached blocks. It stays in the queue.

        Among the first sequences with the tenant and the priority of the very first, the one with most of its blocks cached
        goes first: later its blocks may be evicted. A sequence is passed over a limited number of times, and those in flight
        overtake no other.
        """
        first, *others = islice(self._ready.values(), _MAX_LOOKAHEAD)
        chosen, hit_blocks = first, find_blocks(first, 0)
        if first.num_passed_over < _MAX_PASSED_OVER:
            for sequence in others:
                if (sequence.tenant, sequence.priority) != (first.tenant, first.priority):
                    break
                found = find_blocks(sequence, len(hit_blocks))
                if len(found) > len(hit_blocks) and not is_in_flight(sequence):
                    chosen, hit_blocks = sequence, found
        first.num_passed_over += chosen is not first
        return chosen, hit_blocks

    def num_admissible(self, num_free_blocks: int, max_sequences: int) -> int:
        """Return how many of the first sequences the free blocks can take, were nothing cached."""
        head = list(islice(self._ready.values(), max(0, max_sequences)))
        for number, sequence in enumerate(head):
            num_free_blocks -= self._num_blocks_to_admit(sequence)
            if num_free_blocks < 0:
                return number
        return len(head)

    def _push_ready(self, sequence: Sequence, *, is_first: bool = False) -> None:
        self._ready[sequence.seq_id] = sequence
        if is_first:
            self._ready.move_to_end(sequence.seq_id, last=False)

    def _num_blocks_to_admit(self, sequence: Sequence) -> int:
        """Blocks for the known tokens and one more."""
        return self._layout.num_blocks(sequence.num_tokens + 1)

    def check_integrity(self) -> None:
        """Check that waiting sequences have no state in the pool, that none was passed over too often, and that the sum of
        their blocks is right."""
        assert all(not each.block_ids and each.num_computed == 0 for each in self), "a waiting sequence has blocks"
        assert all(each.num_passed_over <= _MAX_PASSED_OVER for each in self), "a sequence was passed over too often"
        assert self.num_blocks == sum(each.num_waiting_blocks for each in self), "the sum of their blocks is wrong"
