from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.executor.wire.kv_layout import KVLayout


def test_a_column_for_each_block_size_of_positions() -> None:
    layout = KVLayout(4, (None, 8))
    assert [layout.num_columns(tokens) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    assert [layout.num_tokens_in([0] * entries) for entries in (0, 2, 6)] == [0, 4, 12]


def test_a_column_is_hidden_once_the_next_token_sees_none_of_it() -> None:
    layout = KVLayout(4, (8,))  # position 11 sees 4 .. 11
    assert [layout.num_hidden_columns(8, position) for position in (0, 10, 11, 14, 15)] == [0, 0, 1, 1, 2]


@given(st.integers(1, 6), st.integers(1, 14), st.integers(1, 9), st.integers(1, 60))
def test_no_step_needs_more_blocks_of_a_window_than_the_layout_says(
    block_size: int, window: int, step_tokens: int, length: int
) -> None:
    layout = KVLayout(block_size, (window,), step_tokens)
    needed = max(
        layout.num_columns(start + count) - layout.num_hidden_columns(window, start)
        for count in range(1, min(step_tokens, length) + 1)
        for start in range(length - count + 1)
    )
    assert needed <= layout.num_blocks(length)
    if length > window + step_tokens + block_size:
        assert needed == layout.num_blocks(length)


@given(st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 5), st.integers(-1, 80))
def test_the_longest_sequence_is_the_longest_that_fits(
    windows: list[int | None], block_size: int, num_blocks: int
) -> None:
    layout = KVLayout(block_size, tuple(windows), 7, max_model_len=100)
    longest = layout.longest_sequence(num_blocks)
    assert longest == 0 or layout.num_blocks(longest) <= num_blocks
    assert longest == 100 or layout.num_blocks(longest + 1) > num_blocks


def test_a_pool_holds_more_tokens_when_some_groups_have_windows() -> None:
    assert [KVLayout(4, max_model_len=30).capacity_tokens(blocks) for blocks in (-2, 0, 9)] == [-8, 0, 36]
    assert KVLayout(4, (None, None), max_model_len=400).capacity_tokens(90) == 180
    assert KVLayout(4, (None, 8), max_model_len=400).capacity_tokens(90) > 300
