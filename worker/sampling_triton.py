"""Draws token ids in Triton kernels. The rules are those of `millrace.worker.sampler`, the random numbers those of
`millrace.worker.counter_rng`.

A row is divided into parts of a fixed size. Each part has its own program, and the results are merged in a fixed order. So
a draw depends on its own row alone. Nothing waits for the device: all decisions about kernels depend on tensors of the host.

    find_peaks    the largest logit of each part
    raise_floors  the floors of top_k and top_p; only in a step that has them
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
NUM_WARPS = 8
MOST_WARPS = 32
"""Warps of the one program that reads a whole row several times. Each thread has few ids then, so their sums fit into its
registers from the first part of the row to the last."""
LOADS_AHEAD = tl.constexpr(4)
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
    _find_peaks[num_rows, num_parts](*row, *peaks, num_parts, **shape)
    scores, numbers = peaks, token_ids  # of no use without a draw
    if settings is not None:
        numbers, keys = settings[:4].view(torch.float64), settings[4]
        if has_limits:
            _raise_floors[(num_rows,)](
                *row, *peaks, num_parts, numbers, num_rows, **(shape | {"num_warps": MOST_WARPS})
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
def _find_peaks(logits, row_stride, vocab_size, peaks, peak_ids, num_parts, PART: tl.constexpr, PARTS: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    ids, x = _load(logits, row_stride, vocab_size, row, part * PART, PART)
    peak, peak_id = _largest(x, ids)
    tl.store(peaks + row * num_parts + part, peak)
    tl.store(peak_ids + row * num_parts + part, peak_id)


@triton.jit
def _tally(logits, row_stride, vocab_size, row, peak, temperature, floor, PART: tl.constexpr):
    """Return the number of ids that reach the floor, their sum of exp(scaled logit), and their smallest logit."""
    count = tl.zeros([PART], tl.int32)
    mass = tl.zeros([PART], tl.float32)
    smallest = tl.zeros([PART], tl.float32) + peak
    for first in tl.range(0, vocab_size, PART, num_stages=LOADS_AHEAD):
        _, x = _load(logits, row_stride, vocab_size, row, first, PART)
        stays = (x > -_INF) & (tl.div_rn(x - peak, temperature) >= floor)
        count += stays.to(tl.int32)
        mass += tl.where(stays, _mass(x, peak, temperature), 0.0)
        smallest = tl.minimum(smallest, tl.where(stays, x, peak))
    return tl.sum(count, axis=0), tl.sum(mass.to(tl.float64), axis=0), tl.min(smallest, axis=0)


@triton.jit
def _mass(x, peak, temperature):
    return tl.exp2((x - peak) * (_LOG2_E / temperature))


@triton.jit
def _logit_reaching(
    logits, row_stride, vocab_size, row, peak, temperature, low, target, PART: tl.constexpr, BY_MASS: tl.constexpr
):
    """Return the largest logit such that the number of it and the larger ones, or their mass, is `target`; `low` if all
    from there have less.

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
        for first in tl.range(0, vocab_size, PART, num_stages=LOADS_AHEAD):
            _, x = _load(logits, row_stride, vocab_size, row, first, PART)
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


@triton.jit(do_not_specialize=["num_rows"])
def _raise_floors(
    logits, row_stride, vocab_size, peaks, peak_ids, num_parts, numbers, num_rows,
    PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Raise the floors of rows with top_k, to their k-th largest entry, and with top_p, to the least likely of the fewest
    ids that reach top_p of the mass above the floor."""
    row = tl.program_id(0)
    top_k = tl.load(numbers + 2 * num_rows + row)
    top_p = tl.load(numbers + 3 * num_rows + row)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    peak, _ = _merge(peaks, peak_ids, num_parts, row, PARTS)
    if (tl.load(numbers + row) > 0) & _is_finite(peak) & (has_top_k | (top_p < 1)):
        temperature = _temperature(numbers, row)
        floor = tl.load(numbers + num_rows + row).to(tl.float32)
        count, mass, low = _tally(logits, row_stride, vocab_size, row, peak, temperature, floor, PART)
        if has_top_k & (count > top_k):
            kth = _logit_reaching(
                logits, row_stride, vocab_size, row, peak, temperature, low, top_k, PART, BY_MASS=False
            )
            floor = tl.div_rn(kth - peak, temperature)
            _, mass, low = _tally(logits, row_stride, vocab_size, row, peak, temperature, floor, PART)
        if top_p < 1:
            last = _logit_reaching(
                logits, row_stride, vocab_size, row, peak, temperature, low, top_p * mass, PART, BY_MASS=True
            )
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
