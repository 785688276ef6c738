"""Which KV blocks are free, and which are shared.

Ids only; the tensors are the workers'. `KVLayout` explains the block tables. The rules are those of vLLM's v1 pool
(vllm/v1/core/block_pool.py): full blocks are found by their hash, a block without users stays cached until its place is
needed, and the end of a sequence is evicted before its beginning. Behind the pool there may be a `HostTier`: it keeps what
the pool evicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from millrace.engine_service.core.block import Block
from millrace.engine_service.core.host_tier import HostTier
from millrace.engine_service.core.prefix_cache import IN_HOST_TIER, PrefixCache
from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import NULL_BLOCK


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    num_blocks: int
    """Without the null block."""
    num_free: int
    num_cached: int
    """Blocks that a prompt can find, used or free."""
    num_queried_tokens: int
    """Known tokens of the sequences that were admitted since the start."""
    num_hit_tokens: int
    """Tokens among them that were not computed again."""
    num_stored: int
    """Blocks that a prompt could find from then on, since the start."""
    num_removed: int
    """Blocks among them that were evicted, because their space was needed or their step failed."""
    num_cleared: int
    """Times that all were forgotten."""
    num_host_blocks: int
    """Size of the host tier, 0 without one."""
    num_host_cached: int
    num_swapped_out: int
    """Blocks that were copied to the host tier since the start."""
    num_swapped_in: int


class BlockPool:
    """Owns all KV blocks, in one epoch after the other: `reset_cache` empties it. Nobody gets block 0, the null block.

    Ask, then act: `can_allocate(n)`, then `allocate(n)`.
    """

    def __init__(
        self, num_blocks: int, layout: KVLayout, *, host: HostTier | None = None, num_reserved: int = 0
    ) -> None:
        """`num_reserved`: blocks that are allocated only when no other block is free. They are for sequences that run, and
        not for prompts that stay cached: the memory of a block that was never written is not taken on a CPU."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks: must be at least 2 (block 0 is never used), got {num_blocks}")
        self.num_blocks = num_blocks
        self.layout = layout
        self.host = host or HostTier(0)
        self._windows = [(group, window) for group, window in enumerate(layout.windows) if window is not None]
        self.num_free = num_blocks - 1
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = self._blocks[NULL_BLOCK]
        """Both ends of the list of free blocks: what follows it is allocated first."""
        self._next_reserved = num_blocks - num_reserved
        """The first of the reserved blocks, which are no part of the list."""
        for block in self._blocks[1 : self._next_reserved]:
            block.insert_before(self._free)
        self.cache = PrefixCache(self._blocks, layout, self.host)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when every block is used."""
        return self.layout.capacity_tokens(self.num_blocks - 1)

    @property
    def longest_sequence(self) -> int:
        """Tokens that one sequence can have."""
        return self.layout.longest_sequence(self.num_blocks - 1)

    # --- blocks of their own ---

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, those first that were free longest. What they had cached moves to the host tier, or is lost."""
        assert num_blocks <= self.num_free
        self.num_free -= num_blocks
        return [self._take(self._next_free()) for _ in range(num_blocks)]

    def _next_free(self) -> Block:
        block = self._free.following
        if block is self._free:
            block = self._blocks[self._next_reserved]
            self._next_reserved += 1
        return block

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one use of each block of a table. Blocks without users are free: those that nobody can find are reused
        first, then the end of the table before its beginning."""
        for block_id in reversed(block_ids):
            if block_id == NULL_BLOCK:
                continue
            block = self._blocks[block_id]
            block.num_users -= 1
            if block.num_users == 0:
                block.insert_before(self._free if block.block_hash is not None else self._free.following)
                self.num_free += 1

    def free_hidden(self, table: list[int], num_computed: int) -> None:
        """Free the blocks of a table that no token from position `num_computed` on attends to."""
        for group, window in self._windows:
            num_groups, hidden = self.layout.num_groups, []
            for column in reversed(range(self.layout.num_hidden_columns(window, num_computed))):
                entry = column * num_groups + group
                if table[entry] == NULL_BLOCK:  # and all before it
                    break
                hidden.append(table[entry])
                table[entry] = NULL_BLOCK
            self.free(hidden[::-1])

    def _take(self, block: Block) -> int:
        block.unlink()
        block.num_users = 1
        if block.block_hash is not None:
            self.host.swap_out((block.group, block.block_hash), block.block_id)
            self.cache.remove(block)
        return block.block_id

    # --- shared blocks ---

    def num_free_among(self, hits: Iterable[int]) -> int:
        """How many free blocks it takes to share these: those without a user, and one for each of the host tier."""
        return sum(each == IN_HOST_TIER or self._blocks[each].num_users == 0 for each in hits if each != NULL_BLOCK)

    def share(self, hits: list[int], hashes: Sequence[bytes]) -> list[int]:
        """Add one use of each block of a table that `PrefixCache.find` has returned for these columns. Those of the host
        tier are swapped in. Return the table with the blocks that they get."""
        for block_id in hits:
            if block_id in (NULL_BLOCK, IN_HOST_TIER):
                continue
            block = self._blocks[block_id]
            if block.num_users == 0:
                block.unlink()
                self.num_free -= 1
            block.num_users += 1
        return self._swap_in(hits, hashes) if IN_HOST_TIER in hits else hits

    def _swap_in(self, hits: list[int], hashes: Sequence[bytes]) -> list[int]:
        table, num_groups = list(hits), self.layout.num_groups
        moved = [entry for entry, block_id in enumerate(hits) if block_id == IN_HOST_TIER]
        keys = [(entry % num_groups, hashes[entry // num_groups]) for entry in moved]
        self.host.pin(keys)  # before the pool evicts other blocks for them
        for entry, key, block_id in zip(moved, keys, self.allocate(len(moved)), strict=True):
            table[entry] = block_id
            self.host.swap_in(key, block_id)
        self.cache.register(table, hashes)
        return table

    def unregister(self, block_ids: Iterable[int]) -> None:
        """Let nobody find these blocks any more: what they hold was not computed, or not rightly."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.block_hash is not None:
                self.cache.remove(block)
                if block.num_users == 0:
                    block.unlink()
                    block.insert_before(self._free.following)

    def unregister_hashes(self, hashes: Sequence[bytes]) -> None:
        """Let nobody find the blocks with these hashes any more, in the host tier too."""
        self.host.drop([(group, each) for each in hashes for group in range(self.layout.num_groups)])
        self.unregister([block.block_id for block in self.cache.blocks_of(hashes)])

    def reset_cache(self) -> None:
        """Forget what is cached, in the host tier too. Blocks in use stay with their users."""
        self.host.clear()
        self.cache.clear()

    # --- figures ---

    def stats(self) -> PoolStats:
        return PoolStats(
            num_blocks=self.num_blocks - 1,
            num_free=self.num_free,
            num_cached=len(self.cache),
            num_queried_tokens=self.cache.num_queried_tokens,
            num_hit_tokens=self.cache.num_hit_tokens,
            num_stored=self.cache.num_stored,
            num_removed=self.cache.num_removed,
            num_cleared=self.cache.num_cleared,
            num_host_blocks=self.host.num_blocks,
            num_host_cached=self.host.num_cached,
            num_swapped_out=self.host.num_swapped_out,
            num_swapped_in=self.host.num_swapped_in,
        )
