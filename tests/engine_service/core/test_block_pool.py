from __future__ import annotations

import subprocess
import sys
from itertools import cycle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millrace.engine_service.core.block_hash import extend_hashes, root_hash
from millrace.engine_service.core.block_pool import BlockPool
from millrace.engine_service.core.host_tier import BlockKey, HostTier
from millrace.engine_service.core.prefix_cache import IN_HOST_TIER
from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import NULL_BLOCK
from tests.engine_service.core.integrity import check_pool

SIZE = 4


def hashes_of(token_ids: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(salt), token_ids, SIZE)
    return hashes


def fill(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """Blocks for these tokens, the full ones to be found."""
    block_ids = pool.allocate(pool.layout.num_columns(len(token_ids)) * pool.layout.num_groups)
    pool.cache.register(block_ids, hashes_of(token_ids))
    return block_ids


# --- free and used -------------------------------------------------------------------------------------------------


def test_block_zero_belongs_to_nobody() -> None:
    pool = BlockPool(5, KVLayout(SIZE))
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert not pool.can_allocate(1)


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(1, KVLayout(SIZE))


def test_reserved_blocks_are_for_sequences_that_run_and_not_for_prompts_that_stay_cached() -> None:
    pool = BlockPool(9, KVLayout(SIZE), num_reserved=4)
    assert pool.num_free == 8
    for start in range(10):
        token_ids = [start] * 3 * SIZE
        table = pool.allocate(3)
        pool.cache.register(table, hashes_of(token_ids))
        assert max(table) <= 4  # the cached prompts make way
        pool.free(table)
        check_pool(pool, [])
    assert pool.cache.find(hashes_of([9] * 3 * SIZE))
    table = pool.allocate(8)
    assert sorted(table) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not pool.can_allocate(1)
    check_pool(pool, [table])
    pool.free(table)
    check_pool(pool, [])
    assert sorted(pool.allocate(8)) == sorted(table)


# --- hashes --------------------------------------------------------------------------------------------------------


def test_a_hash_says_the_tokens_of_a_block_and_of_all_before_it() -> None:
    first, second = hashes_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert hashes_of([1, 2, 3, 4]) == [first]
    assert second not in hashes_of([5, 6, 7, 8]) + hashes_of([0, 2, 3, 4, 5, 6, 7, 8])
    assert len({first, second, *hashes_of([1, 2, 3, 4], salt="tenant")}) == 3


def test_hashes_grow_with_the_tokens_and_come_out_the_same() -> None:
    token_ids = list(range(100, 123))
    hashes: list[bytes] = []
    for end in range(len(token_ids) + 1):
        extend_hashes(hashes, root_hash(), token_ids[len(hashes) * SIZE : end], SIZE)
    assert hashes == hashes_of(token_ids)


def test_another_process_makes_the_same_hashes() -> None:
    script = "from tests.engine_service.core.test_block_pool import hashes_of; print(hashes_of([7] * 9)[-1].hex())"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == hashes_of([7] * 9)[-1].hex() == "22f401af941a42d036ab169811f81571"


# --- what vLLM's pool does, case by case ---------------------------------------------------------------------------


def test_a_prompt_finds_the_full_blocks_of_its_longest_known_beginning() -> None:
    pool = BlockPool(11, KVLayout(SIZE))
    table = fill(pool, list(range(10)))
    assert pool.cache.find(hashes_of(list(range(10)))) == table[:2]
    assert pool.cache.find(hashes_of([*range(8), 99, 98, 97, 96])) == table[:2]
    assert pool.cache.find(hashes_of([*range(4), 99, 98, 97, 96, 8, 9])) == table[:1]
    assert pool.cache.find(hashes_of([99, *range(1, 10)])) == []


def test_a_search_for_more_blocks_than_some_finds_them_if_there_are_more() -> None:
    pool = BlockPool(11, KVLayout(SIZE))
    table = fill(pool, list(range(12)))
    for tokens in ([*range(12), 99, 98, 97, 96], [*range(8), 99, 98, 97, 96, 95], [*range(8)]):
        found = pool.cache.find(hashes_of(tokens))
        assert found == table[: len(found)] != []
        for longer_than in range(5):
            again = pool.cache.find(hashes_of(tokens), longer_than)
            assert again == found if len(found) > longer_than else len(again) <= longer_than


def test_a_block_without_users_stays_cached_until_its_place_is_needed() -> None:
    pool = BlockPool(5, KVLayout(SIZE))
    table = fill(pool, list(range(8)))
    pool.free(table)
    assert pool.num_free == 4
    assert pool.cache.find(hashes_of(list(range(8)))) == table
    pool.allocate(3)  # two that cache nothing, and the end of the sequence
    assert pool.cache.find(hashes_of(list(range(8)))) == table[:1]


def test_the_sequence_that_was_freed_first_is_evicted_first_and_each_from_its_end() -> None:
    pool = BlockPool(5, KVLayout(SIZE))
    old, new = fill(pool, [1] * 8), fill(pool, [2] * 8)
    pool.free(old)
    pool.free(new)
    assert pool.allocate(4) == [*reversed(old), *reversed(new)]


def test_blocks_that_nobody_can_find_are_reused_first() -> None:
    pool = BlockPool(4, KVLayout(SIZE))
    table = fill(pool, list(range(10)))  # the third block is not full
    pool.free(table)
    assert pool.allocate(1) == table[2:]


def test_sharing_a_block_keeps_it_until_its_last_user_has_gone() -> None:
    pool = BlockPool(4, KVLayout(SIZE))
    table = fill(pool, [1] * 4)
    hashes = hashes_of([1] * 4)
    pool.share(table, hashes)
    pool.free(table)
    assert pool.num_free == 2
    pool.free(table)
    assert pool.num_free == 3
    pool.share(table, hashes)  # from among the free ones
    assert (pool.num_free, pool.num_free_among(table)) == (2, 0)
    check_pool(pool, [table])


def test_of_two_blocks_with_the_same_tokens_the_first_is_found() -> None:
    pool = BlockPool(6, KVLayout(SIZE))
    first, second = fill(pool, [1] * 4), fill(pool, [1] * 4)
    assert pool.cache.find(hashes_of([1] * 4)) == first
    pool.free(second)
    assert pool.allocate(1) == second, "it caches nothing"


def test_a_reset_forgets_what_is_cached_and_leaves_blocks_with_their_users() -> None:
    pool = BlockPool(6, KVLayout(SIZE))
    used, free = fill(pool, [1] * 4), fill(pool, [2] * 4)
    pool.free(free)
    pool.reset_cache()
    assert pool.cache.find(hashes_of([1] * 4)) == pool.cache.find(hashes_of([2] * 4)) == []
    check_pool(pool, [used])


def test_what_was_not_computed_is_taken_out_of_the_cache() -> None:
    pool = BlockPool(6, KVLayout(SIZE))
    table = fill(pool, list(range(8)))
    pool.unregister(table[1:])
    assert pool.cache.find(hashes_of(list(range(8)))) == table[:1]
    pool.free(table)
    pool.unregister(table[:1])
    check_pool(pool, [])
    assert pool.allocate(2) == table[:1] + table[1:], "they cache nothing"


def test_a_block_is_not_lost_from_the_host_tier_while_the_pool_makes_space_for_it() -> None:
    pool = BlockPool(3, KVLayout(SIZE), host=HostTier(2))
    first, second = hashes_of([1] * 8), hashes_of([2] * 8)
    pool.free(fill(pool, [1] * 8))
    pool.free(fill(pool, [2] * 8))  # the first ones move to the host tier, and fill it
    pool.host.take_swaps()
    assert pool.cache.find(first) == [IN_HOST_TIER] * 2
    table = pool.share(pool.cache.find(first), first)
    assert pool.cache.find(first) == table and pool.cache.find(second) == []
    swaps = pool.host.take_swaps()
    assert [device for _, device in swaps.swap_in] == table and swaps.swap_out == []
    check_pool(pool, [table])


def test_what_was_stored_removed_and_cleared_is_counted() -> None:
    pool = BlockPool(3, KVLayout(SIZE))
    first, second = hashes_of(list(range(8)))
    pool.free(fill(pool, list(range(8))))
    pool.allocate(1)
    assert pool.cache.contains(first) and not pool.cache.contains(second)
    assert (pool.stats().num_stored, pool.stats().num_removed, pool.stats().num_cleared) == (2, 1, 0)
    pool.reset_cache()
    assert not pool.cache.contains(first)
    assert (pool.stats().num_stored, pool.stats().num_removed, pool.stats().num_cleared) == (2, 1, 1)


# --- groups of layers ----------------------------------------------------------------------------------------------

HYBRID = KVLayout(SIZE, (None, 2 * SIZE + 1))
"""Group 0 attends to everything, group 1 to the last two columns and the token itself."""


def test_what_a_window_has_passed_is_free_but_cached() -> None:
    pool = BlockPool(12, HYBRID)
    table = fill(pool, list(range(20)))
    held = list(table)
    pool.free_hidden(table, 20)
    assert table == [held[0], 0, held[2], 0, held[4], 0, *held[6:]]
    assert pool.num_free == 11 - 10 + 3
    assert pool.stats().num_cached == 10
    pool.free_hidden(table, 20)
    assert pool.num_free == 4
    check_pool(pool, [table])


def test_a_hit_has_all_blocks_of_a_full_group_and_the_visible_ones_of_a_window() -> None:
    pool = BlockPool(12, HYBRID)
    table = fill(pool, list(range(20)))
    pool.free(table)
    assert pool.cache.find(hashes_of(list(range(8)))) == table[:4]
    assert pool.cache.find(hashes_of(list(range(12)))) == [table[0], 0, *table[2:6]]
    assert pool.cache.find(hashes_of([*range(16), 99, 98, 97, 96])) == [table[0], 0, table[2], 0, *table[4:8]]


def test_a_hit_ends_where_a_window_misses_a_block() -> None:
    pool = BlockPool(12, HYBRID)
    table = fill(pool, list(range(20)))
    pool.free(table)
    hashes = hashes_of(list(range(20)))
    pool.unregister([table[2 * 3 + 1]])
    assert pool.cache.find(hashes) == [table[0], 0, *table[2:6]]
    pool.unregister([table[2 * 1 + 1]])
    assert pool.cache.find(hashes) == table[:2]
    pool.unregister([table[0]])
    assert pool.cache.find(hashes) == []


def test_a_window_alone_needs_only_what_it_sees() -> None:
    pool = BlockPool(6, KVLayout(SIZE, (SIZE + 1,)))
    table = fill(pool, list(range(20)))
    pool.unregister(table[:3])
    assert pool.cache.find(hashes_of(list(range(20)))) == [0, 0, 0, 0, table[4]]
    assert pool.cache.find(hashes_of(list(range(16)))) == [0, 0, 0, table[3]]
    assert pool.cache.find(hashes_of(list(range(12)))) == []


def test_groups_do_not_find_blocks_of_each_other() -> None:
    pool = BlockPool(12, KVLayout(SIZE, (None, None)))
    table = fill(pool, list(range(8)))
    pool.unregister([table[2]])
    assert pool.cache.find(hashes_of(list(range(8)))) == table[:2]
    second = pool.allocate(4)
    assert pool.cache.register(second, hashes_of(list(range(8)))) == [second[2]]
    assert pool.cache.find(hashes_of(list(range(8)))) == [table[0], table[1], second[2], table[3]]


# --- any order -----------------------------------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Sequences over an alphabet of two tokens, so that beginnings are shared often."""

    windows: tuple[int | None, ...] = (None,)

    def __init__(self) -> None:
        super().__init__()
        self.layout = KVLayout(SIZE, self.windows)
        self.sequences: list[tuple[list[int], list[int]]] = []
        """Tokens and table."""
        self.on_device: dict[int, BlockKey] = {}
        """By block: the group and the hash of what it holds."""
        self.on_host: dict[int, BlockKey] = {}

    @initialize(num_host_blocks=st.sampled_from([0, 1, 3, 20]))
    def make_pool(self, num_host_blocks: int) -> None:
        self.pool = BlockPool(12 * len(self.windows), self.layout, host=HostTier(num_host_blocks), num_reserved=5)

    def keys_of(self, hashes: list[bytes]) -> list[BlockKey]:
        """By entry of a table."""
        return [(group, block_hash) for block_hash in hashes for group in range(len(self.windows))]

    def run_plan(self) -> None:
        """Do what a worker does before it computes."""
        swaps = self.pool.host.take_swaps()
        for device_block, host_block in swaps.swap_out:
            self.on_host[host_block] = self.on_device[device_block]
        for host_block, device_block in swaps.swap_in:
            self.on_device[device_block] = self.on_host[host_block]

    @rule(blocks=st.lists(st.sampled_from([0, 1]), max_size=4), rest=st.integers(0, SIZE - 1))
    def admit(self, blocks: list[int], rest: int) -> None:
        token_ids = [block for block in blocks for _ in range(SIZE)] + [7] * rest
        hashes = hashes_of(token_ids)
        hits = self.pool.cache.find(hashes)
        missing = self.layout.num_columns(len(token_ids)) * self.layout.num_groups - len(hits)
        if not self.pool.can_allocate(missing + self.pool.num_free_among(hits)):
            return
        num_hits = len(hits)
        table = self.pool.share(hits, hashes) + self.pool.allocate(missing)
        self.pool.cache.register(table, hashes)
        self.run_plan()
        keys = self.keys_of(hashes)
        for block_id, key in zip(table[:num_hits], keys, strict=False):
            assert block_id == NULL_BLOCK or self.on_device[block_id] == key
        self.on_device |= dict(zip(table, keys, strict=False))
        self.sequences.append((token_ids, table))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def pass_windows(self, data: st.DataObject) -> None:
        token_ids, table = data.draw(st.sampled_from(self.sequences))
        num_computed = data.draw(st.integers(0, len(token_ids)))
        self.pool.free_hidden(table, num_computed)
        for entry, window in zip(range(len(table)), cycle(self.windows)):
            if window is not None and (entry // len(self.windows) + 1) * SIZE <= num_computed + 1 - window:
                assert table[entry] == NULL_BLOCK

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, table = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.free(table)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), by_hash=st.booleans())
    def fail(self, data: st.DataObject, by_hash: bool) -> None:
        token_ids, table = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        if by_hash:
            self.pool.unregister_hashes(hashes_of(token_ids))
            assert self.pool.cache.find(hashes_of(token_ids)) == []
        else:
            self.pool.unregister(table)
        self.pool.free(table)

    @rule(num_blocks=st.integers(1, 8), is_lost=st.booleans())
    def evict(self, num_blocks: int, is_lost: bool) -> None:
        """A plan uses free blocks for a while. `is_lost`: its step fails."""
        if self.pool.can_allocate(num_blocks):
            self.pool.free(self.pool.allocate(num_blocks))
            if is_lost:
                swaps = self.pool.host.take_swaps()
                self.on_host |= {host_block: (0, b"unknown") for _, host_block in swaps.swap_out}
                self.pool.host.drop(swaps.keys)
            self.run_plan()

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()

    @invariant()
    def is_sound(self) -> None:
        check_pool(self.pool, (table for _, table in self.sequences))
        num_groups = len(self.windows)
        owners = {
            block: (entry % num_groups, tokens[: (entry // num_groups + 1) * SIZE])
            for tokens, table in self.sequences
            for entry, block in enumerate(table)
        }
        for token_ids, table in self.sequences:
            hits = self.pool.cache.find(hashes_of(token_ids))
            num_hit_tokens = self.layout.num_tokens_in(hits)
            for entry, block in enumerate(hits):
                column, group = divmod(entry, num_groups)
                window = self.windows[group]
                is_hidden = window is not None and (column + 1) * SIZE <= num_hit_tokens + 1 - window
                assert (block == NULL_BLOCK) == is_hidden
                if block in owners and not is_hidden:
                    assert owners[block] == (group, token_ids[: (column + 1) * SIZE])
                if not is_hidden and block != IN_HOST_TIER:
                    assert self.on_device[block] == (group, hashes_of(token_ids)[column])
            assert len(table) == self.layout.num_columns(len(token_ids)) * num_groups
        assert all(self.on_host[block] == key for key, block in self.pool.host._blocks.items())


class WindowPoolMachine(PoolMachine):
    windows = (6,)


class HybridPoolMachine(PoolMachine):
    windows = (None, 6, 3)


TestPoolMachine = PoolMachine.TestCase
TestWindowPoolMachine = WindowPoolMachine.TestCase
TestHybridPoolMachine = HybridPoolMachine.TestCase
for case in (TestPoolMachine, TestWindowPoolMachine, TestHybridPoolMachine):
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
