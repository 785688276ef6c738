"""The attention that the others are measured against: plain torch, one sequence after the other, on any device.

Shapes: T tokens of the step, Q tokens of one row, L positions of its sequence so far, S tokens in a block, Hq query
heads, Hkv key and value heads, D size of a key head, Dv size of a value head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.input_batch import StepBatch
from worker.kv_pool import LayerCache


class ReferenceAttention:
    """Gathers each sequence's keys and values and computes softmax attention in float32."""

    name = "reference"

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
        layer.write(key, value, batch.slot_mapping)
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        for row in range(batch.num_rows):
            tokens = slice(batch.query_starts[row], batch.query_starts[row + 1])
            keys, values = layer.gather(batch.block_tables[row], batch.kv_lens[row])  # [L, Hkv, D], [L, Hkv, Dv]
            output[tokens] = attend_one(query[:, tokens], keys, values, scaling, sliding_window, softcap)
        return output


def attend_one(
    query: Tensor,  # [Hq, Q, D], the last Q of the sequence's L positions
    keys: Tensor,  # [L, Hkv, D]
    values: Tensor,  # [L, Hkv, Dv]
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:  # [Q, Hq, Dv]
    """Causal attention of one sequence's newest tokens over all of it."""
    group = query.shape[0] // keys.shape[1]
    keys = keys.transpose(0, 1).repeat_interleave(group, dim=0)  # [Hq, L, D]
    values = values.transpose(0, 1).repeat_interleave(group, dim=0)  # [Hq, L, Dv]
    scores = query.float() @ keys.float().transpose(1, 2) * scaling  # [Hq, Q, L]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_positions(query.shape[1], keys.shape[1], sliding_window, query.device)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (weights @ values.float()).transpose(0, 1).to(query.dtype)


def visible_positions(num_queries: int, kv_len: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """[Q, L] bool: which positions each of the last Q tokens of a sequence of L sees.

    With Q = 2, L = 5 and a window of 3:   position   0 1 2 3 4
                                           query at 3   x x x
                                           query at 4     x x x
    """
    key_positions = torch.arange(kv_len, device=device)
    query_positions = torch.arange(kv_len - num_queries, kv_len, device=device).unsqueeze(1)
    visible = key_positions <= query_positions
    if sliding_window is not None:
        visible &= key_positions > query_positions - sliding_window
    return visible
