from __future__ import annotations

import pytest

from millrace.engine_service.core.host_tier import BlockKey, HostTier
from tests.engine_service.core.integrity import check_tier

A, B, C, D = [(0, name.encode()) for name in "abcd"]


def filled(num_blocks: int, *keys: BlockKey) -> HostTier:
    """A tier that has taken these blocks, in plans that were made."""
    tier = HostTier(num_blocks)
    for device_block, key in enumerate(keys, start=1):
        tier.swap_out(key, device_block)
        tier.take_swaps()
    return tier


def test_a_plan_moves_what_was_evicted_since_the_last_one() -> None:
    tier = HostTier(4)
    tier.swap_out(A, 7)
    tier.swap_out(B, 3)
    swaps = tier.take_swaps()
    assert [device for device, _ in swaps.swap_out] == [7, 3]
    assert len({host for _, host in swaps.swap_out}) == 2
    assert tier.take_swaps().swap_out == []


def test_a_full_tier_loses_what_was_used_least_recently() -> None:
    tier = filled(3, A, B, C)
    tier.swap_out(A, 9)  # it has it already
    assert tier.take_swaps().swap_out == []
    tier.swap_out(D, 9)
    assert [key in tier for key in (A, B, C, D)] == [True, False, True, True]
    check_tier(tier)


def test_a_block_that_the_plan_moves_is_not_given_away_before_it() -> None:
    tier = filled(1, A)
    tier.pin([A])
    tier.swap_out(B, 5)  # for the space of the block that comes in
    tier.swap_in(A, 5)
    assert A in tier and B not in tier
    check_tier(tier)
    assert tier.take_swaps().swap_in == [(0, 5)]
    tier.swap_out(B, 5)
    assert B in tier


def test_a_block_that_came_in_stays_so_it_need_not_go_out_again() -> None:
    tier = filled(2, A)
    tier.pin([A])
    tier.swap_in(A, 5)
    tier.take_swaps()
    tier.swap_out(A, 5)
    assert tier.take_swaps().swap_out == []
    assert (tier.num_swapped_out, tier.num_swapped_in) == (1, 1)


def test_what_was_dropped_is_not_moved_and_its_block_is_free() -> None:
    tier = HostTier(1)
    tier.swap_out(A, 5)
    tier.drop([A, (0, b"never here")])
    check_tier(tier)
    tier.swap_out(B, 6)
    assert tier.take_swaps().swap_out == [(6, 0)]
    tier.clear()
    assert B not in tier
    check_tier(tier)


@pytest.mark.parametrize(
    ("recompute_s", "is_forced", "is_kept"),
    [(0.0, False, True), (0.1, False, False), (0.3, False, True), (0.1, True, True)],
)
def test_a_block_moves_if_that_is_faster_than_to_compute_it_again(
    recompute_s: float, is_forced: bool, is_kept: bool
) -> None:
    """Before the first measurement it moves."""
    tier = HostTier(4, swap_s=0.2, is_forced=is_forced)
    tier.recompute_s = recompute_s
    tier.swap_out(A, 1)
    assert (A in tier) == is_kept


def test_without_a_tier_nothing_moves() -> None:
    tier = HostTier(0)
    tier.swap_out(A, 1)
    assert tier.take_swaps().swap_out == []
    check_tier(tier)
