"""Reference attention: plain torch, one sequence after the other, on any device. Others are tested against it.

Shapes: T tokens of the step, Q tokens of one row, L positions that they attend to, S tokens in a block, Hq query
heads, Hkv key and value heads, D size of a key head, Dv size of a value head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.worker.input_batch import StepBatch
from millrace.worker.kv_pool import LayerCache

MAX_SCORES = 1 << 27
"""Maximum entries of the scores [Hq, Q, L] in memory. Bounds the memory for the last chunk of a long prompt."""


class ReferenceAttention:
    """Gathers each sequence's keys and values, and computes softmax attention in float32."""

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
        sinks: Tensor | None = None,  # [Hq]
    ) -> Tensor:  # [T, Hq, Dv]
        layer.write(key, value, batch.slot_mapping[layer.group])
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        for row in range(batch.num_rows):
            tokens = slice(batch.query_starts[row], batch.query_starts[row + 1])
            table, kv_len = batch.block_tables[layer.group, row], batch.kv_lens[row]
            first = first_visible(kv_len, tokens.stop - tokens.start, sliding_window)
            keys, values = layer.gather(table, first, kv_len)  # [L, Hkv, D], [L, Hkv, Dv]
            output[tokens] = attend_one(query[:, tokens], keys, values, scaling, sliding_window, softcap, sinks)
        return output


def attend_one(
    query: Tensor,  # [Hq, Q, D], of the last Q of the L positions
    keys: Tensor,  # [L, Hkv, D]
    values: Tensor,  # [L, Hkv, Dv]
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,  # [Hq]
) -> Tensor:  # [Q, Hq, Dv]
    """Compute causal attention of the last Q tokens of one sequence."""
    num_heads, num_queries, kv_len = query.shape[0], query.shape[1], keys.shape[0]
    group = num_heads // keys.shape[1]
    keys = keys.transpose(0, 1).repeat_interleave(group, dim=0).float()  # [Hq, L, D]
    values = values.transpose(0, 1).repeat_interleave(group, dim=0).float()  # [Hq, L, Dv]
    num_at_a_time = max(1, MAX_SCORES // (num_heads * kv_len))
    parts: list[Tensor] = []
    for begin in range(0, num_queries, num_at_a_time):
        end = min(begin + num_at_a_time, num_queries)
        num_keys = kv_len - num_queries + end
        scores = (
            query[:, begin:end].float() @ keys[:, :num_keys].transpose(1, 2) * scaling
        )  # [Hq, part of Q, part of L]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = visible_positions(end - begin, num_keys, sliding_window, query.device)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, end - begin, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :num_keys]
        parts.append((weights @ values[:, :num_keys]).transpose(0, 1).to(query.dtype))
    return torch.cat(parts)


def first_visible(kv_len: int, num_queries: int, sliding_window: int | None) -> int:
    """Return the first position that one of the last tokens of a sequence attends to."""
    return 0 if sliding_window is None else max(0, kv_len - num_queries + 1 - sliding_window)


def visible_positions(num_queries: int, kv_len: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """Return a mask [Q, L]: True where one of the last Q tokens of a sequence of L attends to a position.

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
