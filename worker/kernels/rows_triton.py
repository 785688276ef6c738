"""Functions of `rows_torch` as Triton kernels: one launch each. They compute in float32, and offsets are int64. The rotation
is part of the attention (`attention/triton.py`), which also writes the pool.

A row's result depends on that row alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from millrace.worker.launch_triton import launch_options, wait_for_earlier_kernels

ACTIVATED_AT_ONCE = 1024
"""Entries of one row that one program activates."""


def rms_norm(weights: Tensor, epsilon: float, inputs: Tensor, outputs: Tensor, *, adds: bool = False) -> None:
    num_rows, size = inputs.shape
    block = triton.next_power_of_2(size)
    if num_rows:
        _rms_norm[(num_rows,)](
            *(inputs, weights, outputs, size, epsilon),
            ADDS=adds,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(),
        )


def gated_activation(activation: str, inputs: Tensor, outputs: Tensor) -> None:
    num_rows, size = outputs.shape
    if num_rows:
        grid = (num_rows, triton.cdiv(size, ACTIVATED_AT_ONCE))
        how = {"IS_SILU": activation == "silu", "BLOCK": ACTIVATED_AT_ONCE}
        _gated_activation[grid](inputs, outputs, size, **how, **launch_options())


@triton.jit
def _rms_norm(
    inputs, weights, outputs, size, epsilon, ADDS: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr
):
    wait_for_earlier_kernels(IS_DEPENDENT)
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
def _gated_activation(inputs, outputs, size, IS_SILU: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    wait_for_earlier_kernels(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * size
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = entries < size
    gates = tl.load(inputs + 2 * row + entries, mask, other=0.0).to(tl.float32)
    values = tl.load(inputs + 2 * row + size + entries, mask, other=0.0).to(tl.float32)
    tl.store(outputs + row + entries, gated(gates, values, IS_SILU).to(outputs.dtype.element_ty), mask)


@triton.jit
def gated(gates, values, IS_SILU: tl.constexpr):
    """Return `activation(gate) * value`."""
    argument = gates
    if not IS_SILU:  # 0.5 * (1 + tanh(x)) is the logistic function of 2 x
        argument = 1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)
    return gates / (1.0 + tl.exp(tl.minimum(-argument, 80.0))) * values
