"""Rows of logits in parts of a fixed size, each with a program of its own, in Triton: what the kernels of a draw share.

Shapes: M rows, V token ids, C parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALLEST_TEMPERATURE = tl.constexpr(torch.finfo(torch.float32).tiny)
NO_ID = tl.constexpr(2**31 - 1)
INF = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)


def empty_parts(num_rows: int, num_parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return space for a number and a token id of each part [M, C]."""
    values = torch.empty(num_rows, num_parts, dtype=torch.float32, device=device)
    return values, torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)


@triton.jit
def load_part(logits, row_stride, vocab_size, row, first, PART: tl.constexpr):
    """Return the token ids from `first` on and their logits; -inf behind the last one."""
    ids = first + tl.arange(0, PART)
    places = logits + row.to(tl.int64) * row_stride + ids
    return ids, tl.load(places, mask=ids < vocab_size, other=-INF).to(tl.float32)


@triton.jit
def largest(values, ids):
    """Return the largest value and the lowest id that has it. The value is NaN if one of them is."""
    has_nan = tl.max((values != values).to(tl.int32), axis=0) > 0
    values = tl.where(values == values, values, -INF)
    peak = tl.max(values, axis=0)
    peak_id = tl.min(tl.where(values == peak, ids, NO_ID), axis=0)
    return tl.where(has_nan, float("nan"), peak), peak_id


@triton.jit
def merge_parts(values, ids, num_parts, row, PARTS: tl.constexpr):
    """Return the row's largest value and the lowest id that has it, from those of its parts."""
    parts = tl.arange(0, PARTS)
    places = row * num_parts + parts
    exists = parts < num_parts
    return largest(tl.load(values + places, mask=exists, other=-INF), tl.load(ids + places, mask=exists, other=NO_ID))


@triton.jit
def is_finite(number):
    return tl.abs(number) < INF


@triton.jit
def temperature_of(numbers, row):
    return tl.maximum(tl.load(numbers + row), SMALLEST_TEMPERATURE).to(tl.float32)
