"""The order in which waiting sequences are admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import merge
from itertools import chain, islice, takewhile

from millrace.engine_service.core.announced_grammars import AnnouncedGrammars
from millrace.engine_service.core.sequence import Sequence
from millrace.engine_service.core.tenant_line import TenantLine
from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import SeqId

_MAX_LOOKAHEAD = 8
"""Waiting sequences among which the one with most cached blocks is admitted first."""
_MAX_PASSED_OVER = 16


class WaitingQueue:
    """Owns the waiting sequences in their order, the sum of the blocks that they need, and how many of each tenant run.

    Sequences that are pushed before all others, such as preempted ones, are admitted first. Each other one brings its tenant
    a turn. The turns come in the order of arrival, which keeps the shares that the claims gave to the tenants. In a turn the
    tenant's sequence of the highest priority is admitted, so priorities change nothing for other tenants. The next turn of a
    tenant with no running sequence comes before those of tenants that have some. This starves no tenant: once none of its
    sequences runs, only older turns are before its own.

    A sequence whose grammar the workers have not compiled is held: it is not chosen, and others go before it.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._ids: set[SeqId] = set()
        """Of all of them."""
        self._first: OrderedDict[SeqId, Sequence] = OrderedDict()
        """Those before all others."""
        self._lines: dict[str, TenantLine] = {}
        """By tenant, as long as anything of it waits for a turn, or runs."""
        self._order: list[tuple[bool, int, TenantLine]] = []
        """The places of the lines with turns, sorted."""
        self._last_turn = 0
        self._held: OrderedDict[SeqId, tuple[Sequence, int]] = OrderedDict()
        """With the numbers of their grammars."""
        self.grammars = AnnouncedGrammars()
        self.num_blocks = 0
        """Blocks that the sequences need to be admitted, were nothing cached."""

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._ready(), (sequence for sequence, _ in self._held.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._ids

    @property
    def has_ready(self) -> bool:
        """Whether there is a sequence to choose."""
        return bool(self._first or self._order)

    @property
    def has_held(self) -> bool:
        return bool(self._held)

    def push(self, sequence: Sequence, *, is_first: bool = False) -> None:
        """Add a sequence with the last turn, or before all others."""
        self._ids.add(sequence.seq_id)
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
        """Drop a sequence. Does nothing when it is not there."""
        if sequence in self:
            self._remove(sequence, is_admitted=False)

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that begins to run. It takes the next turn of its tenant, if it waited for one."""
        self._remove(sequence, is_admitted=True)

    def count_stopped(self, sequence: Sequence) -> None:
        """Note that an admitted sequence does not run any more."""
        line = self._line(sequence)
        line.num_running -= 1
        self._place(line)

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
        first, *others = islice(self._first.values() if self._first else self._order[0][2], _MAX_LOOKAHEAD)
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
        head = list(islice(self._ready(), max(0, max_sequences)))
        for number, sequence in enumerate(head):
            num_free_blocks -= self._num_blocks_to_admit(sequence)
            if num_free_blocks < 0:
                return number
        return len(head)

    def num_tokens_to_admit(self, num_free_blocks: int, max_sequences: int, fewer_than: int) -> int:
        """Return how many tokens the next sequences need to be admitted, were nothing cached: those that the free blocks can
        take, up to the first one that needs `fewer_than` or more."""
        num_sequences = self.num_admissible(num_free_blocks, min(max_sequences, _MAX_LOOKAHEAD))
        counts = (sequence.num_uncomputed for sequence in islice(self._ready(), num_sequences))
        return sum(takewhile(lambda count: count < fewer_than, counts))

    def _push_ready(self, sequence: Sequence, *, is_first: bool = False) -> None:
        if is_first:
            self._first[sequence.seq_id] = sequence
            self._first.move_to_end(sequence.seq_id, last=False)
        else:
            self._last_turn += 1
            line = self._line(sequence)
            line.add(sequence, self._last_turn)
            self._place(line)

    def _remove(self, sequence: Sequence, *, is_admitted: bool) -> None:
        self._ids.remove(sequence.seq_id)
        self.num_blocks -= sequence.num_waiting_blocks
        line = self._line(sequence)
        line.num_running += is_admitted
        if not (self._first.pop(sequence.seq_id, None) or self._held.pop(sequence.seq_id, None)):
            line.remove(sequence, takes_turn=is_admitted)
        self._place(line)

    def _line(self, sequence: Sequence) -> TenantLine:
        if sequence.tenant not in self._lines:
            self._lines[sequence.tenant] = TenantLine(sequence.tenant)
        return self._lines[sequence.tenant]

    def _place(self, line: TenantLine) -> None:
        """Put a line where it belongs now."""
        place = (line.num_running > 0, line.turns[0], line) if line.turns else None
        if place != line.place:
            if line.place is not None:
                del self._order[bisect_left(self._order, line.place)]
            if place is not None:
                insort(self._order, place)
            line.place = place
        if not (line.turns or line.num_running):
            del self._lines[line.tenant]

    def _ready(self) -> Iterator[Sequence]:
        """Yield those that can be chosen, in the order in which they are admitted if nothing is cached and none ends."""
        yield from self._first.values()
        started = {sequence.tenant for sequence in self._first.values()}
        turns = (line.in_turn(has_running or line.tenant in started) for has_running, _, line in self._order)
        yield from (sequence for _, _, sequence in merge(*turns))

    def _num_blocks_to_admit(self, sequence: Sequence) -> int:
        """Blocks for the known tokens and one more."""
        return self._layout.num_blocks(sequence.num_tokens + 1)
