"""Triton kernels of paged attention. `millrace.worker.attention.triton` launches them.

Offsets into the pool are int64, since a pool has more than 2^31 elements. Slots without a token may hold NaN, so they are
never loaded. Scores are in base 2: exp2 is faster than exp.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_offset(block, offset, block_stride, token_stride):
    """Return the offset of a slot in a tensor of the pool, in elements."""
    return block.to(tl.int64) * block_stride + offset.to(tl.int64) * token_stride


@triton.jit
def write_kv(
    key, key_head_stride, key_token_stride,
    value, value_head_stride, value_token_stride,
    keys, keys_block_stride, keys_token_stride, keys_head_stride,
    values, values_block_stride, values_token_stride, values_head_stride,
    positions, token_blocks, num_groups, group,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Store the keys and values of one token. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(token_blocks + token * num_groups + group)
    offset = tl.load(positions + token) % BLOCK_SIZE
    heads = tl.arange(0, BLOCK_H)[:, None].to(tl.int64)
    dims, value_dims = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    is_key = (heads < NUM_KV_HEADS) & (dims < KEY_DIM)
    is_value = (heads < NUM_KV_HEADS) & (value_dims < VALUE_DIM)
    new_key = tl.load(key + token * key_token_stride + heads * key_head_stride + dims, is_key)
    new_value = tl.load(value + token * value_token_stride + heads * value_head_stride + value_dims, is_value)
    keys += slot_offset(block, offset, keys_block_stride, keys_token_stride)
    values += slot_offset(block, offset, values_block_stride, values_token_stride)
    tl.store(keys + heads * keys_head_stride + dims, new_key.to(keys.dtype.element_ty), is_key)
    tl.store(values + heads * values_head_stride + value_dims, new_value.to(values.dtype.element_ty), is_value)


@triton.jit
def attend_tile(
    queries, maximum, total, weighted, positions, is_visible, is_loaded,
    keys, keys_block_stride, keys_token_stride, values, values_block_stride, values_token_stride, table, scaling,
    SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add the positions of one tile to the running softmax of some queries."""
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    blocks = tl.load(table + positions // BLOCK_SIZE, is_loaded, other=0)
    offsets = positions % BLOCK_SIZE
    key_offsets = slot_offset(blocks, offsets, keys_block_stride, keys_token_stride)
    value_offsets = slot_offset(blocks, offsets, values_block_stride, values_token_stride)
    tile_keys = tl.load(
        keys + key_offsets[None, :] + dims[:, None], is_loaded[None, :] & (dims[:, None] < KEY_DIM), other=0.0
    ).to(queries.dtype)
    scores = tl.dot(queries, tile_keys, input_precision="ieee") * scaling
    if SOFTCAP > 0:
        scores = SOFTCAP * (1 - 2 / (tl.exp(scores * (2 / SOFTCAP)) + 1))  # tanh, which is not in every Triton
    scores = tl.where(is_visible, scores * 1.4426950408889634, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # no position so far: -inf - -inf is NaN
    weights = tl.exp2(scores - shift[:, None])
    old_weight = tl.exp2(maximum - shift)
    tile_values = tl.load(
        values + value_offsets[:, None] + value_dims[None, :],
        is_loaded[:, None] & (value_dims[None, :] < VALUE_DIM),
        other=0.0,
    ).to(queries.dtype)
    total = total * old_weight + tl.sum(weights, 1)
    weighted = weighted * old_weight[:, None] + tl.dot(weights.to(queries.dtype), tile_values, input_precision="ieee")
    return new_maximum, total, weighted


@triton.jit(do_not_specialize=["num_chunks"])
def decode_chunk(
    query, query_head_stride, query_token_stride,
    keys, keys_block_stride, keys_token_stride, keys_head_stride,
    values, values_block_stride, values_token_stride, values_head_stride,
    tables, table_stride, rows, sums, maxima, totals, num_chunks, scaling,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, CHUNK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Attend to one chunk of positions. Grid: decode rows, key heads, chunks. rows: row, token, length of each."""
    index, kv_head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, token = tl.load(rows + 3 * index).to(tl.int64), tl.load(rows + 3 * index + 1).to(tl.int64)
    kv_len = tl.load(rows + 3 * index + 2)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(kv_len - WINDOW, 0)
    begin = (first // CHUNK + chunk) * CHUNK
    if begin < kv_len:
        members, dims, value_dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        heads = (kv_head * GROUP + members).to(tl.int64)
        is_member = members < GROUP
        queries = tl.load(
            query + token * query_token_stride + heads[:, None] * query_head_stride + dims[None, :],
            is_member[:, None] & (dims[None, :] < KEY_DIM), other=0.0,
        )  # fmt: skip
        maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        weighted = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
        keys += kv_head.to(tl.int64) * keys_head_stride
        values += kv_head.to(tl.int64) * values_head_stride
        for start in range(begin, tl.minimum(begin + CHUNK, kv_len), BLOCK_N):
            positions = start + tl.arange(0, BLOCK_N)
            is_loaded = (positions >= first) & (positions < kv_len)
            maximum, total, weighted = attend_tile(
                queries, maximum, total, weighted, positions, is_loaded[None, :], is_loaded,
                keys, keys_block_stride, keys_token_stride, values, values_block_stride, values_token_stride,
                tables + row * table_stride, scaling, SOFTCAP, BLOCK_SIZE, KEY_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
        parts = (index.to(tl.int64) * NUM_HEADS + heads) * num_chunks + chunk
        tl.store(maxima + parts, maximum, is_member)
        tl.store(totals + parts, total, is_member)
        is_stored = is_member[:, None] & (value_dims[None, :] < VALUE_DIM)
        tl.store(sums + parts[:, None] * VALUE_DIM + value_dims[None, :], weighted, is_stored)


@triton.jit(do_not_specialize=["num_chunks"])
def merge_chunks(
    sums, maxima, totals, rows, output, num_chunks,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of a row, the first one first. Grid: decode rows, query heads."""
    index, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token, kv_len = tl.load(rows + 3 * index + 1).to(tl.int64), tl.load(rows + 3 * index + 2)
    first_chunk = 0
    if WINDOW > 0:
        first_chunk = tl.maximum(kv_len - WINDOW, 0) // CHUNK
    dims = tl.arange(0, BLOCK_DV)
    part = (index.to(tl.int64) * NUM_HEADS + head) * num_chunks
    maximum = tl.load(maxima + part)
    total = tl.load(totals + part)
    weighted = tl.load(sums + part * VALUE_DIM + dims, dims < VALUE_DIM, other=0.0)
    for chunk in range(1, (kv_len - 1) // CHUNK - first_chunk + 1):
        chunk_maximum = tl.load(maxima + part + chunk)
        new_maximum = tl.maximum(maximum, chunk_maximum)
        old_weight, weight = tl.exp2(maximum - new_maximum), tl.exp2(chunk_maximum - new_maximum)
        chunk_sums = tl.load(sums + (part + chunk) * VALUE_DIM + dims, dims < VALUE_DIM, other=0.0)
        total = total * old_weight + tl.load(totals + part + chunk) * weight
        weighted = weighted * old_weight + chunk_sums * weight
        maximum = new_maximum
    result = (weighted / total).to(output.dtype.element_ty)
    tl.store(output + (token * NUM_HEADS + head) * VALUE_DIM + dims, result, dims < VALUE_DIM)


@triton.jit
def prefill(
    query, query_head_stride, query_token_stride,
    keys, keys_block_stride, keys_token_stride, keys_head_stride,
    values, values_block_stride, values_token_stride, values_head_stride,
    tables, table_stride, tiles, output, scaling,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Attend with some tokens of a row. Grid: tiles, query heads. tiles: row, first token, tokens, first position."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, first_token = tl.load(tiles + 4 * tile).to(tl.int64), tl.load(tiles + 4 * tile + 1).to(tl.int64)
    count, first_position = tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    members, dims, value_dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    is_member = members < count
    tokens, query_positions = first_token + members, first_position + members
    queries = tl.load(
        query + tokens[:, None] * query_token_stride + head * query_head_stride + dims[None, :],
        is_member[:, None] & (dims[None, :] < KEY_DIM), other=0.0,
    )  # fmt: skip
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    keys += head // GROUP * keys_head_stride
    values += head // GROUP * values_head_stride
    first, end = 0, first_position + count
    if WINDOW > 0:
        first = tl.maximum(first_position + 1 - WINDOW, 0)
    for start in range(first // BLOCK_N * BLOCK_N, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        is_loaded = (positions >= first) & (positions < end)
        is_visible = is_loaded[None, :] & (positions[None, :] <= query_positions[:, None])
        if WINDOW > 0:
            is_visible = is_visible & (positions[None, :] > query_positions[:, None] - WINDOW)
        maximum, total, weighted = attend_tile(
            queries, maximum, total, weighted, positions, is_visible, is_loaded,
            keys, keys_block_stride, keys_token_stride, values, values_block_stride, values_token_stride,
            tables + row * table_stride, scaling, SOFTCAP, BLOCK_SIZE, KEY_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    result = (weighted / tl.where(is_member, total, 1.0)[:, None]).to(output.dtype.element_ty)
    tl.store(
        output + (tokens[:, None] * NUM_HEADS + head) * VALUE_DIM + value_dims[None, :], result,
        is_member[:, None] & (value_dims[None, :] < VALUE_DIM),
    )  # fmt: skip
