"""The functions of `rows_torch` as Triton kernels: one launch each. They compute in float32, and offsets are int64.

A row's result depends on that row alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADS_AT_ONCE = 8
"""Heads of one token that one program rotates."""
ACTIVATED_AT_ONCE = 1024
"""Entries of one row that one program activates."""


def rms_norm(inputs: Tensor, weights: Tensor, epsilon: float, outputs: Tensor, adds: bool) -> None:
    num_rows, size = inputs.shape
    block = triton.next_power_of_2(size)
    if num_rows:
        _rms_norm[(num_rows,)](
            *(inputs, weights, outputs, size, epsilon),
            ADDS=adds,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )


def gated_activation(inputs: Tensor, outputs: Tensor, activation: str) -> None:
    num_rows, size = outputs.shape
    if num_rows:
        grid = (num_rows, triton.cdiv(size, ACTIVATED_AT_ONCE))
        _gated_activation[grid](inputs, outputs, size, IS_SILU=activation == "silu", BLOCK=ACTIVATED_AT_ONCE)


def norm_and_rotate(
    projected: Tensor,
    positions: Tensor,
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
    num_heads: int,
    head_dim: int,
    outputs: Tensor,
) -> None:
    num_tokens, width = outputs.shape
    num_rotated = width // head_dim
    cosines, sines = tables
    query_norm, key_norm = norms or tables
    if num_tokens:
        _norm_and_rotate[(num_tokens, triton.cdiv(num_rotated, HEADS_AT_ONCE))](
            *(projected, positions, cosines, sines, query_norm, key_norm, outputs),
            *(projected.stride(0), num_heads, num_rotated, epsilon),
            HEAD_DIM=head_dim,
            HALF=cosines.shape[1],
            HAS_NORMS=norms is not None,
            BLOCK_HEADS=HEADS_AT_ONCE,
            BLOCK_DIM=triton.next_power_of_2(head_dim),
        )


@triton.jit
def _rms_norm(inputs, weights, outputs, size, epsilon, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    entries = tl.arange(0, BLOCK)
    mask = entries < size
    values = tl.load(inputs + row + entries, mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / size + epsilon)
    values = values * scale * tl.load(weights + entries, mask, other=0.0)
    if ADDS:
        values += tl.load(outputs + row + entries, mask, other=0.0).to(tl.float32)
    tl.store(outputs + row + entries, values.to(outputs.dtype.element_ty), mask)


@triton.jit
def _gated_activation(inputs, outputs, size, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = entries < size
    gates = tl.load(inputs + 2 * row + entries, mask, other=0.0).to(tl.float32)
    values = tl.load(inputs + 2 * row + size + entries, mask, other=0.0).to(tl.float32)
    argument = gates
    if not IS_SILU:  # 0.5 * (1 + tanh(x)) is the logistic function of 2 x
        argument = 1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)
    results = gates / (1.0 + tl.exp(tl.minimum(-argument, 80.0))) * values
    tl.store(outputs + row + entries, results.to(outputs.dtype.element_ty), mask)


@triton.jit
def _norm_and_rotate(
    projected,
    positions,
    cosines,
    sines,
    query_norm,
    key_norm,
    outputs,
    projected_stride,
    num_heads,
    num_rotated,
    epsilon,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    entries = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (heads < num_rotated) & (entries < HEAD_DIM)
    is_first, is_rotated = entries < HALF, entries < 2 * HALF
    partners = tl.where(is_first, entries + HALF, tl.where(is_rotated, entries - HALF, entries))
    base = projected + token * projected_stride + heads * HEAD_DIM
    values = tl.load(base + entries, mask, other=0.0).to(tl.float32)
    others = tl.load(base + partners, mask, other=0.0).to(tl.float32)
    if HAS_NORMS:
        scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / HEAD_DIM + epsilon)[:, None]
        is_query = heads < num_heads
        of_query, of_key = mask & is_query, mask & (heads >= num_heads)
        values *= scale * (
            tl.load(query_norm + entries + heads * 0, of_query, other=0.0)
            + tl.load(key_norm + entries + heads * 0, of_key, other=0.0)
        )
        others *= scale * (
            tl.load(query_norm + partners + heads * 0, of_query, other=0.0)
            + tl.load(key_norm + partners + heads * 0, of_key, other=0.0)
        )
    angles = tl.load(positions + token) * HALF + tl.where(is_first, entries, entries - HALF)
    cosine = tl.load(cosines + angles, is_rotated, other=1.0)
    sine = tl.load(sines + angles, is_rotated, other=0.0)
    results = values * cosine + tl.where(is_first, -others, others) * sine
    target = outputs + token * num_rotated * HEAD_DIM + heads * HEAD_DIM + entries
    tl.store(target, results.to(outputs.dtype.element_ty), mask)
