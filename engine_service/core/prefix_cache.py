"""The hashes under which the blocks of the pool, and of the host tier behind it, are found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from millrace.engine_service.core.block import Block
from millrace.engine_service.core.host_tier import HostTier
from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import NULL_BLOCK

IN_HOST_TIER = -1
"""Stands for a block that is in the host tier and not on the device."""

_OF_HOST_TIER = Block(IN_HOST_TIER)


class _Held:
    """Contains the hashes of one group that the pool or the host tier has."""

    def __init__(self, host: HostTier, group: int, cached: dict[bytes, Block]) -> None:
        self._host = host
        self._group = group
        self._cached = cached

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._cached or (self._group, block_hash) in self._host


class PrefixCache:
    """Owns the blocks that can be found, by group of layers and hash, and the counts of hits and changes."""

    def __init__(self, blocks: list[Block], layout: KVLayout, host: HostTier) -> None:
        """`blocks`: all blocks of the pool, by id."""
        self._blocks = blocks
        self._layout = layout
        self._windows = [(group, window) for group, window in enumerate(layout.windows) if window is not None]
        self._cached: list[dict[bytes, Block]] = [{} for _ in layout.windows]
        """By group."""
        self._held = [
            _Held(host, group, cached) if host.num_blocks else cached for group, cached in enumerate(self._cached)
        ]
        """By group: the hashes that can be found."""
        self.num_queried_tokens = self.num_hit_tokens = 0
        self.num_stored = self.num_removed = self.num_cleared = 0
        """Blocks that could be found from then on, and no longer because their place was needed; resets of the cache."""

    def __len__(self) -> int:
        """Return the number of blocks on the device that can be found."""
        return sum(map(len, self._cached))

    def find(self, hashes: Sequence[bytes], longer_than: int = 0) -> list[int]:
        """Return the table of the longest beginning of these columns of which all blocks are cached that the next token
        attends to; the others are `NULL_BLOCK`. A block of the host tier is `IN_HOST_TIER`. A table that cannot have more
        than `longer_than` blocks may be returned empty: then one column is looked up instead of all."""
        needed = longer_than // self._layout.num_groups
        if longer_than and not self._is_held_at(hashes, needed):
            return []
        num_columns = self._num_cached_columns(hashes)
        num_tokens = num_columns * self._layout.block_size
        first = [0] * self._layout.num_groups
        for group, window in self._windows:
            first[group] = self._layout.num_hidden_columns(window, num_tokens)
        groups = list(zip(first, self._cached, strict=True))
        return [
            cached.get(block_hash, _OF_HOST_TIER).block_id if column >= first_column else NULL_BLOCK
            for column, block_hash in enumerate(hashes[:num_columns])
            for first_column, cached in groups
        ]

    def _is_held_at(self, hashes: Sequence[bytes], column: int) -> bool:
        """Whether the groups that see all positions have a column. If not, no table reaches behind it."""
        held = (each for window, each in zip(self._layout.windows, self._held, strict=True) if window is None)
        return column < len(hashes) and all(hashes[column] in each for each in held)

    def _num_cached_columns(self, hashes: Sequence[bytes]) -> int:
        for window, held in zip(self._layout.windows, self._held, strict=True):
            if window is None:
                hashes = list(takewhile(held.__contains__, hashes))
        num_columns = len(hashes)
        # What the windows see from the end of a column, nearest first.
        views = [(self._layout.num_columns(window - 1), self._held[group]) for group, window in self._windows]
        if not all(any(map(held.__contains__, hashes)) for _, held in views):
            return 0
        longest_view = max((length for length, _ in views), default=0)
        for column in reversed(range(num_columns)):
            if num_columns - column > longest_view:
                break
            if any(num_columns - column <= length and hashes[column] not in held for length, held in views):
                num_columns = column
        return num_columns

    def contains(self, block_hash: bytes) -> bool:
        """Whether a block with this hash can be found. Any thread may call this."""
        return any(block_hash in held for held in self._held)

    def blocks_of(self, hashes: Sequence[bytes]) -> Iterator[Block]:
        """Yield the blocks on the device with these hashes, of every group."""
        return (cached[each] for each in hashes for cached in self._cached if each in cached)

    def count_query(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Count a sequence that was admitted with `num_tokens` known tokens, of which the cache had `num_hit_tokens`."""
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hit_tokens

    # --- changes ---

    def register(self, table: list[int], hashes: Sequence[bytes], first: int = 0) -> list[int]:
        """Let the used blocks in the columns from `first` on be found by these hashes from now on. Return those that could
        not be found before; a block with the tokens of another one stays without a hash."""
        registered: list[int] = []
        num_groups = len(self._cached)
        for group, cached in enumerate(self._cached):
            for block_id, block_hash in zip(table[first * num_groups + group :: num_groups], hashes, strict=False):
                block = self._blocks[block_id]
                if block.block_hash is None and block_hash not in cached and block_id != NULL_BLOCK:
                    block.block_hash, block.group = block_hash, group
                    cached[block_hash] = block
                    registered.append(block_id)
        self.num_stored += len(registered)
        return registered

    def remove(self, block: Block) -> None:
        """Let a block be found no longer."""
        assert block.block_hash is not None
        self.num_removed += 1
        del self._cached[block.group][block.block_hash]
        block.block_hash = None

    def clear(self) -> None:
        for cached in self._cached:
            for block in cached.values():
                block.block_hash = None
            cached.clear()
        self.num_cleared += 1
