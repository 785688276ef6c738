"""Draws token ids in Triton kernels. The rules are those of `millrace.worker.sampler`, the random numbers those of
`millrace.worker.counter_rng`.

A row is divided into parts of a fixed size. Each part has its own program, and the results are merged in a fixed order. So
a draw depends on its own row alone. Nothing waits for the device: all decisions about kernels depend on tensors of the host.

    find_peaks    the largest logit of each part, and of each block of a part
    raise_floors  the floors of top_k and top_p (`floors_triton.py`); only in a step that has them
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
from millrace.worker import floors_triton
from millrace.worker.counter_rng import GOLDEN_GAMMA, LARGEST_UNIFORM, next_keys
from millrace.worker.parts_triton import (
    INF,
    LOG2_E,
    NO_ID,
    empty_parts,
    is_finite,
    largest,
    load_part,
    merge_parts,
    temperature_of,
)
from millrace.worker.sampling_rows import SamplingRows
from millrace.worker.transfer import staging

PART = 4096
"""Token ids of one program."""
NUM_SLICES = 8
"""Of a part whose bounds do not tell the best id. Fewer take registers from all programs."""
NUM_WARPS = 8

_GOLDEN_GAMMA = tl.constexpr(GOLDEN_GAMMA)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LARGEST_UNIFORM = tl.constexpr(LARGEST_UNIFORM)
SLACK = 2**-13
_SLACK = tl.constexpr(SLACK)
_SHRUNK_LOG2_E, _SHRUNK_UNIT = tl.constexpr((1 - SLACK) * LOG2_E.value), tl.constexpr((1 - SLACK) * 2**-31)
_NO_TOKEN = tl.constexpr(NO_TOKEN)


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
    for number, values in zip(numbers, (rows.temperatures, rows.floors, rows.top_k, rows.top_p), strict=True):
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
    peaks = empty_parts(num_rows, num_parts, logits.device)
    scores, numbers = peaks, token_ids  # of no use without a draw
    block_peaks, blocks = (
        empty_parts(num_rows, num_parts * (PART // floors_triton.BLOCK), logits.device) if has_limits else peaks
    )
    _find_peaks[num_rows, num_parts](
        *row, *peaks, num_parts, block_peaks, BLOCK=floors_triton.BLOCK, HAS_LIMITS=has_limits, **shape
    )
    if settings is not None:
        numbers, keys = settings[:4].view(torch.float64), settings[4]
        if has_limits:
            floors_triton.raise_floors(row, peaks, block_peaks, blocks, numbers, shape)
        scores = empty_parts(num_rows, num_parts, logits.device)
        _draw_parts[num_rows, num_parts](
            *(*row, *peaks, num_parts, numbers, num_rows, keys, *scores), AT_ONCE=PART // NUM_SLICES, **shape
        )
    draws, parts = settings is not None, shape["PARTS"]
    _finish[(num_rows,)](*peaks, *scores, num_parts, numbers, token_ids, DRAWS=draws, PARTS=parts, num_warps=1)
    return token_ids


@triton.jit
def _find_peaks(
    logits, row_stride, vocab_size, peaks, peak_ids, num_parts, block_peaks,
    PART: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, HAS_LIMITS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    ids, x = load_part(logits, row_stride, vocab_size, row, part * PART, PART)
    peak, peak_id = largest(x, ids)
    tl.store(peaks + row * num_parts + part, peak)
    tl.store(peak_ids + row * num_parts + part, peak_id)
    if HAS_LIMITS:
        blocks = (row * num_parts + part) * (PART // BLOCK) + tl.arange(0, PART // BLOCK)
        tl.store(block_peaks + blocks, tl.max(tl.reshape(x, [PART // BLOCK, BLOCK]), axis=1))


@triton.jit
def _mixed(key, ids):
    """Return the random bits of token ids, but for the last step of SplitMix64's output function."""
    bits = key + (ids + 1).to(tl.uint64) * _GOLDEN_GAMMA
    bits = (bits ^ (bits >> 30)) * _MIX_1
    return (bits ^ (bits >> 27)) * _MIX_2


