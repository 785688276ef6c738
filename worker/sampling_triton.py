"""Draws token ids in Triton kernels. The rules are those of `millrace.worker.sampler`, the random numbers those of
`millrace.worker.counter_rng`.

A row is divided into parts of a fixed size. Each part has its own program, and the results are merged in a fixed order. So
a draw depends on its own row alone. Nothing waits for the device: all decisions about kernels depend on tensors of the host.

    find_peaks    the largest logit of each part, and of each block of a part
    tally_parts   how much of each part min_p leaves; only in a step with top_k or top_p
    raise_floors  the floors of top_k and top_p, from the blocks with large logits; only there too
    draw_parts    the best score of each part; only in a step with a temperature
    finish        the token ids

Shapes: M rows, V token ids, C parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.executor.wire.messages import NO_TOKEN
from millrace.worker.counter_rng import next_keys
from millrace.worker.sampling_rows import SamplingRows
from millrace.worker.transfer import staging

PART = 4096
"""Token ids of one program."""
BLOCK = 256
"""Token ids whose largest logit is known when the floors of top_k and top_p are looked for."""
NUM_WARPS = 8
FLOOR_WARPS, FLOOR_AT_ONCE = 16, 2048
"""Warps of the one program that looks for the floors of a row, and the ids that it reads at once. It reads a few blocks
several times, seldom all."""
LOADS_AHEAD = tl.constexpr(2)
"""Parts that are on their way to that program, plus one."""

_GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LARGEST_UNIFORM = tl.constexpr(1 - 2**-24)
_SMALLEST_TEMPERATURE = tl.constexpr(torch.finfo(torch.float32).tiny)
_LOG2_E = tl.constexpr(1.4426950408889634)
_NO_ID = tl.constexpr(2**31 - 1)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_INF = tl.constexpr(float("inf"))


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Draw one token for each row of logits [M, V], in any floating dtype, without the processors. Return the ids [M],
    NO_TOKEN for rows whose largest logit is NaN or infinite."""
    num_rows = len(logits)
    if num_rows == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    settings = None
    if bool(rows.temperatures.any()):
        on_host = staging(logits.device, (5, num_rows), torch.int64)
        pack_settings(rows, on_host)
        settings = on_host.to(logits.device, non_blocking=True)
    return draw(logits, settings, has_limits=rows.has_limits)


def pack_settings(rows: SamplingRows, packed: Tensor) -> None:
    """Store what `draw` needs of the rows [M]: temperatures, floors of min_p, top_k and top_p, as float64, and the row keys,
    in `packed` [5, M or more] int64 on the host."""
    numbers, own = packed[:4].view(torch.float64), slice(rows.num_rows)
    for number, values in zip(numbers, (rows.temperatures, rows.min_p.log(), rows.top_k, rows.top_p), strict=True):
        number[own] = values
    packed[4, own] = next_keys(rows.streams, rows.output_positions)


