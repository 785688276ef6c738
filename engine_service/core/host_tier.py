"""The prefix cache behind the pool's: blocks in host memory, which keep what blocks of the device have cached.

A block whose tokens can be found moves here when the pool needs its place: of an ended sequence, or of a preempted one.
When a prompt begins with it, it comes back. Ids only; the workers copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

BlockKey = tuple[int, bytes]
"""The group of layers and the hash of a block."""


class Swaps(msgspec.Struct, frozen=True):
    """What one plan moves; see `StepPlan`."""

    swap_out: list[tuple[int, int]] = []
    swap_in: list[tuple[int, int]] = []
    keys: list[BlockKey] = []
    """Keys of all blocks that move. If the step fails, their contents are unknown."""


class HostTier:
    """Owns the host blocks, in one epoch after the other, and the moves that the next plan has to make.

    A worker makes the moves of a plan before it computes, first all out, then all in. So a block that the next plan moves
    is not given away before that plan.
    """

    def __init__(self, num_blocks: int, swap_s: float = 0.0, *, is_forced: bool = False) -> None:
        """`num_blocks`: 0 where there is no host tier. `swap_s`: how long the slowest rank takes to move a block out and in
        again. `is_forced`: move blocks even if to compute them again is faster."""
        self.num_blocks = num_blocks
        self._swap_s = swap_s
        self._is_forced = is_forced
        self.recompute_s = 0.0
        """How long it takes to compute a block again. 0.0 before the first measurement."""
        self._blocks: OrderedDict[BlockKey, int] = OrderedDict()
        """Host blocks, the one that was used least recently first."""
        self._free = list(range(num_blocks))
        self._next = Swaps()
        self._pinned: set[int] = set()
        """Host blocks that the next plan moves."""
        self.num_swapped_out = self.num_swapped_in = 0

    @property
    def num_cached(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def swap_out(self, key: BlockKey, device_block: int) -> None:
        """Keep the contents of a device block that is about to be reused, if that is faster than to compute them again."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
        elif self._is_forced or self.recompute_s == 0.0 or self._swap_s < self.recompute_s:
            host_block = self._take()
            if host_block is not None:
                self._blocks[key] = host_block
                self._move(key, host_block)
                self._next.swap_out.append((device_block, host_block))
                self.num_swapped_out += 1

    def pin(self, keys: Iterable[BlockKey]) -> None:
        """Keep blocks until they are swapped in."""
        for key in keys:
            self._blocks.move_to_end(key)
            self._pinned.add(self._blocks[key])

    def swap_in(self, key: BlockKey, device_block: int) -> None:
        """Copy a pinned block to the device. It stays here too: if the device evicts it again, nothing has to move."""
        host_block = self._blocks[key]
        self._move(key, host_block)
        self._next.swap_in.append((host_block, device_block))
        self.num_swapped_in += 1

    def take_swaps(self) -> Swaps:
        """Return what the plan that is complete now has to move."""
        swaps, self._next = self._next, Swaps()
        self._pinned.clear()
        return swaps

    def drop(self, keys: Iterable[BlockKey]) -> None:
        """Forget blocks: nobody knows what they hold."""
        dropped = {self._blocks.pop(key) for key in keys if key in self._blocks}
        self._free += dropped
        self._pinned -= dropped
        self._next = Swaps([move for move in self._next.swap_out if move[1] not in dropped])

    def undo_next(self) -> None:
        """Forget the moves that no plan has made yet: what they were to copy may not have been computed."""
        self.drop(self.take_swaps().keys)

    def clear(self) -> None:
        """Forget all blocks."""
        self.take_swaps()
        self.drop(list(self._blocks))

    def _take(self) -> int | None:
        """Return a host block, if need be that which was used least recently. None when the next plan moves that one, and
        where there is no host tier."""
        if self._free:
            return self._free.pop()
        if not self._blocks:
            return None
        key, host_block = next(iter(self._blocks.items()))
        if host_block in self._pinned:
            return None
        del self._blocks[key]
        return host_block

    def _move(self, key: BlockKey, host_block: int) -> None:
        self._pinned.add(host_block)
        self._next.keys.append(key)
