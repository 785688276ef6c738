"""The free KV blocks, by id. The workers own the tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from millrace.executor.wire.messages import NULL_BLOCK


class BlockPool:
    """Owns the ids of all KV blocks of one epoch. Block 0 is the null block and is never allocated.

    Ask, then act: `can_allocate(n)`, then `allocate(n)`.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks: must be at least 2 (block 0 is never used), got {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(block for block in range(num_blocks) if block != NULL_BLOCK)

    def __repr__(self) -> str:
        return f"BlockPool({self.num_free} of {self.num_blocks - 1} blocks free, {self.block_size} tokens each)"

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all blocks together hold."""
        return (self.num_blocks - 1) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        assert self.can_allocate(num_blocks)
        return [self._free.popleft() for _ in range(num_blocks)]

    def free(self, blocks: Iterable[int]) -> None:
        """Put the blocks of a sequence back, the last one first, so that its beginning is reused last."""
        self._free.extend(reversed(list(blocks)))

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Assert that every block is free or in exactly one of `tables`."""
        seen = [*self._free, *(block for table in tables for block in table)]
        assert len(seen) == len(set(seen)), "a block is free and owned, or owned twice"
        assert sorted(seen) == list(range(1, self.num_blocks)), "a block is lost"
