"""Linear layers in Triton: those whose results do not depend on the other rows of the step, and products of few rows, which
memory bounds, with the norm before them and the activation behind them.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from millrace.worker.kernels.rows_triton import gated
from millrace.worker.launch_triton import LINE_BYTES, launch_options, prefetch, wait_for_earlier_kernels
from millrace.worker.linear.packed import TorchLinear

TILES = {2: (64, 64, 64), 4: (32, 64, 32)}
"""By size of an input in bytes: rows, outputs and inputs of a tile. One choice for all M: another one rounds differently. A
layer of 1,024 outputs has 16 tiles in a decode step, so tiles are small, and many are loaded ahead."""
STAGES = 5
MOST_FEW_ROWS = 4
"""More rows are left to torch's products, which use the tensor cores."""
FEW_ROWS_INPUTS, FEW_ROWS_STAGES = 1024, 4
"""Inputs of the tiles of a product of few rows, and the stages of the pipeline that reads the tiles."""
MOST_SUMS = 8192
"""Sums of a program: 64 registers of each thread."""
FEW_OUTPUTS = 4096
"""Up to which the programs are small, so that there is one for each multiprocessor."""


class FewRowsLinear(TorchLinear):
    """A layer that torch computes, except for few rows: its weights are read once, at the speed of the memory."""

    def into(self, inputs: Tensor, outputs: Tensor, accumulate: bool = False) -> None:
        if not self.multiply_few(inputs, outputs, accumulate=accumulate):
            super().into(inputs, outputs, accumulate)

    def multiply_few(
        self,
        inputs: Tensor,
        outputs: Tensor,
        norm: tuple[Tensor, float] | None = None,
        activation: str | None = None,
        *,
        accumulate: bool = False,
    ) -> bool:
        """Write the outputs [M, N] of few rows [M, K]. Return False, and do nothing, if there are none or more.

        `norm`: weights and epsilon of an RMSNorm of the inputs. `activation`: of the first half of the outputs, which the
        second half is multiplied with; then there are half as many outputs."""
        num_rows, num_outputs = outputs.shape
        if not 0 < num_rows <= MOST_FEW_ROWS or not self.weights.dtype == self.dtype == outputs.dtype:
            return False
        block_m = triton.next_power_of_2(num_rows)
        block_k = min(FEW_ROWS_INPUTS, 2 * FEW_ROWS_INPUTS // block_m, triton.next_power_of_2(self.num_inputs))
        most = MOST_SUMS // (block_m * block_k * (1 if activation is None else 2))
        block_n = min(most, 4 if num_outputs <= FEW_OUTPUTS else 8)
        multiply_few_rows[(triton.cdiv(num_outputs, block_n),)](
            *(inputs, norm[0] if norm else inputs, norm[1] if norm else 0.0, self.weights),
            *(inputs if self._bias is None else self._bias, outputs, num_rows, num_outputs, self.num_inputs),
            HAS_NORM=norm is not None,
            HAS_BIAS=self._bias is not None,
            IS_GATED=activation is not None,
            IS_SILU=activation == "silu",
            ACCUMULATES=accumulate,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            LINES=triton.next_power_of_2(triton.cdiv(self.num_inputs * inputs.itemsize, LINE_BYTES.value)),
            num_stages=min(FEW_ROWS_STAGES, triton.cdiv(self.num_inputs, block_k)),
            **launch_options(),
        )
        return True


class TritonLinear(TorchLinear):
    """A layer whose sums have the same order in every row of every call. torch chooses the order by the number of rows."""

    name = "Triton"

    def into(self, inputs: Tensor, outputs: Tensor, accumulate: bool = False) -> None:
        num_rows = inputs.shape[0]
        tile_m, tile_n, tile_k = TILES[self.dtype.itemsize]
        multiply[(triton.cdiv(self.num_outputs, tile_n), triton.cdiv(num_rows, tile_m))](
            *(inputs, self.weights, self.weights if self._bias is None else self._bias, outputs),
            *(num_rows, self.num_outputs, self.num_inputs),
            FILLS_TILES=self.num_inputs % tile_k == 0,
            HAS_BIAS=self._bias is not None,
            ACCUMULATES=accumulate,
            BLOCK_M=tile_m,
            BLOCK_N=tile_n,
            BLOCK_K=tile_k,
            num_stages=STAGES,
            **launch_options(),
        )


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    inputs, weights, bias, outputs, num_rows, num_outputs, num_inputs,
    FILLS_TILES: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute a tile of outputs. Grid: tiles of outputs, tiles of rows. inputs [M, K], weights [N, K], outputs [M, N]."""
    wait_for_earlier_kernels(IS_DEPENDENT)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    entries = tl.arange(0, BLOCK_K)
    # Rows and outputs that do not exist are those of the last one, and not stored: a mask would cost more.
    input_tile = inputs + tl.minimum(rows, num_rows - 1).to(tl.int64) * num_inputs + entries[None, :]
    weight_tile = weights + tl.minimum(columns, num_outputs - 1).to(tl.int64) * num_inputs + entries[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        if FILLS_TILES:
            part, factors = tl.load(input_tile + first), tl.load(weight_tile + first)
        else:
            is_input = first + entries < num_inputs
            part = tl.load(input_tile + first, is_input[None, :], other=0.0)
            factors = tl.load(weight_tile + first, is_input[:, None], other=0.0)
        sums = tl.dot(part, factors.to(part.dtype), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + columns, columns < num_outputs, other=0.0).to(tl.float32)
    is_stored = (rows < num_rows) & (columns < num_outputs)
    places = outputs + rows.to(tl.int64) * num_outputs + columns
    if ACCUMULATES:
        sums += tl.load(places, is_stored, other=0.0).to(tl.float32)
    tl.store(places, sums.to(outputs.dtype.element_ty), is_stored)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_few_rows(
    inputs, norm, epsilon, weights, bias, outputs, num_rows, num_outputs, num_inputs,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, IS_SILU: tl.constexpr,
    ACCUMULATES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LINES: tl.constexpr, num_stages: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of all rows. Grid: blocks of outputs. inputs [M, K]. weights [N, K], with an activation
    [2 N, K]."""
    rows, entries = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = columns < num_outputs
    of_gates = weights + columns.to(tl.int64)[:, None] * num_inputs
    of_values = weights + (num_outputs + columns).to(tl.int64)[:, None] * num_inputs
    if IS_DEPENDENT:  # no other kernel writes weights
        lines = tl.arange(0, LINES) * (LINE_BYTES // (weights.dtype.element_ty.primitive_bitwidth // 8))
        places = tl.minimum(columns, num_outputs - 1).to(tl.int64)[:, None] * num_inputs
        places += tl.minimum(lines, num_inputs - 1)
        prefetch(weights + places)
        if IS_GATED:
            prefetch(weights + num_outputs.to(tl.int64) * num_inputs + places)
    wait_for_earlier_kernels(IS_DEPENDENT)
    sums = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    sums_of_values = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for first in tl.range(0, num_inputs, BLOCK_K, num_stages=num_stages):
        own = first + entries
        is_input = own < num_inputs
        row = tl.load(inputs + rows * num_inputs + own, (rows < num_rows) & is_input, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += row * row
            row *= tl.load(norm + own, is_input, other=0.0)
        is_loaded = exists[:, None] & is_input
        tile = tl.load(of_gates + own, is_loaded, other=0.0).to(tl.float32)
        sums += tile[None, :, :] * row[:, None, :]
        if IS_GATED:
            tile = tl.load(of_values + own, is_loaded, other=0.0).to(tl.float32)
            sums_of_values += tile[None, :, :] * row[:, None, :]
    results, values = tl.sum(sums, 2), tl.sum(sums_of_values, 2)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / num_inputs + epsilon)[:, None]
        results *= scale
        values *= scale
    if HAS_BIAS:
        results += tl.load(bias + columns, exists, other=0.0).to(tl.float32)
        if IS_GATED:
            values += tl.load(bias + num_outputs + columns, exists, other=0.0).to(tl.float32)
    if IS_GATED:
        results = gated(results, values, IS_SILU)
    places, is_stored = outputs + rows * num_outputs + columns, (rows < num_rows) & exists
    if ACCUMULATES:
        results += tl.load(places, is_stored, other=0.0).to(tl.float32)
    tl.store(places, results.to(outputs.dtype.element_ty), is_stored)
