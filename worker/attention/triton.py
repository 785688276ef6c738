"""Attention in Triton, straight from the pool: four launches per layer, however many rows a step has.

A decode row is cut into chunks of CHUNK positions, which are merged in order. The cuts depend on the row alone, so the
result of a row does not depend on the other rows of its step.

Shapes: T tokens of the step, B decode rows, M tiles of the other rows, C chunks of the longest decode row, Hq query
heads, Hkv key and value heads, D size of a key head, Dv size of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from millrace.worker.attention.paged_triton import decode_chunk, merge_chunks, prefill, write_kv
from millrace.worker.attention.reference import first_visible
from millrace.worker.input_batch import StepBatch
from millrace.worker.kv_pool import LayerCache

CHUNK = 256
"""Positions of a decode row that one program attends to. A multiple of the tiles' sizes."""
WIDE_BYTES = 256
"""Bytes of a head above which the tiles are smaller, so that they fit into shared memory."""


@dataclass(frozen=True)
class Rows:
    """The rows of a step on the device, for tiles of one size. All layers share them."""

    decodes: Tensor  # [B, 3] int32: row, token, length
    tiles: Tensor  # [M, 4] int32: row, first token, tokens, position of the first token
    decode_lens: list[int]


class TritonAttention:
    """Computes float32, bfloat16 and float16 with heads of up to 256 elements, from a pool in any of these."""

    name = "triton"

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
        query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
        num_heads, num_tokens, key_dim = query.shape
        num_kv_heads, _, value_dim = value.shape
        block_size = layer.keys.shape[1]
        dims = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "BLOCK_D": _padded(key_dim), "BLOCK_DV": _padded(value_dim)}
        keys, values = (layer.keys, *layer.keys.stride()[:3]), (layer.values, *layer.values.stride()[:3])
        write_kv[(num_tokens,)](
            key, *key.stride()[:2], value, *value.stride()[:2], *keys, *values,
            batch.positions, batch.token_blocks, batch.token_blocks.shape[1], layer.group,
            BLOCK_SIZE=block_size, NUM_KV_HEADS=num_kv_heads, BLOCK_H=triton.next_power_of_2(num_kv_heads), **dims,
        )  # fmt: skip
        tile_size = 32 if max(dims["BLOCK_D"], dims["BLOCK_DV"]) * query.element_size() > WIDE_BYTES else 64
        rows = _rows(batch, tile_size, query.device)
        output = query.new_empty(num_tokens, num_heads, value_dim)
        tables = batch.block_tables[layer.group]
        group, window = num_heads // num_kv_heads, sliding_window or 0
        heads = {"GROUP": group, "NUM_HEADS": num_heads, "BLOCK_N": tile_size, "BLOCK_SIZE": block_size}
        scores = {"WINDOW": window, "SOFTCAP": softcap or 0.0}
        pool = (query, *query.stride()[:2], *keys, *values, tables, tables.stride(0))
        if rows.decode_lens:
            num_rows = len(rows.decode_lens)
            num_chunks = max(
                (length - 1) // CHUNK - first_visible(length, 1, sliding_window) // CHUNK + 1
                for length in rows.decode_lens
            )
            sums = query.new_empty(num_rows, num_heads, num_chunks, value_dim, dtype=torch.float32)
            maxima, totals = query.new_empty(2, num_rows, num_heads, num_chunks, dtype=torch.float32).unbind()
            decode_chunk[(num_rows, num_kv_heads, num_chunks)](
                *pool, rows.decodes, sums, maxima, totals, num_chunks, scaling,
                CHUNK=CHUNK, BLOCK_G=max(16, triton.next_power_of_2(group)), num_stages=2, **scores, **heads, **dims,
            )  # fmt: skip
            merge_chunks[(num_rows, num_heads)](
                sums, maxima, totals, rows.decodes, output, num_chunks,
                WINDOW=window, CHUNK=CHUNK, NUM_HEADS=num_heads, VALUE_DIM=value_dim, BLOCK_DV=dims["BLOCK_DV"],
            )  # fmt: skip
        if len(rows.tiles):
            prefill[(len(rows.tiles), num_heads)](
                *pool, rows.tiles, output, scaling, BLOCK_M=tile_size, num_stages=2, **scores, **heads, **dims
            )
        return output


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _rows(batch: StepBatch, tile_size: int, device: torch.device) -> Rows:
    """Return the step's rows on the device. The first layer of a step copies them, without waiting for the device."""
    kind = (TritonAttention, tile_size)
    if kind not in batch.derived:
        decodes: list[tuple[int, int, int]] = []
        tiles: list[tuple[int, int, int, int]] = []
        for row, length in enumerate(batch.kv_lens):
            start, end = batch.query_starts[row], batch.query_starts[row + 1]
            if end - start == 1:
                decodes.append((row, start, length))
                continue
            for first in range(start, end, tile_size):
                tiles.append((row, first, min(tile_size, end - first), length - end + first))
        numbers = torch.tensor(
            [number for each in (*decodes, *tiles) for number in each],
            dtype=torch.int32,
            pin_memory=device.type == "cuda",
        ).to(device, non_blocking=True)
        split = 3 * len(decodes)
        batch.derived[kind] = Rows(
            numbers[:split].view(-1, 3), numbers[split:].view(-1, 4), [length for _, _, length in decodes]
        )
    rows: Rows = batch.derived[kind]
    return rows
