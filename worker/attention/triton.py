"""Attention in Triton, straight from the pool: four launches per layer, however many rows a step has, and one per step and
sliding window.

A decode row is cut into chunks of CHUNK positions, which are merged in order. A chunk here is a part of a decode row's keys,
not of a prompt; the compiled kernels call it a span. Other rows are cut into tiles of tokens. The cuts depend on the row
alone, so the result of a row does not depend on the other rows of its step. A program computes all query heads of one key
head, so it reads the keys and values once for them.

Shapes: T tokens of the step, B decode rows, M tiles of the other rows, P chunks of all decode rows or space for more, Hq
query heads, Hkv key and value heads, D size of a key head, Dv size of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from millrace.worker.attention.paged_triton import cut_decodes, decode_chunks, merge_chunks, prefill
from millrace.worker.attention.write_triton import rotate_and_write, write_kv
from millrace.worker.input_batch import HostBatch, StepBatch
from millrace.worker.kv_pool import FP8, LayerCache
from millrace.worker.launch_triton import capability, launch_options
from millrace.worker.transfer import FixedBuffer, staging

CHUNK = 256
"""Positions of a decode row that one program attends to. A multiple of the tiles' sizes."""
CHUNKS_AT_ONCE = 8
"""Chunks of a row whose results are loaded together when they are merged. One after the other, each waits for the memory."""
HEADS_AT_ONCE = 8
"""Heads of one token that one program rotates or writes."""
REGISTERS, PARTS = 65536, 4
"""Registers of one multiprocessor of any NVIDIA GPU that the kernels run on, and the parts that share them out. A warp runs
in one part."""
WIDE = {torch.float32: 64, torch.float16: 128, torch.bfloat16: 128}
"""Elements of a head above which the tiles are half as large, so that they fit into registers and shared memory."""
NARROW = 64
"""Elements of a head of 16 bits up to which decode rows have tiles of their own."""


class Tiles(NamedTuple):
    """How a kernel reads keys and values. Sizes are those of 16 bits. float32 has half of them: its products are not the
    tensor cores', and larger ones take long to compile."""

    num_positions: int
    num_warps: int
    num_stages: int
    """Of the pipeline that reads the tiles. With 3, the block numbers of the next tile are loaded ahead; with 5, its keys
    and values too."""
    num_queries: int = 16
    """Rows of a tile of queries, each of a token and a head. Decode rows take as few as there are."""
    max_registers: int | None = None
    """Of a thread, so that enough programs fit onto a multiprocessor."""


DECODE = Tiles(num_positions=64, num_warps=2, num_stages=3)
"""Four programs on a multiprocessor hide each other's waits better than one hides its own with a longer pipeline. With more
warps there is more arithmetic: each computes the same addresses."""
DECODE_NARROW = Tiles(num_positions=64, num_warps=2, num_stages=3, max_registers=128)
"""Eight smaller programs do it better still where a position has few bytes."""
DECODE_FP8 = Tiles(num_positions=64, num_warps=2, num_stages=2)
"""Arithmetic bounds it."""
DECODE_OTHERS = Tiles(num_positions=64, num_warps=4, num_stages=3)
"""For float32, and for more query heads of a key head than a tile has rows: two warps have too few registers for them."""
PREFILL = Tiles(num_positions=64, num_warps=8, num_stages=5, num_queries=128)
"""One program fills a multiprocessor's registers, so nothing else hides its loads."""
SMALL_SHARED, SMALL_STAGES = 100 << 10, 3
"""Shared memory of a multiprocessor of GPUs that are not made for data centers, and the most stages of `prefill` there."""
TENSOR_MEMORY = range(100, 120)
"""Ten times the compute capabilities of GPUs whose products Triton 3.7 cannot put into a pipeline where instructions of ours
(`as_numbers`) make their numbers."""


