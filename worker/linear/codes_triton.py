"""Linear layers in Triton whose weights are codes of quantized checkpoints: the rows of decode steps are multiplied by the
codes; for more rows the weights are computed into a buffer that layers share.

Shapes: M rows, K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from millrace.worker.launch_triton import capability, launch_options, wait_for_earlier_kernels
from millrace.worker.linear.codes import CodedWeight
from millrace.worker.linear.modules import give_weight
from millrace.worker.linear.packed import PackedLinear, TorchLinear

MOST_ROWS = 256
"""More rows are multiplied by the computed weights."""
TILE_ROWS, TILE_OUTPUTS, STAGES = 64, 32, 4
"""Of a program: few outputs, so that a layer has many programs. Tiles are loaded ahead."""
TILE_INPUTS = 64
"""A divisor of the inputs of a group."""
LEAST_FLOAT8_CAPABILITY = 89
FOURS, INTEGERS, FLOATS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def can_multiply(weight: CodedWeight) -> bool:
    """Whether there are kernels for these codes on this GPU."""
    coded = weight.coded
    if coded.codes.is_floating_point() and 0 < capability() < LEAST_FLOAT8_CAPABILITY:
        return False
    return coded.is_by_group and (coded.are_integers or coded.codes.is_floating_point())


class CodedTritonLinear(PackedLinear):
    """A layer of codes. `give_to` lets modules hold them, so that they move with these."""

    name = "Triton, codes"

    def __init__(
        self, weight: CodedWeight, bias: Tensor | None, buffer: Callable[[int, int], Tensor], kind: type[TorchLinear]
    ) -> None:
        """`buffer`: returns memory [N, K] that layers share. `kind`: computes the products of many rows from it."""
        coded = weight.coded
        super().__init__(weight.shape[1], weight.shape[0], weight.dtype, weight.dtype)
        # Triton's interpreter cannot load parts of a tile of float8.
        self.weights = _kept(coded.codes.view(torch.uint8) if coded.codes.is_floating_point() else coded.codes)
        self._scales, self._bias = _kept(coded.scales), bias
        self._zeros = None if coded.zeros is None else _kept(coded.zeros)
        self._buffer, self._kind = buffer, kind
        self._codes = FOURS if coded.table is not None else FLOATS if coded.codes.is_floating_point() else INTEGERS
        self._middle = 0 if coded.table is None else -int(coded.table[0])
        self._group_size = coded.group_size

    def give_to(self, modules: list[nn.Linear]) -> None:
        """Let the first module have the codes, and the others nothing."""
        give_weight(modules, self.weights, self._bias)
        first = modules[0]
        self.weights, self._bias = first.weight, first.bias
        first.register_parameter("scales", self._scales)
        first.register_parameter("zeros", self._zeros)

    def into(self, inputs: Tensor, outputs: Tensor, accumulate: bool = False) -> None:
        num_rows = inputs.shape[0]
        scales, zeros, bias = self._scales, self._zeros, self._bias
        if num_rows > MOST_ROWS or self._kind is not TorchLinear:  # another kind: results do not depend on the rows
            weights = self._buffer(self.num_outputs, self.num_inputs)
            grid = triton.cdiv(self.num_outputs, TILE_OUTPUTS), triton.cdiv(self.num_inputs, TILE_INPUTS)
            _widen[grid](
                *(self.weights, scales, zeros, weights, self.num_outputs, self.num_inputs, self._group_size),
                *(scales.shape[1], self._middle),
                KIND=self._codes,
                BLOCK_N=TILE_OUTPUTS,
                BLOCK_K=TILE_INPUTS,
                **launch_options(),
            )
            self._kind(weights, bias).into(inputs, outputs, accumulate)
            return
        block_m = min(TILE_ROWS, max(16, triton.next_power_of_2(num_rows)))
        _multiply[triton.cdiv(self.num_outputs, TILE_OUTPUTS), triton.cdiv(num_rows, block_m)](
            *(inputs, self.weights, scales, zeros, bias, outputs, num_rows, self.num_outputs, self.num_inputs),
            *(self._group_size, scales.shape[1], self._middle),
            KIND=self._codes,
            ACCUMULATES=accumulate,
            BLOCK_M=block_m,
            BLOCK_N=TILE_OUTPUTS,
            BLOCK_K=TILE_INPUTS,
            num_stages=STAGES,
            **launch_options(),
        )


def _kept(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=False)


@triton.jit
def _numbers(codes, columns, entries, is_weight, zero, num_inputs, KIND: tl.constexpr):
    """Return the numbers of byte `entries` [K, 1] of outputs `columns` [1, N], less the zero points: of the codes in the
    lower and in the upper halves of the bytes, or twice those of whole bytes."""
    per_byte: tl.constexpr = 2 if KIND == FOURS else 1
    stored = tl.load(codes + columns.to(tl.int64) * (num_inputs // per_byte) + entries, is_weight, other=0)
    if KIND == FOURS:
        lower, upper = (stored & 15).to(tl.float32) - zero, (stored >> 4).to(tl.float32) - zero
    elif KIND == FLOATS:
        lower = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        upper = lower
    else:
        lower = stored.to(tl.float32)
        upper = lower
    return lower, upper


@triton.jit
def _scale_and_zero(scales, zeros, columns, is_output, group, num_groups, middle):
    """Return the scales and zero points of a group, of outputs `columns`."""
    at = columns.to(tl.int64) * num_groups + group
    scale = tl.load(scales + at, is_output, other=0.0)
    zero = (
        tl.load(zeros + at, is_output, other=0.0) if zeros is not None else tl.full(columns.shape, middle, tl.float32)
    )
    return scale, zero


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    inputs, codes, scales, zeros, bias, outputs, num_rows, num_outputs, num_inputs, group_size, num_groups, middle,
    KIND: tl.constexpr, ACCUMULATES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute a tile of outputs. Grid: tiles of outputs, tiles of rows. inputs [M, K], scales [N, G], outputs [M, N]. A
    tile of inputs belongs to one group, and its sums are multiplied by the scale."""
    wait_for_earlier_kernels(IS_DEPENDENT)
    per_byte: tl.constexpr = 2 if KIND == FOURS else 1
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output, is_row = columns < num_outputs, rows < num_rows
    entries = tl.arange(0, BLOCK_K // per_byte)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        scale, zero = _scale_and_zero(scales, zeros, columns, is_output, first // group_size, num_groups, middle)
        at = first // per_byte + entries
        is_input = at * per_byte < num_inputs
        is_weight = is_output[None, :] & is_input[:, None]
        lower, upper = _numbers(codes, columns[None, :], at[:, None], is_weight, zero[None, :], num_inputs, KIND)
        part = inputs + rows.to(tl.int64) * num_inputs + at[None, :] * per_byte
        is_part = is_row & is_input[None, :]
        even = tl.load(part, is_part, other=0.0)
        products = tl.dot(even, lower.to(even.dtype), input_precision="ieee")
        if KIND == FOURS:
            odd = tl.load(part + 1, is_part, other=0.0)
            products = tl.dot(odd, upper.to(odd.dtype), products, input_precision="ieee")
        sums += products * scale[None, :]
    if bias is not None:
        sums += tl.load(bias + columns, is_output, other=0.0).to(tl.float32)[None, :]
    to = outputs + rows.to(tl.int64) * num_outputs + columns[None, :]
    is_result = is_row & is_output[None, :]
    if ACCUMULATES:
        sums += tl.load(to, is_result, other=0.0).to(tl.float32)
    tl.store(to, sums.to(outputs.dtype.element_ty), is_result)


@triton.jit
def _widen(
    codes, scales, zeros, weights, num_outputs, num_inputs, group_size, num_groups, middle,
    KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute weights [N, K]. Grid: tiles of outputs, and of inputs, which belong to one group."""
    wait_for_earlier_kernels(IS_DEPENDENT)
    per_byte: tl.constexpr = 2 if KIND == FOURS else 1
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * BLOCK_K
    at = first // per_byte + tl.arange(0, BLOCK_K // per_byte)
    is_output = columns < num_outputs
    is_weight = is_output[None, :] & (at * per_byte < num_inputs)[:, None]
    scale, zero = _scale_and_zero(scales, zeros, columns, is_output, first // group_size, num_groups, middle)
    lower, upper = _numbers(codes, columns[None, :], at[:, None], is_weight, zero[None, :], num_inputs, KIND)
    to = weights + columns[None, :].to(tl.int64) * num_inputs + at[:, None] * per_byte
    tl.store(to, (lower * scale[None, :]).to(weights.dtype.element_ty), is_weight)
    if KIND == FOURS:
        tl.store(to + 1, (upper * scale[None, :]).to(weights.dtype.element_ty), is_weight)
