"""Attention through the compiled kernels, straight from the pool: nothing is gathered.

It computes float32 and bfloat16 of any head size. Other dtypes, and keys in a pool of another dtype, go to the torch path.

Shapes: T tokens of the step, Hq query heads, Hkv key and value heads, D size of a key head, Dv size of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.worker.attention.cpu import CPUAttention
from millrace.worker.input_batch import StepBatch
from millrace.worker.kernels.library import DTYPES, AttentionCall, Kernels
from millrace.worker.kv_pool import LayerCache


@dataclass(frozen=True)
class StepCall:
    """The arguments of a step that its layers share. The tensors are here so that they outlive the calls."""

    call: AttentionCall
    tensors: tuple[Tensor, ...]


class CompiledAttention:
    """Computes decodes and chunks in one call per layer, which also writes the keys and values."""

    name = "cpu"

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
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
    ) -> Tensor:  # [T, Hq, Dv]
        dtype = query.dtype
        if dtype not in DTYPES or {key.dtype, value.dtype, layer.keys.dtype, layer.values.dtype} != {dtype}:
            return self._torch_path.forward(query, key, value, layer, scaling, sliding_window, softcap, batch)
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        call = _prepare(batch, layer).call
        _, call.block_size, call.num_kv_heads, call.key_dim = layer.keys.shape
        call.num_heads, call.value_dim, call.dtype = query.shape[0], value.shape[-1], DTYPES[dtype]
        call.scaling, call.window, call.softcap = scaling, sliding_window or 0, softcap or 0.0
        query, key, value = _dense(query), _dense(key), _dense(value)  # they have to outlive the call
        call.query, (call.query_head_stride, call.query_token_stride, _) = query.data_ptr(), query.stride()
        call.key, (call.key_head_stride, call.key_token_stride, _) = key.data_ptr(), key.stride()
        call.value, (call.value_head_stride, call.value_token_stride, _) = value.data_ptr(), value.stride()
        call.keys, call.values, call.output = layer.keys.data_ptr(), layer.values.data_ptr(), output.data_ptr()
        self._kernels.attend(call)
        return output


def _prepare(batch: StepBatch, layer: LayerCache) -> StepCall:
    """Return what all layers of a step have in common. The first one computes it."""
    prepared: StepCall | None = batch.derived.get(CompiledAttention)
    if prepared is None:
        longest = max(batch.kv_lens)
        # The library does not check its arguments: a table that is too short would be read past its end.
        assert longest <= batch.block_tables.shape[1] * layer.keys.shape[1], f"no block for position {longest - 1}"
        query_starts = torch.tensor(batch.query_starts, dtype=torch.int32)
        kv_lens = torch.tensor(batch.kv_lens, dtype=torch.int32)
        block_tables = batch.block_tables.to(torch.int32).contiguous()
        call = AttentionCall(
            query_starts=query_starts.data_ptr(),
            kv_lens=kv_lens.data_ptr(),
            block_tables=block_tables.data_ptr(),
            num_rows=batch.num_rows,
            table_width=block_tables.shape[1],
            num_threads=torch.get_num_threads(),
        )
        batch.derived[CompiledAttention] = prepared = StepCall(call, (query_starts, kv_lens, block_tables))
    return prepared


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension has stride 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
