"""Triton kernels that write keys and values to the pool. `millrace.worker.attention.triton` launches them.

A slot of the pool holds the heads of a token one after the other, so its place follows from the sizes and the stride of a
block. Offsets into the pool are int64, since a pool has more than 2^31 elements.

Numbers that change from step to step are not specialized on, or a kernel would be compiled again while a service runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from millrace.worker.launch_triton import wait_for_earlier_kernels


@triton.jit
def locate(pool, block, place, entry, block_stride, place_stride):
    """Return the pointer to an entry of a place in a block of a tensor of the pool. A block has less than 2^31 entries."""
    return pool + block.to(tl.int64) * block_stride + (place * place_stride + entry)


@triton.jit
def store_heads(
    numbers, heads, pool, scales, block_stride, block, offset,
    HAS_SCALES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the keys or values of some heads of one token, see `LayerCache.write`. Heads that do not exist are left out."""
    dims, exists = tl.arange(0, BLOCK_D)[None, :], (heads >= 0) & (heads < NUM_KV_HEADS)
    places = offset * NUM_KV_HEADS + heads
    if HAS_SCALES:
        numbers = numbers.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(numbers), 1) * (1 / 448), 1e-30)
        numbers = tl.div_rn(numbers, scale[:, None] + tl.zeros_like(numbers))
        tl.store(locate(scales, block, places, 0, block_stride // 4, 1), scale, exists)
    pointers = locate(pool, block, places[:, None], dims, block_stride, DIM)
    tl.store(pointers, numbers.to(pool.dtype.element_ty), exists[:, None] & (dims < DIM))


@triton.jit
def write_heads(
    new, new_head_stride, pool, scales, block_stride, block, offset,
    HAS_SCALES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the keys or values of one token."""
    heads, dims = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)[None, :]
    is_stored = (heads[:, None] < NUM_KV_HEADS) & (dims < DIM)
    numbers = tl.load(new + heads[:, None].to(tl.int64) * new_head_stride + dims, is_stored, other=0.0)
    store_heads(
        numbers, heads, pool, scales, block_stride, block, offset, HAS_SCALES, NUM_KV_HEADS, DIM, BLOCK_D
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_groups", "group"], do_not_specialize_on_alignment=["positions", "token_blocks"]
)  # fmt: skip
def write_kv(
    key, key_head_stride, key_token_stride, value, value_head_stride, value_token_stride,
    keys, key_scales, keys_block_stride, values, value_scales, values_block_stride,
    positions, token_blocks, num_groups, group,
    HAS_SCALES: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Store the keys and values of one token. Grid: tokens."""
    wait_for_earlier_kernels(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(token_blocks + token * num_groups + group)
    offset = tl.load(positions + token) % BLOCK_SIZE
    write_heads(
        key + token * key_token_stride, key_head_stride, keys, key_scales, keys_block_stride, block, offset,
        HAS_SCALES, NUM_KV_HEADS, KEY_DIM, BLOCK_H, BLOCK_D,
    )  # fmt: skip
    write_heads(
        value + token * value_token_stride, value_head_stride, values, value_scales, values_block_stride, block, offset,
        HAS_SCALES, NUM_KV_HEADS, VALUE_DIM, BLOCK_H, BLOCK_DV,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_groups", "group"], do_not_specialize_on_alignment=["positions", "token_blocks"]
)  # fmt: skip
def rotate_and_write(
    projected, projected_stride, cosines, sines, query_norm, key_norm, epsilon, queries,
    keys, key_scales, keys_block_stride, values, value_scales, values_block_stride,
    positions, token_blocks, num_groups, group,
    HALF: tl.constexpr, HAS_NORMS: tl.constexpr, HAS_SCALES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Norm and rotate queries and keys of one token, as `rows_torch.norm_and_rotate` does, and store its keys and values.
    Grid: tokens, parts of BLOCK_H heads: first those of queries, then of keys, then of values."""
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    heads, entries = numbers[:, None], tl.arange(0, BLOCK_D)[None, :]
    is_query, is_turned = heads < NUM_HEADS, heads < NUM_HEADS + NUM_KV_HEADS
    exists = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (entries < DIM)
    is_first, is_rotated = entries < HALF, (entries < 2 * HALF) & is_turned
    partners = tl.where(is_first, entries + HALF, entries - HALF)
    position = tl.load(positions + token)
    angles = position * HALF + tl.where(is_first, entries, entries - HALF)
    cosine = tl.load(cosines + angles + heads * 0, is_rotated, other=1.0)
    sine = tl.load(sines + angles + heads * 0, is_rotated, other=0.0)
    block, offset = tl.load(token_blocks + token * num_groups + group), position % BLOCK_SIZE
    wait_for_earlier_kernels(IS_DEPENDENT)  # positions and blocks are there since the begin of the step
    projected += token * projected_stride + heads * DIM
    results = tl.load(projected + entries, exists, other=0.0).to(tl.float32)
    others = tl.load(projected + partners, exists & is_rotated, other=0.0).to(tl.float32)
    if HAS_NORMS:
        scale = 1.0 / tl.sqrt(tl.sum(results * results, axis=1) / DIM + epsilon)[:, None]
        of_query, of_key = exists & is_query, exists & is_turned & (heads >= NUM_HEADS)
        own = tl.load(query_norm + entries + heads * 0, of_query, other=0.0)
        own += tl.load(key_norm + entries + heads * 0, of_key, other=0.0)
        of_others = tl.load(query_norm + partners + heads * 0, of_query, other=0.0)
        of_others += tl.load(key_norm + partners + heads * 0, of_key, other=0.0)
        results *= tl.where(is_turned, scale * own, 1.0)
        others *= scale * of_others
    results = results * cosine + tl.where(is_first, -others, others) * sine
    results = results.to(queries.dtype.element_ty)
    tl.store(queries + (token * NUM_HEADS + heads) * DIM + entries, results, exists & is_query)
    store_heads(
        results, numbers - NUM_HEADS, keys, key_scales, keys_block_stride, block, offset,
        HAS_SCALES, NUM_KV_HEADS, DIM, BLOCK_D,
    )  # fmt: skip
    store_heads(
        results, numbers - NUM_HEADS - NUM_KV_HEADS, values, value_scales, values_block_stride, block, offset,
        HAS_SCALES, NUM_KV_HEADS, DIM, BLOCK_D,
    )  # fmt: skip