def draw(logits: Tensor, settings: Tensor | None, *, has_limits: bool) -> Tensor:
    """Draw from logits [M, V], M > 0, with settings of `pack_settings` [5, M], whose floors it raises. None: all rows are
    greedy. What it launches depends on shapes and on `has_limits` alone, so it can be part of a graph."""
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_parts = triton.cdiv(vocab_size, PART)
    shape = {"PART": PART, "PARTS": triton.next_power_of_2(num_parts), "num_warps": NUM_WARPS}
    row = (logits, logits.stride(0), vocab_size)
    peaks = _empty_parts(num_rows, num_parts, logits.device)
    scores, numbers = peaks, token_ids  # of no use without a draw
    block_peaks, blocks = _empty_parts(num_rows, num_parts * (PART // BLOCK), logits.device) if has_limits else peaks
    _find_peaks[num_rows, num_parts](*row, *peaks, num_parts, block_peaks, BLOCK=BLOCK, HAS_LIMITS=has_limits, **shape)
    if settings is not None:
        numbers, keys = settings[:4].view(torch.float64), settings[4]
        if has_limits:
            given = (*row, *peaks, num_parts, numbers, num_rows)
            smallest, counts = _empty_parts(num_rows, num_parts, logits.device)
            tallies = counts, torch.empty_like(smallest, dtype=torch.float64), smallest
            _tally_parts[num_rows, num_parts](*given, *tallies, **shape)
            _raise_floors[(num_rows,)](
                *(*given, *tallies, block_peaks, blocks, block_peaks.shape[1]),
                AT_ONCE=FLOOR_AT_ONCE,
                PARTS=shape["PARTS"],
                BLOCK=BLOCK,
                BLOCKS=triton.next_power_of_2(block_peaks.shape[1]),
                num_warps=FLOOR_WARPS,
            )
        scores = _empty_parts(num_rows, num_parts, logits.device)
        _draw_parts[num_rows, num_parts](*row, *peaks, num_parts, numbers, num_rows, keys, *scores, **shape)
    draws, parts = settings is not None, shape["PARTS"]
    _finish[(num_rows,)](*peaks, *scores, num_parts, numbers, token_ids, DRAWS=draws, PARTS=parts, num_warps=1)
    return token_ids


def _empty_parts(num_rows: int, num_parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return space for a number and a token id of each part [M, C]."""
    values = torch.empty(num_rows, num_parts, device=device)
    return values, torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)


@triton.jit
def _load(logits, row_stride, vocab_size, row, first, PART: tl.constexpr):
    """Return the token ids from `first` on and their logits; -inf behind the last one."""
    ids = first + tl.arange(0, PART)
    places = logits + row.to(tl.int64) * row_stride + ids
    return ids, tl.load(places, mask=ids < vocab_size, other=-_INF).to(tl.float32)


@triton.jit
def _largest(values, ids):
    """Return the largest value and the lowest id that has it. The value is NaN if one of them is."""
    has_nan = tl.max((values != values).to(tl.int32), axis=0) > 0
    values = tl.where(values == values, values, -_INF)
    largest = tl.max(values, axis=0)
    largest_id = tl.min(tl.where(values == largest, ids, _NO_ID), axis=0)
    return tl.where(has_nan, float("nan"), largest), largest_id


@triton.jit
def _merge(values, ids, num_parts, row, PARTS: tl.constexpr):
    """Return the row's largest value and the lowest id that has it, from those of its parts."""
    parts = tl.arange(0, PARTS)
    places = row * num_parts + parts
    exists = parts < num_parts
    return _largest(
        tl.load(values + places, mask=exists, other=-_INF), tl.load(ids + places, mask=exists, other=_NO_ID)
    )


@triton.jit
def _is_finite(number):
    return tl.abs(number) < _INF


@triton.jit
def _temperature(numbers, row):
    return tl.maximum(tl.load(numbers + row), _SMALLEST_TEMPERATURE).to(tl.float32)


@triton.jit
def _find_peaks(
    logits, row_stride, vocab_size, peaks, peak_ids, num_parts, block_peaks,
    PART: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, HAS_LIMITS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    ids, x = _load(logits, row_stride, vocab_size, row, part * PART, PART)
    peak, peak_id = _largest(x, ids)
    tl.store(peaks + row * num_parts + part, peak)
    tl.store(peak_ids + row * num_parts + part, peak_id)
    if HAS_LIMITS:
        blocks = (row * num_parts + part) * (PART // BLOCK) + tl.arange(0, PART // BLOCK)
        tl.store(block_peaks + blocks, tl.max(tl.reshape(x, [PART // BLOCK, BLOCK]), axis=1))


@triton.jit
def _has_limits(numbers, num_rows, row, peak):
    """Whether top_k or top_p may exclude ids of a row that is drawn."""
    top_k, top_p = tl.load(numbers + 2 * num_rows + row), tl.load(numbers + 3 * num_rows + row)
    return (tl.load(numbers + row) > 0) & _is_finite(peak) & ((top_k > 0) | (top_p < 1))


@triton.jit
def _reaches(x, peak, temperature, floor):
    return (x > -_INF) & (tl.div_rn(x - peak, temperature) >= floor)


@triton.jit
def _mass(x, peak, temperature):
    return tl.exp2((x - peak) * (_LOG2_E / temperature))


@triton.jit(do_not_specialize=["num_rows"])
def _tally_parts(
    logits, row_stride, vocab_size, peaks, peak_ids, num_parts, numbers, num_rows, counts, masses, smallest,
    PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store for each part the number of ids that reach the floor of min_p, their mass, the sum of exp(scaled logit), and
    their smallest logit."""
    row, part = tl.program_id(0), tl.program_id(1)
    peak, _ = _merge(peaks, peak_ids, num_parts, row, PARTS)
    if _has_limits(numbers, num_rows, row, peak):
        temperature, place = _temperature(numbers, row), row * num_parts + part
        _ids, x = _load(logits, row_stride, vocab_size, row, part * PART, PART)
        stays = _reaches(x, peak, temperature, tl.load(numbers + num_rows + row).to(tl.float32))
        tl.store(counts + place, tl.sum(stays.to(tl.int32), axis=0))
        tl.store(masses + place, tl.sum(tl.where(stays, _mass(x, peak, temperature), 0.0).to(tl.float64), axis=0))
        tl.store(smallest + place, tl.min(tl.where(stays, x, peak), axis=0))


@triton.jit
def _load_some(numbers, blocks, first, count, size, PART: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr):
    """Return PART of `count` numbers, from `first` on; -inf behind the last one. LISTED: only the blocks that are listed
    count, of `size` numbers in all."""
    places = first + tl.arange(0, PART)
    exists = places < count
    if LISTED:
        places = tl.load(blocks + places // BLOCK, exists, other=0) * BLOCK + places % BLOCK
        exists = exists & (places < size)
    return tl.load(numbers + places, exists, other=-_INF).to(tl.float32)


@triton.jit
def _tally(
    logits, blocks, count, vocab_size, peak, temperature, floor, PART: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the mass of the ids in listed blocks that reach the floor, and their smallest logit."""
    mass = tl.zeros([PART], tl.float32)
    smallest = tl.zeros([PART], tl.float32) + peak
    for first in tl.range(0, count, PART, num_stages=LOADS_AHEAD):
        x = _load_some(logits, blocks, first, count, vocab_size, PART, BLOCK, LISTED=True)
        stays = _reaches(x, peak, temperature, floor)
        mass += tl.where(stays, _mass(x, peak, temperature), 0.0)
        smallest = tl.minimum(smallest, tl.where(stays, x, peak))
    return tl.sum(mass.to(tl.float64), axis=0), tl.min(smallest, axis=0)


@triton.jit
def _logit_reaching(
    numbers, blocks, count, size, peak, temperature, low, target,
    PART: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """Return the largest logit such that the number of it and the larger ones, or their mass, is `target`; `low` if all
    from there have less. For the logits see `_load_some`.

    It lies in [low, high]. The range is halved, and its ends move on to logits of the row, so few passes are needed, and
    the result is exact. A sum of fewer positive numbers in the same order is never larger, so rounding does no harm.
    """
    high = peak
    while low < high:
        middle = tl.minimum(low * 0.5 + high * 0.5, high)
        middle = tl.where(middle > low, middle, high)
        reached = tl.zeros([PART], tl.float32)
        above = tl.zeros([PART], tl.float32) + high  # the smallest logit from the middle on
        below = tl.zeros([PART], tl.float32) + low  # the largest logit below the middle
        for first in tl.range(0, count, PART, num_stages=LOADS_AHEAD):
            x = _load_some(numbers, blocks, first, count, size, PART, BLOCK, LISTED)
            is_above = x >= middle
            weights = tl.where(is_above, _mass(x, peak, temperature), 0.0) if BY_MASS else is_above.to(tl.float32)
            reached += weights
            above = tl.minimum(above, tl.where(is_above, x, high))
            below = tl.maximum(below, tl.where(is_above, low, x))
        is_reached = tl.sum(reached.to(tl.float64), axis=0) >= target
        low, high = (
            tl.where(is_reached, tl.min(above, axis=0), low),
            tl.where(is_reached, high, tl.max(below, axis=0)),
        )
    return low


@triton.jit
def _find_reaching(
    logits, vocab_size, block_peaks, blocks, num_blocks, peak, temperature, low, target,
    PART: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """Return what `_logit_reaching` returns for a whole row, and how many ids are in the blocks that it lists: all from this
    logit on. The largest logits of the blocks reach the target no earlier than all logits do, so a block whose largest
    one is below their result is not read."""
    low = _logit_reaching(
        block_peaks, blocks, num_blocks, num_blocks, peak, temperature, low, target, BLOCKS, BLOCK, False, BY_MASS
    )  # fmt: skip
    numbers = tl.arange(0, BLOCKS)
    is_listed = tl.load(block_peaks + numbers, numbers < num_blocks, other=-_INF) >= low
    tl.debug_barrier()  # all threads have read the list from before
    tl.store(blocks + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1, numbers, is_listed)
    tl.debug_barrier()
    count = tl.sum(is_listed.to(tl.int32), axis=0) * BLOCK
    found = _logit_reaching(
        logits, blocks, count, vocab_size, peak, temperature, low, target, PART, BLOCK, True, BY_MASS
    )  # fmt: skip
    return found, count


@triton.jit(do_not_specialize=["num_rows"])
def _raise_floors(
    logits, row_stride, vocab_size, peaks, peak_ids, num_parts, numbers, num_rows, counts, masses, smallest,
    block_peaks, blocks, num_blocks,
    AT_ONCE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Raise the floors of rows with top_k, to their k-th largest entry, and with top_p, to the least likely of the fewest
    ids that reach top_p of the mass above the floor."""
    row = tl.program_id(0)
    peak, _ = _merge(peaks, peak_ids, num_parts, row, PARTS)
    if _has_limits(numbers, num_rows, row, peak):
        parts = tl.arange(0, PARTS)
        own, exists = row * num_parts + parts, parts < num_parts
        count = tl.sum(tl.load(counts + own, exists, other=0), axis=0)
        mass = tl.sum(tl.load(masses + own, exists, other=0.0), axis=0)
        low = tl.min(tl.load(smallest + own, exists, other=_INF), axis=0)
        temperature, floor = _temperature(numbers, row), tl.load(numbers + num_rows + row).to(tl.float32)
        top_k, top_p = tl.load(numbers + 2 * num_rows + row), tl.load(numbers + 3 * num_rows + row)
        logits += row.to(tl.int64) * row_stride
        block_peaks += row * num_blocks
        blocks += row * num_blocks
        if (top_k > 0) & (top_k < count):
            kth, num_ids = _find_reaching(
                logits, vocab_size, block_peaks, blocks, num_blocks, peak, temperature, low, top_k,
                AT_ONCE, BLOCK, BLOCKS, BY_MASS=False,
            )  # fmt: skip
            floor = tl.div_rn(kth - peak, temperature)
            mass, low = _tally(logits, blocks, num_ids, vocab_size, peak, temperature, floor, AT_ONCE, BLOCK)
        if top_p < 1:
            last, num_ids = _find_reaching(
                logits, vocab_size, block_peaks, blocks, num_blocks, peak, temperature, low, top_p * mass,
                AT_ONCE, BLOCK, BLOCKS, BY_MASS=True,
            )  # fmt: skip
            floor = tl.div_rn(last - peak, temperature)
        tl.store(numbers + num_rows + row, floor.to(tl.float64))


@triton.jit
def _mix64(bits):
    """SplitMix64's output function."""
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def _log_variates(key, ids):
    """Return the logarithms of the exponential variates of token ids."""
    bits = _mix64(key + (ids + 1).to(tl.uint64) * _GOLDEN_GAMMA)
    uniform = ((bits >> 11).to(tl.int64).to(tl.float32) + 0.5) * (2.0**-53)
    uniform = tl.minimum(uniform, _LARGEST_UNIFORM)
    # -log(1 - uniform). The rounding of 1 - uniform loses the digits of small numbers; the quotient restores them.
    rest = 1.0 - uniform
    variates = tl.where(rest == 1.0, uniform, uniform * tl.log(rest) / tl.where(rest == 1.0, -1.0, rest - 1.0))
    return tl.log(variates)


@triton.jit(do_not_specialize=["num_rows"])
def _draw_parts(
    logits, row_stride, vocab_size, peaks, peak_ids, num_parts, numbers, num_rows, keys, scores, score_ids,
    PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    peak, _ = _merge(peaks, peak_ids, num_parts, row, PARTS)
    if (tl.load(numbers + row) > 0) & _is_finite(peak):
        ids, x = _load(logits, row_stride, vocab_size, row, part * PART, PART)
        scaled = tl.div_rn(x - peak, _temperature(numbers, row))
        stays = (x > -_INF) & (scaled >= tl.load(numbers + num_rows + row).to(tl.float32))
        score = -_INF
        score_id = _NO_ID
        if tl.max(stays.to(tl.int32), axis=0) > 0:
            key = tl.load(keys + row).to(tl.uint64, bitcast=True)
            score, score_id = _largest(tl.where(stays, scaled - _log_variates(key, ids), -_INF), ids)
        tl.store(scores + row * num_parts + part, score)
        tl.store(score_ids + row * num_parts + part, score_id)


@triton.jit
def _finish(
    peaks, peak_ids, scores, score_ids, num_parts, numbers, token_ids, DRAWS: tl.constexpr, PARTS: tl.constexpr
):
    row = tl.program_id(0)
    peak, token_id = _merge(peaks, peak_ids, num_parts, row, PARTS)
    if DRAWS:
        _, drawn_id = _merge(scores, score_ids, num_parts, row, PARTS)
        token_id = tl.where(tl.load(numbers + row) > 0, drawn_id, token_id)
    tl.store(token_ids + row, tl.where(_is_finite(peak), token_id, _NO_TOKEN).to(tl.int64))
