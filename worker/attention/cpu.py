"""Attention for CPUs in torch, for installations without the compiled kernels and for float16.

Decode rows of similar lengths are one call of torch's fused attention, another row is one. What a call gathers is limited in
size, so that it fits into the CPU's cache. Large buffers would also be mapped and page-faulted at each use, which cost five
times the arithmetic.

Shapes: T tokens of the step, Q tokens of one row, B decode rows of one call, L positions that are attended to, Hq query
heads, Hkv key and value heads, G = Hq / Hkv, D size of a key head, Dv size of a value head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from millrace.worker.attention.reference import ReferenceAttention, first_visible, visible_positions
from millrace.worker.input_batch import StepBatch
from millrace.worker.kv_pool import LayerCache

GATHERED_ELEMENTS = 1 << 20
"""Maximum elements of the keys that one call for decode rows gathers, if it has several rows."""


class CPUAttention:
    """Decode by groups and prefill by rows, with torch's fused attention. `softcap` and `sinks` need the reference."""

    name = "cpu"

    def __init__(self) -> None:
        self._reference = ReferenceAttention()

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
        if softcap is not None or sinks is not None:
            return self._reference.forward(query, key, value, layer, scaling, sliding_window, softcap, batch, sinks)
        # Rows that are their whole sequence do not read the pool, but round as if they did.
        key, value = key.to(layer.keys.dtype), value.to(layer.values.dtype)
        layer.write(key, value, batch.slot_mapping[layer.group])
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        block_tables, starts = batch.block_tables[layer.group], batch.query_starts
        for row, kv_len in enumerate(batch.kv_lens):
            tokens = slice(starts[row], starts[row + 1])
            num_tokens = tokens.stop - tokens.start
            if num_tokens == 1:
                continue
            keys, values = key[:, tokens], value[:, tokens]  # [Hkv, Q, D], [Hkv, Q, Dv]
            if num_tokens < kv_len:
                first = first_visible(kv_len, num_tokens, sliding_window)
                keys, values = (each.transpose(0, 1) for each in layer.gather(block_tables[row], first, kv_len))
            output[tokens] = _attend_chunk(query[:, tokens], keys, values, scaling, sliding_window)
        kind = (layer.group, sliding_window, layer.keys[0, 0].numel())
        if kind not in batch.derived:  # else an earlier layer has made them
            batch.derived[kind] = list(_decode_groups(batch, layer, sliding_window, query.dtype))
        for group in batch.derived[kind]:
            output.index_copy_(0, group.tokens, _decode(query, layer, group, scaling))
        return output


class DecodeGroup(NamedTuple):
    """Rows of one token each."""

    tokens: Tensor  # [B], among the step's T
    blocks: Tensor  # of all rows, one after the other
    empty_slots: Tensor  # among the B * L gathered: those that no token attends to. They may hold NaN
    mask: Tensor  # [B, 1, 1, L], added to the scores


def _decode_groups(
    batch: StepBatch, layer: LayerCache, sliding_window: int | None, dtype: torch.dtype
) -> Iterator[DecodeGroup]:
    """Yield the decode rows of a step, in groups of similar lengths."""
    starts, kv_lens, block_size = batch.query_starts, batch.kv_lens, layer.keys.shape[1]
    decodes = [row for row in range(len(kv_lens)) if starts[row + 1] - starts[row] == 1]
    decodes.sort(key=kv_lens.__getitem__)
    while decodes:
        longest = kv_lens[decodes[-1]]
        rows = decodes[-max(1, GATHERED_ELEMENTS // (longest * layer.keys[0, 0].numel())) :]
        del decodes[-len(rows) :]
        first_block = first_visible(kv_lens[rows[0]], 1, sliding_window) // block_size
        end_block = (longest - 1) // block_size + 1
        positions = torch.arange(first_block * block_size, end_block * block_size, device="cpu")
        lengths = torch.tensor([[kv_lens[row]] for row in rows], dtype=torch.int64, device="cpu")
        hidden = positions >= lengths  # [B, L]
        if sliding_window is not None:
            hidden |= positions < lengths - sliding_window
        mask = torch.zeros(hidden.shape, dtype=dtype, device="cpu").masked_fill_(hidden, float("-inf"))
        yield DecodeGroup(
            tokens=torch.tensor([starts[row] for row in rows], dtype=torch.int64, device="cpu"),
            blocks=batch.block_tables[layer.group][rows, first_block:end_block].flatten(),
            empty_slots=hidden.flatten().nonzero().squeeze(1),
            mask=mask[:, None, None],
        )


def _decode(query: Tensor, layer: LayerCache, group: DecodeGroup, scaling: float) -> Tensor:  # [B, Hq, Dv]
    num_rows, num_heads, num_kv_heads = len(group.tokens), query.shape[0], layer.keys.shape[2]
    gathered = (pool.index_select(0, group.blocks).to(query.dtype).flatten(0, 1) for pool in (layer.keys, layer.values))
    keys, values = (
        each.index_fill_(0, group.empty_slots, 0.0).unflatten(0, (num_rows, -1)).transpose(1, 2) for each in gathered
    )  # [B, Hkv, L, D], [B, Hkv, L, Dv]
    queries = query.index_select(1, group.tokens).transpose(0, 1)
    # Query heads that share a key head become query positions, so that no key is repeated.
    queries = queries.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, -1)  # [B, Hkv, G, D]
    attended = scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, scale=scaling)
    return attended.reshape(num_rows, num_heads, -1)


def _attend_chunk(
    query: Tensor,  # [Hq, Q, D]
    keys: Tensor,  # [Hkv, L, D]
    values: Tensor,  # [Hkv, L, Dv]
    scaling: float,
    sliding_window: int | None,
) -> Tensor:  # [Q, Hq, Dv]
    num_tokens, length = query.shape[1], keys.shape[1]
    is_causal = num_tokens == length and (sliding_window is None or sliding_window >= length)
    attended = scaled_dot_product_attention(
        query.unsqueeze(0),
        keys.to(query.dtype).unsqueeze(0),
        values.to(query.dtype).unsqueeze(0),
        attn_mask=None if is_causal else visible_positions(num_tokens, length, sliding_window, keys.device),
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=True,
    )  # [1, Hq, Q, Dv]
    return attended[0].transpose(0, 1)
