from __future__ import annotations

from collections import Counter

import pytest

from millrace.executor.wire.kv_layout import KVLayout
from millrace.worker.kv_pool import LayerSpec, share_tensors
from millrace.worker.layer_groups import MAX_GROUPS, group_layers

WINDOW = 64
PLAIN = KVLayout(16, max_step_tokens=128, max_model_len=8192)


def layers(windows: list[int | None], key_dim: int = 8) -> list[LayerSpec]:
    return [LayerSpec(index, 2, key_dim, 8, window) for index, window in enumerate(windows)]


def sizes(specs: list[LayerSpec]) -> list[int]:
    counts = Counter(spec.group for spec in specs)
    return [counts[group] for group in sorted(counts)]


@pytest.mark.parametrize(("window", "expected"), [(None, None), (WINDOW, WINDOW), (8192, None)])
def test_layers_of_one_kind_are_one_group(window: int | None, expected: int | None) -> None:
    specs, layout = group_layers(layers([window] * 5), PLAIN)
    assert sizes(specs) == [5]
    assert layout.windows == (expected,)
    assert len(share_tensors(specs)) == 5


def test_kinds_of_the_same_size_are_one_group_each_and_share_tensors() -> None:
    specs, layout = group_layers(layers([WINDOW, None] * 3), PLAIN)
    assert layout.windows == (WINDOW, None)
    assert [spec.group for spec in specs] == [0, 1] * 3
    assert [[spec.layer_index for spec in sharing] for sharing in share_tensors(specs)] == [[0, 1], [2, 3], [4, 5]]


def test_a_kind_with_many_layers_has_several_groups_which_get_them_in_turns() -> None:
    specs, layout = group_layers(layers(([WINDOW] * 5 + [None]) * 4), PLAIN)
    assert layout.windows == (WINDOW,) * 5 + (None,)
    assert sizes(specs) == [4] * 6
    assert [spec.group for spec in specs][:12] == [0, 1, 2, 3, 4, 5] * 2
    for stage in (specs[:12], specs[12:]):
        assert sizes(stage) == [2] * 6


@pytest.mark.parametrize("num_full", [1, 2, 7, 25, 39])
def test_there_are_not_many_groups_and_each_is_of_one_kind(num_full: int) -> None:
    specs, layout = group_layers(layers([None] * num_full + [WINDOW] * (40 - num_full)), PLAIN)
    assert layout.num_groups <= MAX_GROUPS + 1
    assert {(spec.group, spec.sliding_window) for spec in specs} == set(enumerate(layout.windows))
    all_alike = KVLayout(16, max_step_tokens=128, max_model_len=8192).num_blocks(8192) * 40
    assert layout.num_blocks(8192) * len(share_tensors(specs)) < all_alike


def test_layers_with_keys_of_different_sizes_have_one_table_that_keeps_all_blocks() -> None:
    specs = layers([WINDOW, None])[:1] + layers([WINDOW, None], key_dim=16)[1:]
    grouped, layout = group_layers(specs, PLAIN)
    assert layout == PLAIN
    assert sizes(grouped) == [2]
    assert len(share_tensors(grouped)) == 2
