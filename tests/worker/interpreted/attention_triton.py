"""Attention in Triton against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.worker.attention.interface import Attention
from millrace.worker.attention.paged_triton import slot_offset
from millrace.worker.attention.reference import ReferenceAttention
from millrace.worker.attention.triton import TritonAttention
from millrace.worker.kv_pool import LayerCache
from tests.worker.rows import make_batch

Shape = tuple[int, int, int, int]
"""Query heads, key heads, size of a key head, size of a value head."""

MIXED = [(70, 1), (17, 17), (300, 5)]


def attend(
    attention: Attention,
    rows: list[tuple[int, int]],
    shape: Shape = (4, 2, 64, 64),
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype | None = None,
    num_kept: int | None = None,
) -> tuple[Tensor, LayerCache]:
    """Slots that hold no token that the rows may see are NaN. num_kept: compute the first rows alone."""
    num_heads, num_kv_heads, key_dim, value_dim = shape
    batch = make_batch(rows, block_size, num_blocks=80, seed=1, window=window)
    generator = torch.Generator().manual_seed(2)
    pools = []
    for dim in (key_dim, value_dim):
        pool = torch.full((80, block_size, num_kv_heads, dim), float("nan"), dtype=pool_dtype or dtype)
        for row, length in enumerate(batch.kv_lens):
            past = torch.arange(length - batch.query_starts[row + 1] + batch.query_starts[row])
            slots = batch.block_tables[0, row, past // block_size] * block_size + past % block_size
            numbers = torch.randn(len(past), num_kv_heads, dim, generator=generator).to(pool.dtype)
            pool.flatten(0, 1)[slots[slots >= block_size]] = numbers[slots >= block_size]
        pools.append(pool)
    layer = LayerCache(pools[0], pools[1])
    num_tokens = batch.query_starts[-1]
    query, key, value = (
        torch.randn(num_tokens, heads, dim, generator=generator).to(dtype).transpose(0, 1)
        for heads, dim in ((num_heads, key_dim), (num_kv_heads, key_dim), (num_kv_heads, value_dim))
    )
    if num_kept is not None:
        count = batch.query_starts[num_kept]
        query, key, value = query[:, :count], key[:, :count], value[:, :count]
        batch = replace(
            batch,
            positions=batch.positions[:, :count],
            token_blocks=batch.token_blocks[:count],
            block_tables=batch.block_tables[:, :num_kept],
            query_starts=batch.query_starts[: num_kept + 1],
            kv_lens=batch.kv_lens[:num_kept],
        )
    output = attention.forward(query, key, value, layer, key_dim**-0.5, window, softcap, batch)
    return output, layer


def check(rows: list[tuple[int, int]], **options: object) -> None:
    expected, expected_layer = attend(ReferenceAttention(), rows, **options)  # type: ignore[arg-type]
    actual, layer = attend(TritonAttention(), rows, **options)  # type: ignore[arg-type]
    assert bool(expected.isfinite().all())
    tolerance = 2e-5 if expected.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(layer.keys, expected_layer.keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(layer.values, expected_layer.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 2.0), (3, 5.0), (270, None)])
def test_decodes_and_chunks_equal_the_reference(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    check(MIXED, dtype=dtype, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(2, 2, 24, 24), (6, 2, 24, 16), (3, 1, 80, 80), (7, 1, 128, 128), (2, 1, 256, 256)])
def test_heads_of_any_size_and_number_equal_the_reference(dtype: torch.dtype, shape: Shape) -> None:
    check([(20, 1), (19, 3)], shape=shape, dtype=dtype)


@pytest.mark.parametrize("block_size", [16, 32, 256])
@pytest.mark.parametrize("rows", [[(1, 1)], [(16, 1), (17, 1)], [(256, 1), (257, 2), (65, 65)], [(513, 1), (32, 32)]])
def test_rows_that_end_at_the_border_of_a_block_equal_the_reference(
    block_size: int, rows: list[tuple[int, int]]
) -> None:
    check(rows, shape=(2, 1, 16, 16), block_size=block_size)


def test_a_pool_of_another_dtype_equals_the_reference() -> None:
    check(MIXED, pool_dtype=torch.float16)


@pytest.mark.parametrize("window", [None, 300])
def test_a_row_does_not_depend_on_the_other_rows(window: int | None) -> None:
    rows = [(300, 1), (30, 9), (600, 1), (5, 5)]
    together, _ = attend(TritonAttention(), rows, window=window)
    alone, _ = attend(TritonAttention(), rows, window=window, num_kept=2)
    assert torch.equal(alone, together[:10])


@triton.jit
def store_offset(block, offset, output, block_stride, token_stride):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
    tl.store(output, slot_offset(tl.load(block), tl.load(offset), block_stride, token_stride))


def test_offsets_into_the_pool_exceed_31_bits() -> None:
    output = torch.zeros(1, dtype=torch.int64)
    block, offset = torch.tensor([3_000_000], dtype=torch.int32), torch.tensor([255], dtype=torch.int32)
    store_offset[(1,)](block, offset, output, 256 * 8192, 8192)
    assert output.item() == 3_000_000 * 256 * 8192 + 255 * 8192
