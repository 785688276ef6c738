"""Which KV blocks are free, which are shared, and which hold tokens that a later prompt may begin with.

Ids only; the tensors are the workers'. The rules are those of vLLM's v1 pool (vllm/v1/core/block_pool.py): full blocks are
found by their hash, a block without users stays cached until its place is needed, and the end of a sequence is evicted
before its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from millrace.executor.wire.messages import NULL_BLOCK


class BlockEvent(msgspec.Struct, frozen=True):
    """A change of what is cached."""

    kind: Literal["stored", "removed", "cleared"]
    hashes: list[bytes] = []
    """Empty for "cleared"."""


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    num_blocks: int
    """Without the null block."""
    num_free: int
    num_cached: int
    """Blocks that a prompt can find, used or free."""
    num_queried_tokens: int
    """Known tokens of the sequences that were admitted since the start."""
    num_hit_tokens: int
    """Of those, the tokens that were not computed again."""


class _Block:
    """One block. A free one is a link of the list of free blocks."""

    __slots__ = ("block_hash", "block_id", "following", "num_users", "previous")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.num_users = 0
        """Block tables that hold it."""
        self.block_hash: bytes | None = None
        """Set while the block can be found."""
        self.previous: _Block = self
        self.following: _Block = self

    def insert_before(self, link: _Block) -> None:
        self.previous, self.following = link.previous, link
        link.previous.following = link.previous = self

    def unlink(self) -> None:
        self.previous.following, self.following.previous = self.following, self.previous


class BlockPool:
    """Owns all KV blocks of one epoch. Block 0 is the null block, which nobody gets.

    Ask, then act: `can_allocate(n)`, then `allocate(n)`.
    """

    def __init__(self, num_blocks: int, block_size: int, *, record_events: bool = False) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks: must be at least 2 (block 0 is never used), got {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks - 1
        self._blocks = [_Block(block_id) for block_id in range(num_blocks)]
        self._free = self._blocks[NULL_BLOCK]
        """Both ends of the list of free blocks: what follows it is allocated first."""
        for block in self._blocks[1:]:
            block.insert_before(self._free)
        self._cached: dict[bytes, _Block] = {}
        self._events: list[BlockEvent] | None = [] if record_events else None
        self._num_queried_tokens = self._num_hit_tokens = 0

    def __repr__(self) -> str:
        return f"BlockPool({self.num_free} of {self.num_blocks - 1} blocks free, {self.block_size} tokens each)"

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when every block is used."""
        return (self.num_blocks - 1) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    # --- blocks of their own ---

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, those first that were free longest. What they had cached is forgotten."""
        assert num_blocks <= self.num_free
        self.num_free -= num_blocks
        return [self._take(self._free.following) for _ in range(num_blocks)]

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one use of each block of a table. Blocks without users are free: those that nobody can find are reused
        first, then the end of the table before its beginning."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            block.num_users -= 1
            if block.num_users == 0:
                block.insert_before(self._free if block.block_hash is not None else self._free.following)
                self.num_free += 1

    def _take(self, block: _Block) -> int:
        block.unlink()
        block.num_users = 1
        if block.block_hash is not None:
            self._evict(block)
        return block.block_id

    # --- shared blocks ---

    def num_users(self, block_id: int) -> int:
        return self._blocks[block_id].num_users

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks that hold the longest beginning of these."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                break
            found.append(block.block_id)
        return found

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these have no user: sharing them takes them out of the free ones."""
        return sum(self._blocks[block_id].num_users == 0 for block_id in block_ids)

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one use of each block that `find` has returned."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.num_users == 0:
                block.unlink()
                self.num_free -= 1
            block.num_users += 1

    def register(self, block_ids: Iterable[int], hashes: Sequence[bytes]) -> list[int]:
        """Let used blocks be found by these hashes from now on. Returns those that could not be found before; a block with
        the tokens of another one stays without a hash."""
        registered = []
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            block = self._blocks[block_id]
            if block.block_hash is None and block_hash not in self._cached:
                block.block_hash = block_hash
                self._cached[block_hash] = block
                registered.append(block_id)
        if registered:
            self._record("stored", registered)
        return registered

    def unregister(self, block_ids: Iterable[int]) -> None:
        """Let nobody find these blocks any more: what they hold was not computed, or not rightly."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.block_hash is not None:
                self._evict(block)
                if block.num_users == 0:
                    block.unlink()
                    block.insert_before(self._free.following)

    def reset_cache(self) -> None:
        """Forget what is cached. Blocks in use stay with their users."""
        for block in self._cached.values():
            block.block_hash = None
        self._cached.clear()
        if self._events is not None:
            self._events = [BlockEvent("cleared")]

    def _evict(self, block: _Block) -> None:
        assert block.block_hash is not None
        self._record("removed", [block.block_id])
        del self._cached[block.block_hash]
        block.block_hash = None

    # --- figures ---

    def count_query(self, num_tokens: int, num_hit_tokens: int) -> None:
        """A sequence was admitted with so many known tokens, of which the cache had `num_hit_tokens`."""
        self._num_queried_tokens += num_tokens
        self._num_hit_tokens += num_hit_tokens

    def stats(self) -> PoolStats:
        return PoolStats(
            num_blocks=self.num_blocks - 1,
            num_free=self.num_free,
            num_cached=len(self._cached),
            num_queried_tokens=self._num_queried_tokens,
            num_hit_tokens=self._num_hit_tokens,
        )

    def take_events(self) -> list[BlockEvent]:
        """Return what has changed since the last call, oldest first; nothing unless `record_events` was asked for."""
        events, self._events = self._events or [], None if self._events is None else []
        return events

    def _record(self, kind: Literal["stored", "removed"], block_ids: list[int]) -> None:
        if self._events is not None:
            hashes = [self._blocks[block_id].block_hash or b"" for block_id in block_ids]
            self._events.append(BlockEvent(kind, hashes))

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Check that every block is free or in as many of `tables` as it has users, and that hashes lead to their blocks."""
        users = [0] * self.num_blocks
        for table in tables:
            assert len(table) == len(set(table)), "a table holds a block twice"
            for block_id in table:
                users[block_id] += 1
        assert users == [block.num_users for block in self._blocks], "a block has other users than it counts"
        free, link = [], self._free.following
        while link is not self._free:
            assert link.following.previous is link, "the list of free blocks is broken"
            free.append(link.block_id)
            link = link.following
        assert sorted(free) == [n for n in range(1, self.num_blocks) if users[n] == 0], (
            "a block is lost, or free and used"
        )
        assert len(free) == self.num_free
        for block_hash, block in self._cached.items():
            assert block.block_hash == block_hash, "a hash leads to another block"
        assert len(self._cached) == sum(block.block_hash is not None for block in self._blocks)
