from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine_service.core.block_pool import BlockPool


def test_block_zero_is_never_handed_out() -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert not pool.can_allocate(1)


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(num_blocks=1, block_size=4)


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    assert [pool.blocks_for(tokens) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@given(st.lists(st.integers(min_value=0, max_value=6), max_size=40))
def test_no_block_is_lost_or_doubled_whatever_is_taken_and_given_back(sizes: list[int]) -> None:
    pool = BlockPool(num_blocks=17, block_size=4)
    tables: list[list[int]] = []
    for size in sizes:
        if size == 0 and tables:
            pool.free(tables.pop(0))
        elif pool.can_allocate(size):
            tables.append(pool.allocate(size))
        pool.check_integrity(tables)
