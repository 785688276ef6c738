"""Triton kernels of paged attention. `millrace.worker.attention.triton` launches them, and `write_triton.py` describes the
places of the pool.

Slots without a token may hold NaN, so they are never loaded. Scores are in base 2: exp2 is faster than exp.

Numbers that change from step to step are not specialized on, or a kernel would be compiled again while a service runs.
Those of a model are constants, so are KEYS_STRIDE and VALUES_STRIDE, the entries of a block of the pool: they make a quarter
of the loop's instructions unnecessary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from millrace.worker.attention.write_triton import locate
from millrace.worker.launch_triton import LINE_BYTES, prefetch, wait_for_earlier_kernels

IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
LARGEST_FLOAT16 = tl.constexpr(65504.0)
KEEPS_NAN = tl.constexpr(tl.PropagateNan.ALL)
LOG2_E = tl.constexpr(1.4426950408889634)
UNITS_AT_ONCE = tl.constexpr(32)
"""Units of a program of `decode_chunks` whose tiles are counted together."""
RAISED = tl.constexpr(512.0)
"""What the scales of fp8 values are multiplied with in sums: a weight times a scale can be too small for float16."""


@triton.jit
def as_numbers(tile, dtype: tl.constexpr):
    """Return a tile of the pool in another type.

    Products of fp8 are computed in float16, which holds its numbers, and which one instruction makes of two of them. It
    counts as impure, or the compiler would move it behind the exchange between threads, which then loads single bytes."""
    if IS_COMPILED and tile.dtype == tl.float8e4nv and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r", [tile], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    return tile.to(dtype)


@triton.jit
def load_queries(
    query, query_head_stride, query_token_stride, first_token, count, kv_head, HAS_SCALES: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the query heads of one key head, of some tokens of a row."""
    members, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens, heads = first_token + members // GROUP, (kv_head * GROUP + members % GROUP).to(tl.int64)
    queries = tl.load(
        query + (tokens * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :],
        (members < count * GROUP)[:, None] & (dims[None, :] < KEY_DIM), other=0.0,
    )  # fmt: skip
    if HAS_SCALES and queries.dtype == tl.bfloat16:
        queries = tl.clamp(queries.to(tl.float32), -LARGEST_FLOAT16, LARGEST_FLOAT16, KEEPS_NAN).to(tl.float16)
    return queries


