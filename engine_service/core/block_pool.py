"""Which KV blocks are free, which are shared, and which hold tokens that a later prompt may begin with.

Ids only; the tensors are the workers'. `KVLayout` explains the block tables. The rules are those of vLLM's v1 pool
(vllm/v1/core/block_pool.py): full blocks are found by their hash, a block without users stays cached until its place is
needed, and the end of a sequence is evicted before its beginning. Behind the pool there may be a `HostTier`: it keeps what
the pool evicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Literal

import msgspec

from millrace.engine_service.core.host_tier import HostTier
from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import NULL_BLOCK

IN_HOST_TIER = -1
"""Stands for a block that is in the host tier and not on the device."""


class BlockEvent(msgspec.Struct, frozen=True):
    """A change of what is cached."""

    kind: Literal["stored", "removed", "cleared"]
    hashes: list[bytes] = []
    """Empty for "cleared"."""
    group: int = 0


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
    num_host_blocks: int
    """Size of the host tier, 0 without one."""
    num_host_cached: int
    num_swapped_out: int
    """Blocks that were copied to the host tier since the start."""
    num_swapped_in: int


class _Block:
    """One block. A free one is a link of the list of free blocks."""

    __slots__ = ("block_hash", "block_id", "following", "group", "num_users", "previous")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.num_users = 0
        """Block tables that hold it."""
        self.block_hash: bytes | None = None
        """Set while the block can be found."""
        self.group = 0
        """The group of layers of which it was cached last."""
        self.previous: _Block = self
        self.following: _Block = self

    def insert_before(self, link: _Block) -> None:
        self.previous, self.following = link.previous, link
        link.previous.following = link.previous = self

    def unlink(self) -> None:
        self.previous.following, self.following.previous = self.following, self.previous


_OF_HOST_TIER = _Block(IN_HOST_TIER)


class _Held:
    """Contains the hashes of one group that the pool or the host tier has."""

    def __init__(self, host: HostTier, group: int, cached: dict[bytes, _Block]) -> None:
        self._host = host
        self._group = group
        self._cached = cached

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._cached or (self._group, block_hash) in self._host


class BlockPool:
    """Owns all KV blocks of one epoch. Block 0 is the null block, which nobody gets.

    Ask, then act: `can_allocate(n)`, then `allocate(n)`.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout,
        *,
        host: HostTier | None = None,
        num_reserved: int = 0,
        record_events: bool = False,
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
        self._blocks = [_Block(block_id) for block_id in range(num_blocks)]
        self._free = self._blocks[NULL_BLOCK]
        """Both ends of the list of free blocks: what follows it is allocated first."""
        self._next_reserved = num_blocks - num_reserved
        """The first of the reserved blocks, which are no part of the list."""
        for block in self._blocks[1 : self._next_reserved]:
            block.insert_before(self._free)
        self._cached: list[dict[bytes, _Block]] = [{} for _ in layout.windows]
        """By group."""
        self._held = [
            _Held(self.host, group, cached) if self.host.num_blocks else cached
            for group, cached in enumerate(self._cached)
        ]
        """By group: the hashes that can be found."""
        self._events: list[BlockEvent] | None = [] if record_events else None
        self._num_queried_tokens = self._num_hit_tokens = 0

    def __repr__(self) -> str:
        return f"BlockPool({self.num_free} of {self.num_blocks - 1} blocks free, {self.layout.block_size} tokens each)"

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

    def _next_free(self) -> _Block:
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

    def _take(self, block: _Block) -> int:
        block.unlink()
        block.num_users = 1
        if block.block_hash is not None:
            self.host.swap_out((block.group, block.block_hash), block.block_id)
            self._evict(block)
        return block.block_id

    # --- shared blocks ---

    def num_users(self, block_id: int) -> int:
        return self._blocks[block_id].num_users

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the table of the longest beginning of these columns of which all blocks are cached that the next token
        attends to; the others are `NULL_BLOCK`. A block of the host tier is `IN_HOST_TIER`."""
        num_columns = self._num_cached_columns(hashes)
        num_tokens = num_columns * self.layout.block_size
        first = [0] * self.layout.num_groups
        for group, window in self._windows:
            first[group] = self.layout.num_hidden_columns(window, num_tokens)
        groups = list(zip(first, self._cached, strict=True))
        return [
            cached.get(block_hash, _OF_HOST_TIER).block_id if column >= first_column else NULL_BLOCK
            for column, block_hash in enumerate(hashes[:num_columns])
            for first_column, cached in groups
        ]

    def _num_cached_columns(self, hashes: Sequence[bytes]) -> int:
        for window, held in zip(self.layout.windows, self._held, strict=True):
            if window is None:
                hashes = list(takewhile(held.__contains__, hashes))
        num_columns = len(hashes)
        # What the windows see from the end of a column, nearest first.
        views = [(self.layout.num_columns(window - 1), self._held[group]) for group, window in self._windows]
        if not all(any(map(held.__contains__, hashes)) for _, held in views):
            return 0
        longest_view = max((length for length, _ in views), default=0)
        for column in reversed(range(num_columns)):
            if num_columns - column > longest_view:
                break
            if any(num_columns - column <= length and hashes[column] not in held for length, held in views):
                num_columns = column
        return num_columns

    def is_cached(self, block_hash: bytes) -> bool:
        """Whether a block with this hash can be found. Any thread may call this."""
        return any(block_hash in held for held in self._held)

    def num_free_among(self, hits: Iterable[int]) -> int:
        """How many free blocks it takes to share these: those without a user, and one for each of the host tier."""
        return sum(each == IN_HOST_TIER or self._blocks[each].num_users == 0 for each in hits if each != NULL_BLOCK)

    def share(self, hits: list[int], hashes: Sequence[bytes]) -> list[int]:
        """Add one use of each block of a table that `find` has returned for these columns. Those of the host tier are
        swapped in. Return the table with the blocks that they get."""
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
        self.register(table, hashes)
        return table

    def register(self, table: list[int], hashes: Sequence[bytes], first: int = 0) -> list[int]:
        """Let the used blocks in the columns from `first` on be found by these hashes from now on. Returns those that could
        not be found before; a block with the tokens of another one stays without a hash."""
        registered: list[int] = []
        num_groups = len(self._cached)
        for group, cached in enumerate(self._cached):
            stored = []
            for block_id, block_hash in zip(table[first * num_groups + group :: num_groups], hashes, strict=False):
                block = self._blocks[block_id]
                if block.block_hash is None and block_hash not in cached and block_id != NULL_BLOCK:
                    block.block_hash, block.group = block_hash, group
                    cached[block_hash] = block
                    stored.append(block_id)
            if stored:
                self._record("stored", stored)
                registered += stored
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

    def unregister_hashes(self, hashes: Sequence[bytes]) -> None:
        """Let nobody find the blocks with these hashes any more, in the host tier too."""
        self.host.drop([(group, each) for each in hashes for group in range(self.layout.num_groups)])
        self.unregister([cached[each].block_id for each in hashes for cached in self._cached if each in cached])

    def reset_cache(self) -> None:
        """Forget what is cached, in the host tier too. Blocks in use stay with their users."""
        self.host.clear()
        for cached in self._cached:
            for block in cached.values():
                block.block_hash = None
            cached.clear()
        if self._events is not None:
            self._events = [BlockEvent("cleared")]

    def _evict(self, block: _Block) -> None:
        assert block.block_hash is not None
        self._record("removed", [block.block_id])
        del self._cached[block.group][block.block_hash]
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
            num_cached=sum(map(len, self._cached)),
            num_queried_tokens=self._num_queried_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_host_blocks=self.host.num_blocks,
            num_host_cached=self.host.num_cached,
            num_swapped_out=self.host.num_swapped_out,
            num_swapped_in=self.host.num_swapped_in,
        )

    def take_events(self) -> list[BlockEvent]:
        """Return what has changed since the last call, oldest first; nothing unless `record_events` was asked for."""
        events, self._events = self._events or [], None if self._events is None else []
        return events

    def _record(self, kind: Literal["stored", "removed"], block_ids: list[int]) -> None:
        if self._events is not None:
            hashes = [self._blocks[block_id].block_hash or b"" for block_id in block_ids]
            self._events.append(BlockEvent(kind, hashes, self._blocks[block_ids[0]].group))

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Check that every block is free or in as many of `tables` as it has users, and that hashes lead to their blocks."""
        self.host.check_integrity()
        users = [0] * self.num_blocks
        for table in tables:
            held = [block_id for block_id in table if block_id != NULL_BLOCK]
            assert len(held) == len(set(held)), "a table holds a block twice"
            for block_id in held:
                users[block_id] += 1
        assert users == [block.num_users for block in self._blocks], "a block has other users than it counts"
        free, link = [], self._free.following
        while link is not self._free:
            assert link.following.previous is link, "the list of free blocks is broken"
            free.append(link.block_id)
            link = link.following
        free += range(self._next_reserved, self.num_blocks)
        assert sorted(free) == [n for n in range(1, self.num_blocks) if users[n] == 0], (
            "a block is lost, or free and used"
        )
        assert len(free) == self.num_free
        for group, cached in enumerate(self._cached):
            for block_hash, block in cached.items():
                assert (block.block_hash, block.group) == (block_hash, group), "a hash leads to another block"
        assert self.stats().num_cached == sum(block.block_hash is not None for block in self._blocks)
