"""Fast attention for CPUs: the cost grows with the sum of the row lengths.

Decode rows of similar length form a group, which is one call. Query heads that share a key head become query positions,
so that no key is repeated. A row with several tokens is one call. Gathered keys and values are limited in size, so that
they fit into the CPU's cache. Large buffers would also be mapped and page-faulted at each use, which cost five times
the arithmetic.

Shapes: T tokens of the step, Q tokens of one row, L positions attended to, B rows of a group, P blocks of its longest
row, S tokens in a block, Hq query heads, Hkv key and value heads, G = Hq / Hkv, D size of a key head, Dv size of a
value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from millrace.worker.attention.reference import ReferenceAttention, first_visible, visible_positions
from millrace.worker.input_batch import StepBatch
from millrace.worker.kv_pool import LayerCache

GATHERED_ELEMENTS = 1 << 20
"""Maximum elements of the keys that one decode group gathers."""
MAX_LENGTH_RATIO = 2
"""Maximum blocks of a decode group's longest row, as a multiple of its shortest row's."""


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of one token each."""

    tokens: Tensor  # [B], among the step's T
    blocks: Tensor  # [B * P]
    empty_slots: Tensor  # among the B * P * S gathered: those without a visible token, to be zeroed
    mask: Tensor  # [B, 1, 1, P * S], added to the scores


@dataclass(frozen=True)
class ChunkRow:
    """One row of several tokens."""

    first_token: int
    last_token: int
    """One past the end, among the step's T."""
    blocks: Tensor | None
    """None if the row is its whole sequence so far: then the step's own keys are all keys."""
    length: int
    """Positions attended to, counted from the start of the first block."""
    mask: Tensor | None
    """[Q, L], or None for plain causal attention."""


@dataclass(frozen=True)
class Layout:
    """The rows of a step, grouped for one block table, sliding window and key size. Layers with the same ones share it."""

    decode: list[DecodeGroup]
    chunks: list[ChunkRow]


class CPUAttention:
    """Decode by groups and prefill by rows, with torch's fused CPU attention. `softcap` needs the reference."""

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
    ) -> Tensor:  # [T, Hq, Dv]
        if softcap is not None:
            return self._reference.forward(query, key, value, layer, scaling, sliding_window, softcap, batch)
        # Rows that are their whole sequence do not read the pool, but round as if they did.
        key, value = key.to(layer.keys.dtype), value.to(layer.values.dtype)
        layer.write(key, value, batch.slot_mapping[layer.group])
        layout = _layout(batch, layer, sliding_window, query.dtype)
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        for group in layout.decode:
            output.index_copy_(0, group.tokens, _decode(query, layer, group, scaling))
        for row in layout.chunks:
            output[row.first_token : row.last_token] = _attend_chunk(query, key, value, layer, row, scaling)
        return output


def _decode(query: Tensor, layer: LayerCache, group: DecodeGroup, scaling: float) -> Tensor:  # [B, Hq, Dv]
    num_rows, num_heads = len(group.tokens), query.shape[0]
    keys, values = (
        pool.index_select(0, group.blocks).to(query.dtype).flatten(0, 1).index_fill_(0, group.empty_slots, 0.0)
        for pool in (layer.keys, layer.values)
    )  # [B * P * S, Hkv, D], [B * P * S, Hkv, Dv]
    num_kv_heads = keys.shape[1]
    queries = query.index_select(1, group.tokens).transpose(0, 1)  # [B, Hq, D]
    attended = scaled_dot_product_attention(
        queries.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, -1),  # [B, Hkv, G, D]
        keys.unflatten(0, (num_rows, -1)).transpose(1, 2),  # [B, Hkv, P * S, D]
        values.unflatten(0, (num_rows, -1)).transpose(1, 2),
        attn_mask=group.mask,
        scale=scaling,
    )  # [B, Hkv, G, Dv]
    return attended.reshape(num_rows, num_heads, -1)


def _attend_chunk(
    query: Tensor, key: Tensor, value: Tensor, layer: LayerCache, row: ChunkRow, scaling: float
) -> Tensor:  # [Q, Hq, Dv]
    tokens = slice(row.first_token, row.last_token)
    keys, values = key[:, tokens], value[:, tokens]  # [Hkv, Q, D], [Hkv, Q, Dv]
    if row.blocks is not None:
        keys, values = (
            pool.index_select(0, row.blocks).flatten(0, 1)[: row.length].transpose(0, 1)
            for pool in (layer.keys, layer.values)
        )  # [Hkv, L, D], [Hkv, L, Dv]
    attended = scaled_dot_product_attention(
        query[:, tokens].unsqueeze(0),
        keys.to(query.dtype).unsqueeze(0),
        values.to(query.dtype).unsqueeze(0),
        attn_mask=row.mask,
        is_causal=row.mask is None,
        scale=scaling,
        enable_gqa=True,
    )  # [1, Hq, Q, Dv]
    return attended[0].transpose(0, 1)


