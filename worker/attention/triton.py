"""Attention in Triton, straight from the pool: four launches per layer, however many rows a step has.

A decode row is cut into chunks of CHUNK positions, which are merged in order. Other rows are cut into tiles of tokens. The
cuts depend on the row alone, so the result of a row does not depend on the other rows of its step. A program computes all
query heads of one key head, so it reads the keys and values once for them.

Shapes: T tokens of the step, B decode rows, M tiles of the other rows, P chunks of all decode rows, Hq query heads, Hkv key
and value heads, D size of a key head, Dv size of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from millrace.worker.attention.paged_triton import decode_chunk, merge_chunks, prefill, write_kv
from millrace.worker.input_batch import StepBatch
from millrace.worker.kv_pool import LayerCache

CHUNK = 256
"""Positions of a decode row that one program attends to. A multiple of the tiles' sizes."""
DECODE_STAGES, PREFILL_STAGES = 5, 3
"""Stages of the pipeline that reads the tiles. With 3, the block numbers of the next tile are loaded ahead; with 5, its keys
and values too. A chunk has too few tiles to hide a wait; a prefill program needs the registers."""
WIDE = {torch.float32: 64, torch.float16: 128, torch.bfloat16: 128}
"""Elements of a head above which the tiles are half as large, so that they fit into registers and shared memory. float32 has
small tiles: its products are not the tensor cores', and larger ones take long to compile."""


@dataclass(frozen=True)
class Rows:
    """The rows of a step on the device, cut for one sliding window. All layers that have it share them."""

    tiles: Tensor  # [M, 4] int32: row, first token, tokens, position of the first token
    decodes: Tensor  # [B, 4] int32: row, token, length, number of its first chunk
    num_chunks: int
    """Chunks of all decode rows together."""
    most_chunks: int
    """Largest number of chunks of one decode row."""


class TritonAttention:
    """Computes float32, bfloat16 and float16 with heads of up to `MAX_HEAD_SIZE` elements (`select.py`), from a pool in any
    of these or in fp8."""

    name = "triton"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        """`batch_invariant`: a token has the same bits in a decode row and in any chunk. Long decode rows are slower: each
        is one tile."""
        self._largest_decode = 0 if batch_invariant else 1

    def update_decodes(self, batch: StepBatch) -> None:
        """Give the decode rows of a batch whose tensors stay the lengths that follow from its positions. The number of
        their chunks stays. All is done on the device, so it can be part of a graph."""
        for rows in batch.derived.values():
            rows.decodes[:, 2] = batch.positions[0] + 1

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
        group, window = num_heads // num_kv_heads, sliding_window or 0
        block_d, block_dv = (max(16, triton.next_power_of_2(size)) for size in (key_dim, value_dim))
        tile_n = (32 if query.dtype == torch.float32 else 64) // (
            2 if max(block_d, block_dv) > WIDE[query.dtype] else 1
        )
        tile_m = max(2 * tile_n, triton.next_power_of_2(group))
        key_scales, value_scales = layer.scales or (layer.keys, layer.values)  # of no use without scales
        pool = (layer.keys, key_scales, layer.keys.stride(0), layer.values, value_scales, layer.values.stride(0))
        dims = {
            "HAS_SCALES": layer.scales is not None,
            "BLOCK_SIZE": layer.keys.shape[1],
            "NUM_KV_HEADS": num_kv_heads,
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
        }
        write_kv[(num_tokens,)](
            *(key, *key.stride()[:2], value, *value.stride()[:2], *pool),
            *(batch.positions, batch.token_blocks, batch.token_blocks.shape[1], layer.group),
            BLOCK_H=triton.next_power_of_2(num_kv_heads),
            **dims,
        )
        rows = _rows(batch, tile_m // group, window, self._largest_decode)
        output = query.new_empty(num_tokens, num_heads, value_dim)
        tables = batch.block_tables[layer.group]
        given = (query, *query.stride()[:2], *pool, tables, tables.stride(0))
        how = {"WINDOW": window, "SOFTCAP": softcap or 0.0, "GROUP": group, "BLOCK_N": tile_n}
        if len(rows.decodes):
            sums = query.new_empty(rows.num_chunks, num_heads, value_dim, dtype=torch.float32)
            maxima, totals = query.new_empty(2, rows.num_chunks, num_heads, dtype=torch.float32).unbind()
            decode_chunk[(len(rows.decodes), num_kv_heads, rows.most_chunks)](
                *(*given, rows.decodes, sums, maxima, totals, scaling),
                CHUNK=CHUNK,
                BLOCK_M=max(16, triton.next_power_of_2(group)),
                num_stages=DECODE_STAGES,
                **how,
                **dims,
            )
            merge_chunks[(len(rows.decodes), num_heads)](
                *(sums, maxima, totals, rows.decodes, output),
                WINDOW=window,
                CHUNK=CHUNK,
                NUM_HEADS=num_heads,
                VALUE_DIM=value_dim,
                BLOCK_DV=block_dv,
            )
        if len(rows.tiles):
            prefill[(len(rows.tiles), num_kv_heads)](
                *(*given, rows.tiles, output, scaling),
                BLOCK_M=tile_m,
                num_warps=8,
                num_stages=PREFILL_STAGES,
                **how,
                **dims,
            )
        return output


def _decodes(
    starts: Tensor, decoded: Tensor, ends: Tensor, window: int, most_chunks: int | None
) -> tuple[Tensor, int, int]:
    """Return the decode rows as in `Rows`, on the host, and the chunks of all of them and of one. `decoded` [B] are their
    numbers among the rows, `ends` [B] their lengths."""
    first_chunks = (ends - window).clamp_(min=0) // CHUNK if window else 0
    chunks = (ends - 1) // CHUNK - first_chunks + 1
    if most_chunks is not None:
        chunks = torch.full_like(chunks, min(most_chunks, window // CHUNK + 2) if window else most_chunks)
    rows = torch.stack((decoded, starts[decoded], ends, chunks.cumsum(0) - chunks), 1).int()
    return rows, int(chunks.sum()), max(chunks.tolist(), default=0)


def _rows(batch: StepBatch, tile_size: int, window: int, largest_decode: int) -> Rows:
    """Return the step's rows on the device; those of more than `largest_decode` tokens in tiles of `tile_size`. The first
    layer of a step that needs them copies them, without waiting for the device."""
    kind = (TritonAttention, tile_size, window)
    if kind not in batch.derived:
        starts, lengths = torch.tensor(batch.query_starts), torch.tensor(batch.kv_lens)
        counts = starts.diff()
        decoded = (counts <= largest_decode).nonzero().squeeze(1)
        decodes, num_chunks, most_chunks = _decodes(starts, decoded, lengths[decoded], window, batch.chunks_of_decodes)
        tiles = [
            (row, first, min(tile_size, batch.query_starts[row + 1] - first), first - offset)
            for row in (counts > largest_decode).nonzero().squeeze(1).tolist()
            for offset in [batch.query_starts[row + 1] - batch.kv_lens[row]]
            for first in range(batch.query_starts[row], batch.query_starts[row + 1], tile_size)
        ]
        device = batch.block_tables.device
        on_host = torch.empty(len(tiles) + len(decoded), 4, dtype=torch.int32, pin_memory=device.type == "cuda")
        on_host[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32).view(-1, 4)
        on_host[len(tiles) :] = decodes
        on_device = on_host.to(device, non_blocking=True)
        batch.derived[kind] = Rows(on_device[: len(tiles)], on_device[len(tiles) :], num_chunks, most_chunks)
    rows: Rows = batch.derived[kind]
    return rows
