"""Attention through the compiled kernels, straight from the pool: nothing is gathered.

It computes float32 and bfloat16 of any head size, from a pool in either. Other dtypes go to the torch path.

Shapes: T tokens of the step, Hq query heads, Hkv key and value heads, D size of a key head, Dv size of a value head, W
width of the fused queries, keys and values: (Hq + Hkv) * D + Hkv * Dv.
"""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

from millrace.worker.attention.cpu import CPUAttention
from millrace.worker.input_batch import StepBatch
from millrace.worker.kernels.library import KERNEL_DTYPES, AttentionCall, AttentionRows, Kernels
from millrace.worker.kv_pool import LayerCache


class StepRows:
    """Owns the arguments of a step that its layers share: the rows and their block tables."""

    def __init__(self, kernels: Kernels, batch: StepBatch) -> None:
        self.longest = max(batch.kv_lens)
        # The library does not check its arguments: a table that is too short would be read past its end.
        assert self.longest <= batch.block_tables.shape[2] * batch.block_size, (
            f"no block for position {self.longest - 1}"
        )
        query_starts = torch.tensor(batch.query_starts, dtype=torch.int32, device="cpu")
        kv_lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device="cpu")
        block_tables = batch.block_tables.to(torch.int32).contiguous()
        order, common = torch.empty(2, len(block_tables), batch.num_rows, dtype=torch.int32, device="cpu").unbind()
        self._tensors = [query_starts, kv_lens, block_tables, order, common]  # they have to outlive the calls
        self._rows = [
            AttentionRows(
                query_starts=query_starts.data_ptr(),
                kv_lens=kv_lens.data_ptr(),
                block_tables=tables.data_ptr(),
                num_rows=batch.num_rows,
                table_width=block_tables.shape[2],
                num_threads=torch.get_num_threads(),
            )
            for tables in block_tables
        ]
        for group, rows in enumerate(self._rows):
            kernels.order_rows(rows, batch.block_size, order[group], common[group])
        self.addresses = [ctypes.addressof(rows) for rows in self._rows]
        """Of the rows with the tables of each group of layers."""


def step_rows(kernels: Kernels, batch: StepBatch) -> StepRows:
    """Return what all layers of a step have in common. The first one computes it."""
    rows: StepRows | None = batch.derived.get(StepRows)
    if rows is None:
        batch.derived[StepRows] = rows = StepRows(kernels, batch)
    return rows


class LayerAttention:
    """Computes the attention of one layer from fused queries, keys and values, and writes the keys and values.

    Queries and keys are normalized if there are weights, then rotated if there are tables: the first R elements of each
    head, element i with element i + R / 2, at the position of the token in its sequence.
    """

    def __init__(
        self,
        kernels: Kernels,
        layer: LayerCache,
        num_heads: int,
        dtype: torch.dtype,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,  # cosines and sines, float32 [positions, R / 2]
        norms: tuple[Tensor, Tensor] | None = None,  # weights of RMSNorm for queries and for keys, [D]
        norm_eps: float = 0.0,
        sinks: Tensor | None = None,  # [Hq]
        rounds: bool = False,
    ) -> None:
        """`rounds`: see `CompiledAttention`."""
        assert layer.keys.dtype == layer.values.dtype
        _, block_size, num_kv_heads, key_dim = layer.keys.shape
        value_dim = layer.values.shape[-1]
        self._kernels = kernels
        self._group = layer.group
        self.width = (num_heads + num_kv_heads) * key_dim + num_kv_heads * value_dim
        self._num_positions = sys.maxsize
        self._call = call = AttentionCall(scaling=scaling, softcap=softcap or 0.0, norm_eps=norm_eps)
        call.num_heads, call.num_kv_heads, call.key_dim, call.value_dim = num_heads, num_kv_heads, key_dim, value_dim
        call.dtype, call.pool_dtype = KERNEL_DTYPES[dtype], KERNEL_DTYPES[layer.keys.dtype]
        call.block_size, call.window, call.rounds = block_size, sliding_window or 0, rounds
        call.keys, call.values = layer.keys.data_ptr(), layer.values.data_ptr()
        self._tensors = [layer.keys, layer.values]  # they have to outlive the calls
        if sinks is not None:
            call.sinks = self._keep(sinks, (num_heads,))
        if norms is not None:
            call.query_norm, call.key_norm = (self._keep(each, (key_dim,)) for each in norms)
        if rotary is not None:
            self._num_positions, half = rotary[0].shape
            assert 2 * half <= key_dim
            call.rotary_dim = 2 * half
            call.cosines, call.sines = (self._keep(each, (self._num_positions, half)) for each in rotary)

    def run(self, qkv: Tensor, output: Tensor, rows: StepRows) -> None:
        """Fill output [T, Hq * Dv] from qkv [T, W]: queries, keys, values, each by heads. Both are contiguous."""
        assert rows.longest <= self._num_positions, f"the rotation tables end before position {rows.longest - 1}"
        assert qkv.stride(0) == self.width, qkv.shape
        call = self._call
        call.rows, call.qkv, call.output = rows.addresses[self._group], qkv.data_ptr(), output.data_ptr()
        self._kernels.attend(call)

    def _keep(self, tensor: Tensor, shape: tuple[int, ...]) -> int:
        """Return the address of a float32 tensor that stays as long as this object."""
        assert tensor.shape == shape
        self._tensors.append(tensor.to(torch.float32).contiguous())
        return self._tensors[-1].data_ptr()


class CompiledAttention:
    """Computes decodes and chunks in one call per layer, which also writes the keys and values. The fused forward pass calls
    `LayerAttention` itself."""

    name = "cpu"

    def __init__(self, kernels: Kernels, *, rounds: bool = False) -> None:
        """`rounds`: where queries, keys and values are bfloat16, and the CPU has instructions for it, round the queries and
        weights of chunks too. So a token's bits depend on whether it is computed in a chunk."""
        self.kernels, self.rounds = kernels, rounds
        self._torch_path = CPUAttention()

    def forward(
        self,
        query: Tensor,  # [Hq, T, D]
        key: Tensor,  # [Hkv, T, D]
        value: Tensor,  # [Hkv, T, Dv]
        layer: LayerCache,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        batch: StepBatch,
        sinks: Tensor | None = None,  # [Hq]
    ) -> Tensor:  # [T, Hq, Dv]
        dtype, pool_dtype = query.dtype, layer.keys.dtype
        if dtype not in KERNEL_DTYPES or pool_dtype not in KERNEL_DTYPES or not (key.dtype == value.dtype == dtype):
            return self._torch_path.forward(query, key, value, layer, scaling, sliding_window, softcap, batch, sinks)
        num_heads, num_tokens, _ = query.shape
        qkv = torch.cat([each.transpose(0, 1).reshape(num_tokens, -1) for each in (query, key, value)], dim=1)
        output = query.new_empty(num_tokens, num_heads, value.shape[-1])
        how = (scaling, sliding_window, softcap)
        attention = LayerAttention(self.kernels, layer, num_heads, dtype, *how, sinks=sinks, rounds=self.rounds)
        attention.run(qkv, output, step_rows(self.kernels, batch))
        return output