def _layout(batch: StepBatch, layer: LayerCache, sliding_window: int | None, dtype: torch.dtype) -> Layout:
    """Return the batch's layout for this kind of layer. The first such layer of a step computes it."""
    _, block_size, num_kv_heads, key_dim = layer.keys.shape
    kind = (layer.group, sliding_window, num_kv_heads * key_dim)
    if kind not in batch.derived:
        max_blocks = GATHERED_ELEMENTS // (block_size * num_kv_heads * key_dim)
        block_tables = batch.block_tables[layer.group]
        batch.derived[kind] = _make_layout(batch, block_tables, sliding_window, block_size, max_blocks, dtype)
    layout: Layout = batch.derived[kind]
    return layout


def _make_layout(
    batch: StepBatch,
    block_tables: Tensor,  # [R, P]
    sliding_window: int | None,
    block_size: int,
    max_blocks: int,
    dtype: torch.dtype,
) -> Layout:
    chunks: list[ChunkRow] = []
    spans: list[tuple[int, int, int]] = []
    """Decode rows: (blocks attended to, first block, row)."""
    for row, kv_len in enumerate(batch.kv_lens):
        num_tokens = batch.query_starts[row + 1] - batch.query_starts[row]
        first_position = first_visible(kv_len, num_tokens, sliding_window)
        first_block, end_block = first_position // block_size, (kv_len - 1) // block_size + 1
        if num_tokens == 1:
            spans.append((end_block - first_block, first_block, row))
        else:
            chunks.append(_chunk_row(batch, block_tables, row, first_block * block_size, sliding_window, block_size))
    spans.sort(reverse=True)
    groups: list[DecodeGroup] = []
    begin = 0
    for end in range(1, len(spans) + 1):
        longest = spans[begin][0]
        has_space = end < len(spans) and (end - begin + 1) * longest <= max_blocks
        if has_space and spans[end][0] * MAX_LENGTH_RATIO >= longest:
            continue
        groups.append(_decode_group(batch, block_tables, spans[begin:end], sliding_window, block_size, dtype))
        begin = end
    return Layout(groups, chunks)


def _decode_group(
    batch: StepBatch,
    block_tables: Tensor,  # [R, P]
    spans: list[tuple[int, int, int]],
    sliding_window: int | None,
    block_size: int,
    dtype: torch.dtype,
) -> DecodeGroup:
    num_blocks = spans[0][0]
    width = num_blocks * block_size
    hidden: list[int] = []
    for index, (_, first_block, row) in enumerate(spans):
        base, kv_len = index * width - first_block * block_size, batch.kv_lens[row]  # base: slot of position 0
        if sliding_window is not None:
            hidden += range(index * width, base + kv_len - sliding_window)
        hidden += range(base + kv_len, (index + 1) * width)
    rows = torch.tensor([[row] for _, _, row in spans])
    columns = torch.tensor([[first_block] for _, first_block, _ in spans]) + torch.arange(num_blocks)  # [B, P]
    empty_slots = torch.tensor(hidden, dtype=torch.int64)
    mask = torch.zeros(len(spans) * width, dtype=dtype).index_fill_(0, empty_slots, float("-inf"))
    return DecodeGroup(
        tokens=torch.tensor([batch.query_starts[row] for _, _, row in spans]),
        blocks=block_tables[rows, columns.clamp(max=block_tables.shape[1] - 1)].flatten(),
        empty_slots=empty_slots,
        mask=mask.view(len(spans), 1, 1, width),
    )


def _chunk_row(
    batch: StepBatch,
    block_tables: Tensor,  # [R, P]
    row: int,
    first_position: int,
    sliding_window: int | None,
    block_size: int,
) -> ChunkRow:
    first, last, kv_len = batch.query_starts[row], batch.query_starts[row + 1], batch.kv_lens[row]
    is_whole = last - first == kv_len
    is_causal = is_whole and (sliding_window is None or sliding_window >= kv_len)
    length = kv_len if is_whole else kv_len - first_position
    mask = None if is_causal else visible_positions(last - first, length, sliding_window, block_tables.device)
    end_block = (kv_len - 1) // block_size + 1
    blocks = None if is_whole else block_tables[row, first_position // block_size : end_block]
    return ChunkRow(first, last, blocks, length, mask)