@triton.jit
def attend_tile(
    maximum, total, weighted, queries, query_positions, kv_head, start, first, end,
    keys, key_scales, values, value_scales, table, scaling,
    KEYS_STRIDE: tl.constexpr, VALUES_STRIDE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Attend to BLOCK_N positions from `start` on, of those from `first` to `end`.

    Return for each query the largest score, the sum of the weights, and the weighted values, with those so far."""
    dims, value_dims, columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_N)
    positions = start + columns
    is_loaded = positions < end
    if WINDOW > 0:  # otherwise tiles begin at `first`; the comparison is a twelfth of the instructions
        is_loaded = is_loaded & (positions >= first)
    is_visible = is_loaded[None, :] & (positions[None, :] <= query_positions[:, None])
    if WINDOW > 0:
        is_visible = is_visible & (positions[None, :] > query_positions[:, None] - WINDOW)
    if BLOCK_N % BLOCK_SIZE == 0:  # the same numbers, with less arithmetic, and each is loaded once
        numbers = tl.arange(0, BLOCK_N // BLOCK_SIZE)
        is_needed = start + numbers * BLOCK_SIZE < end
        if WINDOW > 0:
            is_needed = is_needed & (start + (numbers + 1) * BLOCK_SIZE > first)
        blocks = tl.load(table + start // BLOCK_SIZE + numbers, is_needed, other=0)
        blocks = tl.broadcast_to(blocks[:, None], [BLOCK_N // BLOCK_SIZE, BLOCK_SIZE]).reshape([BLOCK_N])
        places = columns % BLOCK_SIZE * NUM_KV_HEADS
    else:
        blocks = tl.load(table + positions // BLOCK_SIZE, is_loaded, other=0)
        places = positions % BLOCK_SIZE * NUM_KV_HEADS
    tile_keys = tl.load(
        locate(keys + kv_head * KEY_DIM, blocks[None, :], places[None, :], dims[:, None], KEYS_STRIDE, KEY_DIM),
        is_loaded[None, :] & (dims[:, None] < KEY_DIM), other=0.0,
    )  # fmt: skip
    scores = tl.dot(queries, as_numbers(tile_keys, queries.dtype), input_precision="ieee")
    scores *= scaling if SOFTCAP > 0 else scaling * LOG2_E
    if HAS_SCALES:
        scales = tl.load(locate(key_scales, blocks, places, kv_head, KEYS_STRIDE // 4, 1), is_loaded, other=0.0)
        scores = scores * scales[None, :]
    if SOFTCAP > 0:
        # tanh, which is not in every Triton
        scores = (SOFTCAP * LOG2_E) * (1 - 2 / (tl.exp(scores * (2 / SOFTCAP)) + 1))
    scores = tl.where(is_visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # no position so far: -inf - -inf is NaN
    weights = tl.exp2(scores - shift[:, None])
    old_weight = tl.exp2(maximum - shift)
    tile_values = tl.load(
        locate(
            values + kv_head * VALUE_DIM, blocks[:, None], places[:, None], value_dims[None, :], VALUES_STRIDE, VALUE_DIM
        ),
        is_loaded[:, None] & (value_dims[None, :] < VALUE_DIM), other=0.0,
    )  # fmt: skip
    total = total * old_weight + tl.sum(weights, 1)
    if HAS_SCALES:  # cheaper than to scale the values
        scales = tl.load(locate(value_scales, blocks, places, kv_head, VALUES_STRIDE // 4, 1), is_loaded, other=0.0)
        weights = weights * (scales * RAISED)[None, :]
        if queries.dtype == tl.float16:
            weights = tl.minimum(weights, LARGEST_FLOAT16, KEEPS_NAN)
    weighted = weighted * old_weight[:, None] + tl.dot(
        weights.to(queries.dtype), as_numbers(tile_values, queries.dtype), input_precision="ieee"
    )
    return new_maximum, total, weighted


@triton.jit
def chunks_of(kv_len, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the number of the first chunk that a decode row attends to, and how many it attends to."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(kv_len - WINDOW, 0) // CHUNK
    return first, (kv_len + CHUNK - 1) // CHUNK - first


@triton.jit(do_not_specialize_on_alignment=["positions", "rows", "chunks"])
def cut_decodes(
    positions, rows, chunks, num_chunks, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Cut decode rows into chunks of positions: fill in the lengths and first chunks of `rows` [B, 4], see `merge_chunks`,
    and store the chunks [P, 4] and their number. A row whose token is -1 has none. Grid: decode rows."""
    index, members = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)  # the chunks of the rows before this one
    for start in range(0, index, BLOCK):
        is_before = start + members < index
        tokens = tl.load(rows + 4 * (start + members) + 1, is_before, other=-1)
        _, counts = chunks_of(tl.load(positions + tokens, tokens >= 0, other=-1).to(tl.int32) + 1, WINDOW, CHUNK)
        before += counts
    own = tl.sum(before, 0)
    rows += 4 * index
    row, token = tl.load(rows), tl.load(rows + 1)
    kv_len = tl.load(positions + token, token >= 0, other=-1).to(tl.int32) + 1
    first, count = chunks_of(kv_len, WINDOW, CHUNK)
    tl.store(rows + 2, kv_len)
    tl.store(rows + 3, own)
    for start in range(0, count, BLOCK):
        is_own = start + members < count
        places = chunks + 4 * (own + start + members)
        tl.store(places, row, is_own)
        tl.store(places + 1, token, is_own)
        tl.store(places + 2, kv_len, is_own)
        tl.store(places + 3, (first + start + members) * CHUNK, is_own)
    if index == tl.num_programs(0) - 1:
        tl.store(num_chunks, own + count)


