"""The floors of top_k and top_p in Triton kernels, without a sort.

    tally_parts   how much of each part of a row min_p leaves
    raise_floors  the floors, from the blocks of the row with large logits

Shapes: M rows, V token ids, C parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.worker.parts_triton import INF, LOG2_E, empty_parts, is_finite, load_part, merge_parts, temperature_of

BLOCK = 256
"""Token ids whose largest logit is known before the search."""
NUM_WARPS, AT_ONCE = 16, 2048
"""Warps of the one program that looks for the floors of a row, and the ids that it reads at once."""
LOADS_AHEAD = tl.constexpr(2)
"""Parts that are on their way to that program, plus one."""
KEPT = 8192
"""Logits that the program searches at once."""
LARGEST_BOUNDED, SLACK = tl.constexpr(0.999), tl.constexpr(0.01)
"""The largest top_p for which a bound of the floor is used, and what makes up for the rounding of the bound and of sums."""


def raise_floors(
    row: tuple[Tensor, int, int],  # logits [M, V], their stride, V
    peaks: tuple[Tensor, Tensor],  # [M, C]
    block_peaks: Tensor,  # [M, blocks]
    blocks: Tensor,  # [M, blocks] int32, any numbers
    settings: Tensor,  # [4, M or more] float64, see `sampling_triton.pack_settings`
    shape: dict[str, int],
) -> None:
    """Raise the floors of min_p in the settings to those of top_k and top_p. shape: constants of the parts' kernels."""
    (num_rows, num_parts), num_blocks = peaks[0].shape, block_peaks.shape[1]
    given = (*row, *peaks, num_parts, settings, settings.shape[1])
    smallest, counts = empty_parts(num_rows, num_parts, settings.device)
    tallies = counts, torch.empty_like(smallest, dtype=torch.float64), smallest
    _tally_parts[num_rows, num_parts](*given, *tallies, **shape)
    kept = torch.empty(num_rows, KEPT, dtype=torch.float32, device=settings.device)
    _raise_floors[(num_rows,)](
        *(*given, *tallies, block_peaks, blocks, num_blocks, kept),
        AT_ONCE=AT_ONCE,
        PARTS=shape["PARTS"],
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(num_blocks),
        KEPT=KEPT,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _has_limits(numbers, num_rows, row, peak):
    """Whether top_k or top_p may exclude ids of a row that is drawn."""
    top_k, top_p = tl.load(numbers + 2 * num_rows + row), tl.load(numbers + 3 * num_rows + row)
    return (tl.load(numbers + row) > 0) & is_finite(peak) & ((top_k > 0) | (top_p < 1))


@triton.jit
def _reaches(x, peak, temperature, floor):
    return (x > -INF) & (tl.div_rn(x - peak, temperature) >= floor)


@triton.jit
def _mass(x, peak, temperature):
    return tl.exp2((x - peak) * (LOG2_E / temperature))


@triton.jit(do_not_specialize=["num_rows"])
def _tally_parts(
    logits, row_stride, vocab_size, peaks, peak_ids, num_parts, numbers, num_rows, counts, masses, smallest,
    PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store for each part the number of ids that reach the floor of min_p, their mass, the sum of exp(scaled logit), and
    their smallest logit."""
    row, part = tl.program_id(0), tl.program_id(1)
    peak, _ = merge_parts(peaks, peak_ids, num_parts, row, PARTS)
    if _has_limits(numbers, num_rows, row, peak):
        temperature, place = temperature_of(numbers, row), row * num_parts + part
        _ids, x = load_part(logits, row_stride, vocab_size, row, part * PART, PART)
        stays = _reaches(x, peak, temperature, tl.load(numbers + num_rows + row).to(tl.float32))
        tl.store(counts + place, tl.sum(stays.to(tl.int32), axis=0))
        tl.store(masses + place, tl.sum(tl.where(stays, _mass(x, peak, temperature), 0.0).to(tl.float64), axis=0))
        tl.store(smallest + place, tl.min(tl.where(stays, x, peak), axis=0))


@triton.jit
def _load_some(logits, blocks, first, count, vocab_size, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Return PART of the `count` logits of listed blocks, from `first` on; -inf behind the last one."""
    places = first + tl.arange(0, PART)
    exists = places < count
    ids = tl.load(blocks + places // BLOCK, exists, other=0) * BLOCK + places % BLOCK
    return tl.load(logits + ids, exists & (ids < vocab_size), other=-INF).to(tl.float32)


@triton.jit
def _tally(
    logits, blocks, count, vocab_size, peak, temperature, floor, PART: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the mass of the ids in listed blocks that reach the floor, and their smallest logit."""
    mass = tl.zeros([PART], tl.float32)
    smallest = tl.zeros([PART], tl.float32) + peak
    for first in tl.range(0, count, PART, num_stages=LOADS_AHEAD):
        x = _load_some(logits, blocks, first, count, vocab_size, PART, BLOCK)
        stays = _reaches(x, peak, temperature, floor)
        mass += tl.where(stays, _mass(x, peak, temperature), 0.0)
        smallest = tl.minimum(smallest, tl.where(stays, x, peak))
    return tl.sum(mass.to(tl.float64), axis=0), tl.min(smallest, axis=0)


@triton.jit
def _middle_of(low, high):
    """Return a number above `low` and not above `high`."""
    middle = tl.minimum(low * 0.5 + high * 0.5, high)
    return tl.where(middle > low, middle, high)


@triton.jit
def _weights(x, is_counted, peak, temperature, BY_MASS: tl.constexpr):
    return tl.where(is_counted, _mass(x, peak, temperature), 0.0) if BY_MASS else is_counted.to(tl.float32)


@triton.jit
def _search(x, before, low, high, peak, temperature, target, BY_MASS: tl.constexpr):
    """Return the largest of the logits `x` such that the number of it and the larger ones, or their mass, is `target` with
    the `before` of those above `high`; `low` if all from there have less.

    It lies in [low, high]. The range is halved, and its ends move on to logits, so few passes are needed, and the result is
    exact. A sum of fewer positive numbers in the same order is never larger, so rounding does no harm.
    """
    while low < high:
        middle = _middle_of(low, high)
        is_above = x >= middle
        reached = before + tl.sum(_weights(x, is_above, peak, temperature, BY_MASS).to(tl.float64), axis=0)
        above = tl.minimum(tl.min(tl.where(is_above, x, high), axis=0), high)
        below = tl.maximum(tl.max(tl.where(is_above, low, x), axis=0), low)
        low, high = tl.where(reached >= target, above, low), tl.where(reached >= target, high, below)
    return low


@triton.jit
def _find_reaching(
    logits, vocab_size, block_peaks, blocks, num_blocks, kept, peak, temperature, low, target,
    PART: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, KEPT: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """Return what `_search` returns for a whole row, and how many ids are in the blocks that it lists: all from this logit
    on. The largest logits of the blocks reach the target no earlier than all logits do, so a block whose largest one is
    below their result is not read. The range is halved until it has at most KEPT logits, which are searched at once."""
    numbers = tl.arange(0, BLOCKS)
    tops = tl.load(block_peaks + numbers, numbers < num_blocks, other=-INF)
    low = _search(tops, 0.0, low, peak, peak, temperature, target, BY_MASS)
    is_listed = tops >= low
    tl.debug_barrier()  # all threads have read the list from before
    tl.store(blocks + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1, numbers, is_listed)
    tl.debug_barrier()
    count = tl.sum(is_listed.to(tl.int32), axis=0) * BLOCK
    high, num_between = peak, count
    while (low < high) & (num_between > KEPT):
        middle = _middle_of(low, high)
        reached = tl.zeros([PART], tl.float32)
        above = tl.zeros([PART], tl.float32) + high  # the smallest logit from the middle on
        below = tl.zeros([PART], tl.float32) + low  # the largest logit below the middle
        num_above, num_below = tl.zeros([PART], tl.int32), tl.zeros([PART], tl.int32)
        for first in tl.range(0, count, PART, num_stages=LOADS_AHEAD):
            x = _load_some(logits, blocks, first, count, vocab_size, PART, BLOCK)
            is_above = x >= middle
            reached += _weights(x, is_above, peak, temperature, BY_MASS)
            above = tl.minimum(above, tl.where(is_above, x, high))
            below = tl.maximum(below, tl.where(is_above, low, x))
            num_above += (is_above & (x <= high)).to(tl.int32)
            num_below += ((x >= low) & (x < middle)).to(tl.int32)
        is_reached = tl.sum(reached.to(tl.float64), axis=0) >= target
        num_between = tl.where(is_reached, tl.sum(num_above, axis=0), tl.sum(num_below, axis=0))
        low, high = (
            tl.where(is_reached, tl.min(above, axis=0), low),
            tl.where(is_reached, high, tl.max(below, axis=0)),
        )
    if low < high:
        before, num_kept = tl.zeros([PART], tl.float32), 0
        for first in tl.range(0, count, PART, num_stages=LOADS_AHEAD):
            x = _load_some(logits, blocks, first, count, vocab_size, PART, BLOCK)
            before += _weights(x, x > high, peak, temperature, BY_MASS)
            is_kept = ((x >= low) & (x <= high)).to(tl.int32)
            tl.store(kept + num_kept + tl.cumsum(is_kept, axis=0) - 1, x, is_kept > 0)
            num_kept += tl.sum(is_kept, axis=0)
        tl.debug_barrier()
        places = tl.arange(0, KEPT)
        x = tl.load(kept + places, places < num_kept, other=-INF)
        low = _search(x, tl.sum(before.to(tl.float64), axis=0), low, high, peak, temperature, target, BY_MASS)
        tl.debug_barrier()  # all threads have read the logits before others take their place
    return low, count


@triton.jit(do_not_specialize=["num_rows"])
def _raise_floors(
    logits, row_stride, vocab_size, peaks, peak_ids, num_parts, numbers, num_rows, counts, masses, smallest,
    block_peaks, blocks, num_blocks, kept,
    AT_ONCE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Raise the floors of rows with top_k, to their k-th largest entry, and with top_p, to the least likely of the fewest
    ids that reach top_p of the mass above the floor."""
    row = tl.program_id(0)
    peak, _ = merge_parts(peaks, peak_ids, num_parts, row, PARTS)
    if _has_limits(numbers, num_rows, row, peak):
        parts = tl.arange(0, PARTS)
        own, exists = row * num_parts + parts, parts < num_parts
        count = tl.sum(tl.load(counts + own, exists, other=0), axis=0)
        mass = tl.sum(tl.load(masses + own, exists, other=0.0), axis=0)
        low = tl.min(tl.load(smallest + own, exists, other=INF), axis=0)
        temperature, floor = temperature_of(numbers, row), tl.load(numbers + num_rows + row).to(tl.float32)
        top_k, top_p = tl.load(numbers + 2 * num_rows + row), tl.load(numbers + 3 * num_rows + row)
        logits += row.to(tl.int64) * row_stride
        block_peaks += row * num_blocks
        blocks += row * num_blocks
        kept += row * KEPT
        if (top_k > 0) & (top_k < count):
            kth, num_ids = _find_reaching(
                logits, vocab_size, block_peaks, blocks, num_blocks, kept, peak, temperature, low, top_k,
                AT_ONCE, BLOCK, BLOCKS, KEPT, BY_MASS=False,
            )  # fmt: skip
            floor = tl.div_rn(kth - peak, temperature)
            mass, low = _tally(logits, blocks, num_ids, vocab_size, peak, temperature, floor, AT_ONCE, BLOCK)
            count = tl.minimum(count, num_ids)
        if top_p < 1:
            if top_p < LARGEST_BOUNDED:  # ids below this bound together have less than the mass that is left out
                left_out = ((1 - top_p) * mass / count).to(tl.float32)
                low = tl.maximum(low, peak + temperature * (tl.log(left_out) - SLACK))
            last, num_ids = _find_reaching(
                logits, vocab_size, block_peaks, blocks, num_blocks, kept, peak, temperature, low, top_p * mass,
                AT_ONCE, BLOCK, BLOCKS, KEPT, BY_MASS=True,
            )  # fmt: skip
            floor = tl.div_rn(last - peak, temperature)
        tl.store(numbers + num_rows + row, floor.to(tl.float64))