@dataclass(frozen=True)
class Rows:
    """The rows of a step on the device, cut for one sliding window. All layers that have it share them."""

    tiles: Tensor  # [M, 4] int32: row, first token, tokens, position of the first token
    decodes: Tensor  # [B, 4] int32: row, token, length, its first chunk
    chunks: Tensor  # [P, 4] int32: row, token, length, first position
    num_chunks: Tensor  # [1] int32
    window: int
    tile_size: int
    buffer: FixedBuffer | None = None
    """In a graph that also has rows of several tokens: tiles and decodes, which the host lists for each step."""

    def cut(self, positions: Tensor) -> None:
        """Cut the decode rows, whose lengths follow from the positions of their tokens [1, T]."""
        if len(self.decodes):
            given = (positions, self.decodes, self.chunks, self.num_chunks)
            cut_decodes[(len(self.decodes),)](*given, WINDOW=self.window, CHUNK=CHUNK, BLOCK=128)


class TritonAttention:
    """Computes float32, bfloat16 and float16 with heads of up to `MAX_HEAD_SIZE` elements (`select.py`), from a pool in any
    of these or in fp8."""

    name = "triton"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        """`batch_invariant`: a token has the same bits in a decode row and in any chunk. Long decode rows are slower: each
        is one tile."""
        self.tiles_decodes = batch_invariant
        """Whether decode rows are cut into tiles too."""
        self._largest_decode = 0 if batch_invariant else 1
        self._num_programs: dict[Any, int] = {}
        """By kind of layer: the programs of `decode_chunks` that run at once."""

    def num_tiled(self, rows: HostBatch) -> int:
        """Return how many rows of a step are cut into tiles."""
        return sum(end - start > self._largest_decode for start, end in pairwise(rows.query_starts))

    def fill(self, batch: StepBatch, rows: HostBatch) -> None:
        """Copy the cut rows of a step to a batch whose tensors stay, if it has space for rows of several tokens."""
        for each in batch.derived.values():
            if each.buffer is None:
                continue
            tiles, decodes = _cut(rows.query_starts, rows.kv_lens, each.tile_size, self._largest_decode)
            with each.buffer.filling() as (listed,):
                listed[: len(tiles)] = tiles
                listed = listed[len(each.tiles) :]
                listed[: len(decodes), :2], listed[len(decodes) :, 1] = decodes, -1  # no token

    def update(self, batch: StepBatch) -> None:
        """Cut the decode rows of a batch whose tensors stay. All is done on the device, so it can be part of a graph."""
        for rows in batch.derived.values():
            rows.cut(batch.positions)
            if rows.buffer is None and len(rows.tiles):  # each is one token, since the rows decode
                rows.tiles[:, 3] = batch.positions[0]

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
        query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
        num_kv_heads, num_tokens, key_dim = key.shape
        self._cut_rows(query.dtype, len(query), layer, sliding_window, batch)
        write_kv[(num_tokens,)](
            *(key, *key.stride()[:2], value, *value.stride()[:2], *_pool(layer)),
            *(batch.positions, batch.token_blocks, batch.token_blocks.shape[1], layer.group),
            HAS_SCALES=layer.scales is not None,
            BLOCK_SIZE=batch.block_size,
            NUM_KV_HEADS=num_kv_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value.shape[2],
            BLOCK_H=triton.next_power_of_2(num_kv_heads),
            BLOCK_D=_padded(key_dim),
            BLOCK_DV=_padded(value.shape[2]),
            **launch_options(),
        )
        return self.attend(query, layer, scaling, sliding_window, softcap, batch, sinks)

    def forward_projected(
        self,
        projected: Tensor,  # [T, (Hq + 2 Hkv) * D], the queries, the keys, the values, each by heads
        tables: tuple[Tensor, Tensor],  # cosines and sines, float32 [positions, rotary size / 2]
        norms: tuple[Tensor, Tensor] | None,  # weights of RMSNorm for queries and for keys, float32 [D]
        epsilon: float,
        num_heads: int,
        layer: LayerCache,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        batch: StepBatch,
        sinks: Tensor | None = None,  # [Hq]
    ) -> Tensor:  # [T, Hq, D]
        """Do what `rows_torch.norm_and_rotate` and `forward` do, with one launch less."""
        num_tokens, (num_kv_heads, dim), half = len(projected), layer.keys.shape[2:], tables[0].shape[1]
        self._cut_rows(projected.dtype, num_heads, layer, sliding_window, batch)
        queries = projected.new_empty(num_tokens, num_heads, dim)
        rotate_and_write[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS_AT_ONCE))](
            *(projected, projected.stride(0), *tables, *(norms or tables), epsilon, queries, *_pool(layer)),
            *(batch.positions, batch.token_blocks, batch.token_blocks.shape[1], layer.group),
            HALF=half,
            HAS_NORMS=norms is not None,
            HAS_SCALES=layer.scales is not None,
            BLOCK_SIZE=batch.block_size,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            DIM=dim,
            BLOCK_H=HEADS_AT_ONCE,
            BLOCK_D=_padded(dim),
            **launch_options(),
        )
        return self.attend(queries.transpose(0, 1), layer, scaling, sliding_window, softcap, batch, sinks)

    def attend(
        self,
        query: Tensor,
        layer: LayerCache,
        scaling: float,
        window: int | None,
        softcap: float | None,
        batch: StepBatch,
        sinks: Tensor | None = None,  # [Hq]
    ) -> Tensor:  # [Hq, T, D] -> [T, Hq, Dv]
        """Attend to the pool, where the step's own keys and values are already, with rows that are cut already."""
        num_heads, num_tokens, key_dim = query.shape
        num_kv_heads, value_dim = layer.values.shape[2:]
        group, block_d, block_dv = num_heads // num_kv_heads, _padded(key_dim), _padded(value_dim)
        divisor = _divisor(query.dtype, layer)
        rows = self._cut_rows(query.dtype, num_heads, layer, window, batch)
        decode = _decode_tiles(query.dtype, layer, group)
        is_widened = query.dtype == torch.float32 != layer.keys.dtype  # a pipeline needs more registers than there are
        decode_stages = 1 if is_widened else decode.num_stages
        prefill_stages = 1 if is_widened else _prefill_stages(layer, query.device)
        output = query.new_empty(num_tokens, num_heads, value_dim)
        tables = batch.block_tables[layer.group]
        given = (query, *query.stride()[:2], *_pool(layer), tables, tables.stride(0))
        how = {
            "WINDOW": rows.window,
            "SOFTCAP": softcap or 0.0,
            "HAS_SCALES": layer.scales is not None,
            "BLOCK_SIZE": batch.block_size,
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": group,
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
            **launch_options(),
        }
        if len(rows.decodes):
            how_decoded = how | {
                "BLOCK_M": max(decode.num_queries, triton.next_power_of_2(group)),
                "BLOCK_N": decode.num_positions // divisor,
                "num_warps": decode.num_warps,
                "num_stages": decode_stages,
                "maxnreg": decode.max_registers,
            }
            self._decode(rows, given, scaling, how_decoded, output, sinks)
        if len(rows.tiles):
            prefill[(len(rows.tiles), num_kv_heads)](
                *(*given, rows.tiles, output, scaling, sinks),
                HAS_SINKS=sinks is not None,
                BLOCK_M=_num_queries(query.dtype, num_heads, layer),
                BLOCK_N=PREFILL.num_positions // divisor,
                num_warps=PREFILL.num_warps,
                num_stages=prefill_stages,
                **how,
            )
        return output

    def _cut_rows(
        self, dtype: torch.dtype, num_heads: int, layer: LayerCache, window: int | None, batch: StepBatch
    ) -> Rows:
        """Return the step's rows for queries of this type. The first layer of a step that needs them cuts them: before its
        kernel that writes to the pool, since the kernels behind that one load them before they wait for it."""
        tile_size = _num_queries(dtype, num_heads, layer) * layer.keys.shape[2] // num_heads
        return _rows(batch, tile_size, window or 0, self._largest_decode)

    def _decode(
        self,
        rows: Rows,
        given: tuple[Any, ...],
        scaling: float,
        how: dict[str, Any],
        output: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """Attend with the decode rows. given, how: what `decode_chunks` has in common with `prefill`."""
        num_chunks, (_, num_heads, value_dim) = len(rows.chunks), output.shape
        sums = output.new_empty(num_chunks, num_heads, value_dim, dtype=torch.float32)
        maxima, totals = output.new_empty(2, num_chunks, num_heads, dtype=torch.float32).unbind()
        query, keys = given[0], given[3]
        kind = (query.dtype, keys.dtype, *how.values())
        num_programs = self._num_programs.get(kind, 128)  # any number gives the same result
        kernel = decode_chunks[(min(num_programs, num_chunks * how["NUM_KV_HEADS"]),)](
            *(*given, rows.chunks, rows.num_chunks, sums, maxima, totals, scaling),
            CHUNK=CHUNK,
            **how,
        )
        if kind not in self._num_programs:
            self._num_programs[kind] = _num_resident(kernel, output.device)
        merge_chunks[(len(rows.decodes), num_heads)](
            *(sums, maxima, totals, rows.decodes, output, sinks),
            HAS_SINKS=sinks is not None,
            WINDOW=rows.window,
            CHUNK=CHUNK,
            NUM_HEADS=num_heads,
            VALUE_DIM=value_dim,
            BLOCK_DV=how["BLOCK_DV"],
            AT_ONCE=CHUNKS_AT_ONCE,
            num_warps=1,
            **launch_options(),
        )


def _pool(layer: LayerCache) -> tuple[Any, ...]:
    """Return the arguments of a kernel that stand for the pool."""
    key_scales, value_scales = layer.scales or (layer.keys, layer.values)  # of no use without scales
    return layer.keys, key_scales, layer.keys.stride(0), layer.values, value_scales, layer.values.stride(0)


def _decode_tiles(dtype: torch.dtype, layer: LayerCache, group: int) -> Tiles:
    """Return the tiles for queries of this type, `group` heads for each key head."""
    if dtype == torch.float32 or layer.keys.dtype not in (dtype, FP8) or group > DECODE.num_queries:
        return DECODE_OTHERS
    if layer.scales is not None:
        return DECODE_FP8
    return DECODE_NARROW if _width(layer) <= NARROW else DECODE


def _divisor(dtype: torch.dtype, layer: LayerCache) -> int:
    """Return how much smaller than those of 16 bits the tiles are."""
    return (2 if dtype == torch.float32 else 1) * (2 if _width(layer) > WIDE[dtype] else 1)


def _width(layer: LayerCache) -> int:
    """Return the entries of the longest head in a tile."""
    return max(_padded(layer.keys.shape[3]), _padded(layer.values.shape[3]))


def _num_queries(dtype: torch.dtype, num_heads: int, layer: LayerCache) -> int:
    """Return the queries of a tile of `prefill`."""
    group = num_heads // layer.keys.shape[2]
    return max(PREFILL.num_queries // _divisor(dtype, layer), triton.next_power_of_2(group))


def _padded(size: int) -> int:
    """Return the entries of a head in a tile."""
    return max(16, int(triton.next_power_of_2(size)))


def _prefill_stages(layer: LayerCache, device: torch.device) -> int:
    is_small = (
        device.type == "cuda"
        and torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor <= SMALL_SHARED
    )
    is_wide = _width(layer) > WIDE[torch.float16]
    if layer.scales is not None and (capability() in TENSOR_MEMORY or (is_small and is_wide)):
        return 1
    return min(PREFILL.num_stages, SMALL_STAGES) if is_small else PREFILL.num_stages


def _num_resident(kernel: Any, device: torch.device) -> int:
    """Return how many programs of a compiled kernel run at once."""
    if device.type == "cpu":
        return 3
    properties, kind = torch.cuda.get_device_properties(device), kernel.metadata
    shared = properties.shared_memory_per_multiprocessor
    return int(properties.multi_processor_count) * num_together(kernel.n_regs, kind.num_warps, kind.shared, shared)


def num_together(num_registers: int, num_warps: int, num_bytes: int, shared_memory: int) -> int:
    """Return how many programs of so many registers for each thread, and bytes of shared memory, a multiprocessor runs. It
    gives registers by 8 to a thread, and takes 1 KiB of shared memory for each program (NVIDIA, CUDA C++ Programming
    Guide)."""
    registers_of_warp = 32 * (-(-num_registers // 8) * 8)
    by_registers = PARTS * (REGISTERS // PARTS // registers_of_warp) // num_warps
    return max(1, min(by_registers, shared_memory // (num_bytes + 1024)))


def _rows(batch: StepBatch, tile_size: int, window: int, largest_decode: int) -> Rows:
    """Return the step's rows on the device; those of more than `largest_decode` tokens in tiles of `tile_size`. The first
    layer of a step that needs them copies and cuts them, without waiting for the device."""
    kind = (TritonAttention, tile_size, window)
    if kind not in batch.derived:
        device, buffer, most = batch.block_tables.device, None, batch.space_for_chunks
        if batch.space_for_tiled is None:
            tiles, decodes = _cut(batch.query_starts, batch.kv_lens, tile_size, largest_decode)
            num_tiles, num_decodes = len(tiles), len(decodes)
            on_host = staging(device, (num_tiles + num_decodes, 4), torch.int32)
            on_host[:num_tiles], on_host[num_tiles:, :2] = tiles, decodes
            listed = on_host.to(device, non_blocking=True)
            if most is None:
                kv_lens = torch.tensor(batch.kv_lens, dtype=torch.int64, device="cpu")
                most = _count_chunks(kv_lens[decodes[:, 0]], window)
        else:
            num_tiles = -(-batch.positions.shape[1] // tile_size) + batch.space_for_tiled
            num_decodes = batch.num_rows if largest_decode else 0
            buffer = FixedBuffer(device, [((num_tiles + num_decodes, 4), torch.int32)])
            (listed,) = buffer.tensors
        if window and batch.space_for_chunks is not None:
            most = min(batch.space_for_chunks, num_decodes * (window // CHUNK + 2))
        assert most is not None
        chunks, num_chunks = listed.new_empty(most, 4), listed.new_empty(1)
        rows = Rows(listed[:num_tiles], listed[num_tiles:], chunks, num_chunks, window, tile_size, buffer)
        rows.cut(batch.positions)
        batch.derived[kind] = rows
    found: Rows = batch.derived[kind]
    return found


def _cut(query_starts: list[int], kv_lens: list[int], tile_size: int, largest_decode: int) -> tuple[Tensor, Tensor]:
    """Return the tiles [M, 4], and rows and tokens of the decode rows [B, 2], both int32."""
    starts = torch.tensor(query_starts, dtype=torch.int64, device="cpu")
    counts = starts.diff()
    decoded = (counts <= largest_decode).nonzero().squeeze(1)
    tiles = [
        (row, first, min(tile_size, query_starts[row + 1] - first), first - offset)
        for row in (counts > largest_decode).nonzero().squeeze(1).tolist()
        for offset in [query_starts[row + 1] - kv_lens[row]]
        for first in range(query_starts[row], query_starts[row + 1], tile_size)
    ]
    decodes = torch.stack([decoded, starts[decoded]], dim=1).int()
    return torch.tensor(tiles, dtype=torch.int32, device="cpu").view(-1, 4), decodes


def _count_chunks(lengths: Tensor, window: int) -> int:
    """Return how many chunks decode rows of these lengths [B] have."""
    first = (lengths - window).clamp_(min=0) // CHUNK if window else 0
    return int(((lengths - 1) // CHUNK - first + 1).sum())
