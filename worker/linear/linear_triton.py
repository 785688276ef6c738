"""Linear layers in Triton whose results do not depend on the other rows of the step.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.worker.linear.packed import TorchLinear

TILES = {2: (64, 64, 64), 4: (32, 64, 32)}
"""By size of an input in bytes: rows, outputs and inputs of a tile. One choice for all M: another one rounds differently. A
layer of 1,024 outputs has 16 tiles in a decode step, so tiles are small, and many are loaded ahead."""
STAGES = 5


class TritonLinear(TorchLinear):
    """A layer whose sums have the same order in every row of every call. torch chooses the order by the number of rows."""

    name = "Triton"

    def into(self, inputs: Tensor, outputs: Tensor, accumulate: bool = False) -> None:
        num_rows = inputs.shape[0]
        tile_m, tile_n, tile_k = TILES[self.dtype.itemsize]
        multiply[(triton.cdiv(self.num_outputs, tile_n), triton.cdiv(num_rows, tile_m))](
            *(inputs, self.weights, self.weights if self._bias is None else self._bias, outputs),
            *(num_rows, self.num_outputs, self.num_inputs),
            HAS_BIAS=self._bias is not None,
            ACCUMULATES=accumulate,
            BLOCK_M=tile_m,
            BLOCK_N=tile_n,
            BLOCK_K=tile_k,
            num_stages=STAGES,
        )

    def _multiply(self, inputs: Tensor) -> Tensor:
        outputs = torch.empty(inputs.shape[0], self.num_outputs, dtype=self.output_dtype, device=inputs.device)
        self.into(inputs, outputs)
        return outputs


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    inputs, weights, bias, outputs, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, ACCUMULATES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of outputs. Grid: tiles of outputs, tiles of rows. inputs [M, K], weights [N, K], outputs [M, N]."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    entries = tl.arange(0, BLOCK_K)
    input_tile = inputs + rows.to(tl.int64) * num_inputs + entries[None, :]
    weight_tile = weights + columns.to(tl.int64) * num_inputs + entries[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        is_input = first + entries < num_inputs
        part = tl.load(input_tile + first, (rows < num_rows) & is_input[None, :], other=0.0)
        factors = tl.load(weight_tile + first, (columns < num_outputs) & is_input[:, None], other=0.0)
        sums = tl.dot(part, factors.to(part.dtype), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + columns, columns < num_outputs, other=0.0).to(tl.float32)
    is_stored = (rows < num_rows) & (columns < num_outputs)
    places = outputs + rows.to(tl.int64) * num_outputs + columns
    if ACCUMULATES:
        sums += tl.load(places, is_stored, other=0.0).to(tl.float32)
    tl.store(places, sums.to(outputs.dtype.element_ty), is_stored)