@triton.jit
def find_unit(chunks, unit, num_units, NUM_KV_HEADS: tl.constexpr):
    """Return row, token, length and first position of a unit's chunk, or of some units' chunks. 0 behind the last unit."""
    own, exists = chunks + 4 * (unit // NUM_KV_HEADS), unit < num_units
    row, token = tl.load(own, exists, other=0).to(tl.int64), tl.load(own + 1, exists, other=0).to(tl.int64)
    return row, token, tl.load(own + 2, exists, other=0), tl.load(own + 3, exists, other=0)


@triton.jit
def tiles_of(begin, kv_len, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return how many tiles a chunk from `begin` on has, of a row of this length."""
    return tl.cdiv(tl.minimum(kv_len - begin, CHUNK), BLOCK_N)


@triton.jit
def prefetch_tile(
    kv_head, begin, kv_len, keys, values, table,
    KEYS_STRIDE: tl.constexpr, VALUES_STRIDE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fetch the first tile of a chunk into the L2 cache while the kernel ahead runs. What that one writes to the tile gets
    there too."""
    positions = begin + tl.arange(0, BLOCK_N)
    is_needed = positions < kv_len
    if WINDOW > 0:
        is_needed = is_needed & (positions >= kv_len - WINDOW)
    blocks = tl.load(table + positions // BLOCK_SIZE, is_needed, other=0)
    places = positions % BLOCK_SIZE * NUM_KV_HEADS
    line: tl.constexpr = LINE_BYTES // (keys.dtype.element_ty.primitive_bitwidth // 8)
    for entry in tl.static_range(0, KEY_DIM, line):
        prefetch(locate(keys + kv_head * KEY_DIM, blocks, places, entry, KEYS_STRIDE, KEY_DIM))
    for entry in tl.static_range(0, VALUE_DIM, line):
        prefetch(locate(values + kv_head * VALUE_DIM, blocks, places, entry, VALUES_STRIDE, VALUE_DIM))


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "chunks", "maxima", "totals"])
def decode_chunks(
    query, query_head_stride, query_token_stride,
    keys, key_scales, KEYS_STRIDE: tl.constexpr, values, value_scales, VALUES_STRIDE: tl.constexpr,
    tables, table_stride, chunks, num_chunks, sums, maxima, totals, scaling,
    CHUNK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend to the chunks of all decode rows. chunks: row, token, length, first position.

    Grid: any number of programs. They share out the key heads of the chunks; those of one chunk are read at the same time,
    since they lie side by side in the pool. Only so many programs work that all have the same number of them: otherwise
    the few that have one more would work alone at the end, which takes more than one of four units' time."""
    # The step cuts its rows before the first layer writes to the pool, so what is loaded here is there already.
    num_units = tl.load(num_chunks) * NUM_KV_HEADS
    num_rounds = tl.maximum(tl.cdiv(num_units, tl.num_programs(0)), 1)
    num_working = tl.maximum(tl.cdiv(num_units, num_rounds), 1)  # there is none in a graph of padding alone
    own_first = tl.where(tl.program_id(0) < num_working, tl.program_id(0), num_units)
    num_tiles = 0
    for start in range(own_first, num_units, num_working * UNITS_AT_ONCE):
        units = start + num_working * tl.arange(0, UNITS_AT_ONCE)
        _rows, _tokens, lengths, begins = find_unit(chunks, units, num_units, NUM_KV_HEADS)
        num_tiles += tl.sum(tiles_of(begins, lengths, CHUNK, BLOCK_N), 0)
    unit, tile = own_first, 0
    row, token, kv_len, begin = find_unit(chunks, unit, num_units, NUM_KV_HEADS)
    next_row, next_token, next_len, next_begin = find_unit(chunks, unit + num_working, num_units, NUM_KV_HEADS)
    if IS_DEPENDENT:
        prefetch_tile(
            unit % NUM_KV_HEADS, begin, kv_len, keys, values, tables + row * table_stride,
            KEYS_STRIDE, VALUES_STRIDE, WINDOW, BLOCK_SIZE, NUM_KV_HEADS, KEY_DIM, VALUE_DIM, BLOCK_N,
        )  # fmt: skip
    wait_for_earlier_kernels(IS_DEPENDENT)
    members, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DV)
    is_member = members < GROUP
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # One loop over the tiles of all units, or the pipeline that reads them would be empty at the begin of each unit.
    for _ in tl.range(0, num_tiles, disable_licm=True):
        last_row, last_token, last_len, last_begin = find_unit(chunks, unit + 2 * num_working, num_units, NUM_KV_HEADS)
        kv_head, first = unit % NUM_KV_HEADS, begin
        if WINDOW > 0:
            first = tl.maximum(first, kv_len - WINDOW)
        queries = load_queries(
            query, query_head_stride, query_token_stride, token, 1, kv_head, HAS_SCALES, GROUP, KEY_DIM, BLOCK_M, BLOCK_D
        )  # fmt: skip
        is_begin, is_end = tile == 0, tile == tiles_of(begin, kv_len, CHUNK, BLOCK_N) - 1
        maximum, total = tl.where(is_begin, float("-inf"), maximum), tl.where(is_begin, 0.0, total)
        weighted = tl.where(is_begin, 0.0, weighted)
        maximum, total, weighted = attend_tile(
            maximum, total, weighted, queries, kv_len - 1 + 0 * members, kv_head, begin + tile * BLOCK_N, first,
            tl.minimum(begin + CHUNK, kv_len),
            keys, key_scales, values, value_scales, tables + row * table_stride, scaling,
            KEYS_STRIDE, VALUES_STRIDE, WINDOW, SOFTCAP, HAS_SCALES, BLOCK_SIZE,
            NUM_KV_HEADS, KEY_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        if is_end:
            parts = unit * GROUP + members.to(tl.int64)
            tl.store(maxima + parts, maximum, is_member)
            tl.store(totals + parts, total, is_member)
            results = weighted * (1 / RAISED) if HAS_SCALES else weighted
            is_stored = is_member[:, None] & (dims[None, :] < VALUE_DIM)
            tl.store(sums + parts[:, None] * VALUE_DIM + dims[None, :], results, is_stored)
        unit, tile = tl.where(is_end, unit + num_working, unit), tl.where(is_end, 0, tile + 1)
        row, token = tl.where(is_end, next_row, row), tl.where(is_end, next_token, token)
        kv_len, begin = tl.where(is_end, next_len, kv_len), tl.where(is_end, next_begin, begin)
        next_row, next_token = tl.where(is_end, last_row, next_row), tl.where(is_end, last_token, next_token)
        next_len, next_begin = tl.where(is_end, last_len, next_len), tl.where(is_end, last_begin, next_begin)


@triton.jit
def add_sinks(maximum, total, sinks):
    """Add the weights of sinks to totals. Return the factors of the weighted values, and the totals, for the larger one of
    both scores: with the other one an exponential may overflow."""
    scores = sinks.to(tl.float32) * LOG2_E
    largest = tl.maximum(maximum, scores)
    factor = tl.exp2(maximum - largest)
    return factor, total * factor + tl.exp2(scores - largest)


@triton.jit(do_not_specialize_on_alignment=["rows", "maxima", "totals", "sinks"])
def merge_chunks(
    sums, maxima, totals, rows, output, sinks, HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, AT_ONCE: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of a row, AT_ONCE of them at a time, the first ones first. Grid: decode rows, query heads. rows: row,
    token, length, first chunk among those of all rows."""
    rows += 4 * tl.program_id(0)
    head = tl.program_id(1)
    token, kv_len, part = tl.load(rows + 1).to(tl.int64), tl.load(rows + 2), tl.load(rows + 3).to(tl.int64)
    wait_for_earlier_kernels(IS_DEPENDENT)
    if kv_len == 0:
        return
    _, count = chunks_of(kv_len, WINDOW, CHUNK)
    dims, numbers = tl.arange(0, BLOCK_DV), tl.arange(0, AT_ONCE)
    maximum, total = float("-inf"), 0.0
    weighted = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(0, count, AT_ONCE):
        exists = first + numbers < count
        parts = (part + first + numbers) * NUM_HEADS + head
        chunk_maxima = tl.load(maxima + parts, exists, other=float("-inf"))
        is_loaded = exists[:, None] & (dims < VALUE_DIM)[None, :]
        chunk_sums = tl.load(sums + (parts * VALUE_DIM)[:, None] + dims[None, :], is_loaded, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(chunk_maxima, 0))
        old_weight, weights = tl.exp2(maximum - new_maximum), tl.exp2(chunk_maxima - new_maximum)
        total = total * old_weight + tl.sum(tl.load(totals + parts, exists, other=0.0) * weights, 0)
        weighted = weighted * old_weight + tl.sum(chunk_sums * weights[:, None], 0)
        maximum = new_maximum
    if HAS_SINKS:
        factor, total = add_sinks(maximum, total, tl.load(sinks + head))
        weighted = weighted * factor
    result = (weighted / total).to(output.dtype.element_ty)
    tl.store(output + (token * NUM_HEADS + head) * VALUE_DIM + dims, result, dims < VALUE_DIM)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "tiles", "sinks"])
def prefill(
    query, query_head_stride, query_token_stride,
    keys, key_scales, KEYS_STRIDE: tl.constexpr, values, value_scales, VALUES_STRIDE: tl.constexpr,
    tables, table_stride, tiles, output, scaling, sinks, HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend with some tokens of a row. Grid: tiles, key heads. tiles: row, first token, tokens, first position; all 0 where
    there is none."""
    tiles += 4 * tl.program_id(0)
    kv_head = tl.program_id(1)
    row, first_token = tl.load(tiles).to(tl.int64), tl.load(tiles + 1).to(tl.int64)
    count, first_position = tl.load(tiles + 2), tl.load(tiles + 3)
    wait_for_earlier_kernels(IS_DEPENDENT)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(first_position + 1 - WINDOW, 0)
    members, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DV)
    is_member = members < count * GROUP
    queries = load_queries(
        query, query_head_stride, query_token_stride, first_token, count, kv_head, HAS_SCALES, GROUP, KEY_DIM, BLOCK_M,
        BLOCK_D,
    )  # fmt: skip
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in range(first // BLOCK_N * BLOCK_N, first_position + count, BLOCK_N):
        maximum, total, weighted = attend_tile(
            maximum, total, weighted, queries, first_position + members // GROUP, kv_head, start, first,
            first_position + count,
            keys, key_scales, values, value_scales, tables + row * table_stride, scaling,
            KEYS_STRIDE, VALUES_STRIDE, WINDOW, SOFTCAP, HAS_SCALES, BLOCK_SIZE,
            NUM_KV_HEADS, KEY_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    if HAS_SCALES:
        weighted = weighted * (1 / RAISED)
    tokens, heads = first_token + members // GROUP, kv_head * GROUP + members % GROUP
    if HAS_SINKS:
        factor, total = add_sinks(maximum, total, tl.load(sinks + heads))
        weighted = weighted * factor[:, None]
    result = (weighted / tl.where(is_member, total, 1.0)[:, None]).to(output.dtype.element_ty)
    tl.store(
        output + ((tokens * NUM_KV_HEADS * GROUP + heads) * VALUE_DIM)[:, None] + dims[None, :], result,
        is_member[:, None] & (dims[None, :] < VALUE_DIM),
    )  # fmt: skip