@triton.jit
def _scores(x, peak, temperature, floor, key, ids):
    """Return the scaled logits minus the logarithms of the exponential variates; -inf below the floor."""
    scaled = tl.div_rn(x - peak, temperature)
    bits = _mixed(key, ids)
    bits ^= bits >> 31
    uniform = tl.minimum(((bits >> 11).to(tl.int64).to(tl.float32) + 0.5) * (2.0**-53), _LARGEST_UNIFORM)
    # -log(1 - uniform). The rounding of 1 - uniform loses the digits of small numbers; the quotient restores them.
    rest = 1.0 - uniform
    variates = tl.where(rest == 1.0, uniform, uniform * tl.log(rest) / tl.where(rest == 1.0, -1.0, rest - 1.0))
    return tl.where((x > -INF) & (scaled >= floor), scaled - tl.log(variates), -INF)


@triton.jit
def _range_of(temperature, floor):
    """Return by what `_bounds` multiplies distances from the peak, and the largest product that may reach the floor."""
    return tl.div_rn(_SHRUNK_LOG2_E, temperature), floor * -LOG2_E + _SLACK


@triton.jit
def _bounds(x, peak, rate, farthest, key, ids):
    """Return numbers that are at most exp(-score), and mostly not much less, for a third of the work: there is no logarithm
    in exp(-score) = -log(1 - u) * exp(-scaled), where -log(1 - u) >= u + u * u / 2. Below the floor they are infinite. The
    last step of the output function does not change the upper 31 bits. The slack is more than all rounding errors."""
    distances = (peak - x) * rate
    uniform = (_mixed(key, ids) >> 33).to(tl.int32).to(tl.float32) * _SHRUNK_UNIT + 2.0**-55
    return tl.where(distances <= farthest, (uniform * 0.5 + 1.0) * uniform * tl.exp2(distances), INF)


@triton.jit
def _best_of(
    logits, row_stride, vocab_size, row, first_of_part, peak, temperature, floor, key,
    PART: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Return the best score of a part and its id."""
    best = tl.full([AT_ONCE], -INF, tl.float32)
    best_ids = tl.full([AT_ONCE], NO_ID, tl.int32)
    for first in range(first_of_part, first_of_part + PART, AT_ONCE):
        ids, x = load_part(logits, row_stride, vocab_size, row, first, AT_ONCE)
        each = _scores(x, peak, temperature, floor, key, ids)
        best, best_ids = tl.where(each > best, each, best), tl.where(each > best, ids, best_ids)
    return largest(best, best_ids)


@triton.jit(do_not_specialize=["num_rows"])
def _draw_parts(
    logits, row_stride, vocab_size, peaks, peak_ids, num_parts, numbers, num_rows, keys, scores, score_ids,
    PART: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Store the best score of each part and its id. The bounds mostly exclude all ids but one."""
    row, part = tl.program_id(0), tl.program_id(1)
    peak, _ = merge_parts(peaks, peak_ids, num_parts, row, PARTS)
    if (tl.load(numbers + row) > 0) & is_finite(peak):
        temperature, floor = temperature_of(numbers, row), tl.load(numbers + num_rows + row).to(tl.float32)
        rate, farthest = _range_of(temperature, floor)
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        score = -INF
        score_id = NO_ID
        if (peak - tl.load(peaks + row * num_parts + part)) * rate <= farthest:
            ids, x = load_part(logits, row_stride, vocab_size, row, part * PART, PART)
            bounds = _bounds(x, peak, rate, farthest, key, ids)
            bound = tl.min(bounds, axis=0)
            if bound < INF:  # others lose against the row's peak
                score_id = tl.min(tl.where(bounds == bound, ids, NO_ID), axis=0)
                its_x = tl.load(logits + row.to(tl.int64) * row_stride + score_id).to(tl.float32)
                score = _scores(its_x, peak, temperature, floor, key, score_id)
                if tl.sum((bounds <= tl.exp(-score)).to(tl.int32), axis=0) > 1:
                    score, score_id = _best_of(
                        logits, row_stride, vocab_size, row, part * PART, peak, temperature, floor, key, PART, AT_ONCE
                    )
        tl.store(scores + row * num_parts + part, score)
        tl.store(score_ids + row * num_parts + part, score_id)


@triton.jit
def _finish(
    peaks, peak_ids, scores, score_ids, num_parts, numbers, token_ids, DRAWS: tl.constexpr, PARTS: tl.constexpr
):
    row = tl.program_id(0)
    peak, token_id = merge_parts(peaks, peak_ids, num_parts, row, PARTS)
    if DRAWS:
        _, drawn_id = merge_parts(scores, score_ids, num_parts, row, PARTS)
        token_id = tl.where(tl.load(numbers + row) > 0, drawn_id, token_id)
    tl.store(token_ids + row, tl.where(is_finite(peak), token_id, _NO_TOKEN).to(tl.int64))
