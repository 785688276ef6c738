"""Attention over a pool that holds the earlier tokens of a batch, on any device."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from millrace.worker.attention.interface import Attention
from millrace.worker.attention.reference import ReferenceAttention
from millrace.worker.input_batch import StepBatch
from millrace.worker.kernels import rows_torch
from millrace.worker.kv_pool import FP8, KVPool, LayerCache, LayerSpec
from tests.worker.rows import make_batch

if TYPE_CHECKING:
    from millrace.worker.attention.triton import TritonAttention

Shape = tuple[int, int, int, int]
"""Query heads, key heads, size of a key head, size of a value head."""

NUM_BLOCKS = 80
MIXED = [(70, 1), (17, 17), (300, 5)]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def filled_pool(
    batch: StepBatch, shape: Shape, dtype: torch.dtype, generator: torch.Generator, value_size: float = 1.0
) -> KVPool:
    """A pool with the rows' earlier tokens in it, and NaN everywhere else."""
    _, num_kv_heads, key_dim, value_dim = shape
    spec = LayerSpec(0, num_kv_heads, key_dim, value_dim, None)
    pool = KVPool([spec], NUM_BLOCKS, batch.block_size, dtype, torch.device("cpu"))
    for tensor in (part for pair in pool._pairs for part in pair):
        tensor.view(torch.uint8).fill_(255)
    for row, length in enumerate(batch.kv_lens):
        past = torch.arange(length - batch.query_starts[row + 1] + batch.query_starts[row])
        slots = batch.block_tables[0, row, past // batch.block_size] * batch.block_size + past % batch.block_size
        key, value = (torch.randn(num_kv_heads, len(past), dim, generator=generator) for dim in (key_dim, value_dim))
        is_held = slots >= batch.block_size
        pool.layers[0].write(key[:, is_held], value[:, is_held] * value_size, slots[is_held].long())
    return pool


def first_rows(batch: StepBatch, num_rows: int) -> StepBatch:
    num_tokens = batch.query_starts[num_rows]
    return replace(
        batch,
        positions=batch.positions[:, :num_tokens],
        token_blocks=batch.token_blocks[:num_tokens],
        block_tables=batch.block_tables[:, :num_rows],
        query_starts=batch.query_starts[: num_rows + 1],
        kv_lens=batch.kv_lens[:num_rows],
    )


def on_device(
    batch: StepBatch, pool: KVPool, shape: Shape, dtype: torch.dtype, device: str
) -> tuple[StepBatch, LayerCache, list[Tensor]]:
    """The batch and a copy of the pool there: its layer, and its tensors."""
    tensors: dict[str, Any] = {
        field.name: getattr(batch, field.name).to(device)
        for field in fields(batch)
        if isinstance(getattr(batch, field.name), Tensor)
    }
    moved = KVPool([LayerSpec(0, *shape[1:], None)], NUM_BLOCKS, batch.block_size, dtype, torch.device(device))
    parts = [part for pair in moved._pairs for part in pair]
    for part, filled in zip(parts, (part for pair in pool._pairs for part in pair), strict=True):
        part.copy_(filled)
    return replace(batch, **tensors), moved.layers[0], parts


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
    first_token: int = 0,
    query_size: float = 1.0,
    value_size: float = 1.0,
    sink_size: float | None = None,
    device: str = "cpu",
) -> tuple[Tensor, list[Tensor]]:
    """The output, and the bytes of the pool. num_kept: compute the first rows alone. first_token: of the only row, compute
    those from it on again, and return these. query_size, value_size: standard deviations. sink_size: of the largest sink;
    those of the other heads are evenly down to its negative."""
    num_heads, num_kv_heads, key_dim, value_dim = shape
    batch = make_batch(rows, block_size, NUM_BLOCKS, seed=1, window=window)
    generator = torch.Generator().manual_seed(2)
    pool = filled_pool(batch, shape, pool_dtype or dtype, generator, value_size)
    query, key, value = (
        torch.randn(batch.query_starts[-1], heads, dim, generator=generator).to(device, dtype).transpose(0, 1)
        for heads, dim in ((num_heads, key_dim), (num_kv_heads, key_dim), (num_kv_heads, value_dim))
    )
    query, value = query * query_size, value * value_size
    if num_kept is not None:
        batch = first_rows(batch, num_kept)
        query, key, value = (each[:, : batch.query_starts[-1]] for each in (query, key, value))
    batch, layer, parts = on_device(batch, pool, shape, pool_dtype or dtype, device)
    options = layer, key_dim**-0.5, window, softcap
    sinks = None
    if sink_size is not None:
        sinks = torch.linspace(-sink_size, sink_size, num_heads).to(device, dtype)
    output = attention.forward(query, key, value, *options, batch, sinks)
    if first_token:
        last = replace(
            batch,
            positions=batch.positions[:, first_token:],
            token_blocks=batch.token_blocks[first_token:],
            query_starts=[0, batch.query_starts[1] - first_token],
            derived={},
        )
        query, key, value = (each[:, first_token:] for each in (query, key, value))
        output = attention.forward(query, key, value, *options, last, sinks)
    return output, [part.view(torch.uint8) for part in parts]


def check_projected(
    attention: TritonAttention,
    shape: Shape,
    rotary_dim: int,
    *,
    has_norms: bool,
    dtype: torch.dtype,
    has_sinks: bool = False,
    pool_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> None:
    """`forward_projected` computes and writes what the rotation and `forward` do."""
    num_heads, num_kv_heads, dim, _ = shape
    generator, rows = torch.Generator().manual_seed(3), make_batch([(20, 1), (19, 3)], 16, NUM_BLOCKS, seed=1)
    pool = filled_pool(rows, shape, pool_dtype or dtype, generator)
    numbers = torch.randn(rows.query_starts[-1], (num_heads + 2 * num_kv_heads) * dim, generator=generator)
    projected = numbers.to(device, dtype)
    cosines, sines = (torch.randn(20, rotary_dim // 2, generator=generator).to(device) for _ in range(2))
    of_query, of_key = (torch.randn(dim, generator=generator).to(device) for _ in range(2))
    rotation: dict[str, Any] = {"tables": (cosines, sines), "norms": (of_query, of_key) if has_norms else None}
    rotation |= {"epsilon": 1e-6, "num_heads": num_heads}
    how: dict[str, Any] = {"scaling": dim**-0.5, "sliding_window": None, "softcap": None}
    how["sinks"] = torch.linspace(-2, 2, num_heads).to(device, dtype) if has_sinks else None
    batch, layer, parts = on_device(rows, pool, shape, pool_dtype or dtype, device)
    output = attention.forward_projected(projected, **rotation, layer=layer, **how, batch=batch)
    batch, layer, expected_parts = on_device(rows, pool, shape, pool_dtype or dtype, device)
    rotated = projected.new_empty(len(projected), (num_heads + num_kv_heads) * dim)
    rows_torch.norm_and_rotate(projected, batch.positions[0], **rotation, head_dim=dim, outputs=rotated)
    heads = torch.cat([rotated, projected[:, rotated.shape[1] :]], 1).view(len(projected), -1, dim).transpose(0, 1)
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads])
    expected = attention.forward(query, key, value, layer=layer, **how, batch=batch)
    tolerance = TOLERANCES[dtype] if pool_dtype is None else 3e-2
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    for actual, other in zip(parts, expected_parts, strict=True):
        if pool_dtype is None:
            torch.testing.assert_close(actual, other, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:  # its bytes: a number that is rounded otherwise is one step away
            assert (actual.view(torch.int8).int() - other.view(torch.int8).int()).abs().float().mean() < 0.02


def check(attention: Attention, rows: list[tuple[int, int]], **options: Any) -> None:
    """`attention` computes what the reference does, and leaves the same bytes in the pool."""
    expected, expected_pool = attend(ReferenceAttention(), rows, **options)
    actual, pool = attend(attention, rows, **options)
    assert bool(expected.isfinite().all())
    tolerance = TOLERANCES[expected.dtype]
    tolerance_at_0 = tolerance * options.get("value_size", 1.0)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance_at_0)
    assert all(torch.equal(*each) for each in zip(pool, expected_pool, strict=True))


def check_fp8_extremes(attention: Attention, device: str = "cpu") -> None:
    """With a pool in fp8, NaN stays NaN, and queries that float16 does not hold stay finite."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "pool_dtype": FP8, "device": device}
    for size in ("query_size", "value_size"):
        assert bool(attend(attention, MIXED, **options | {size: math.nan})[0].isnan().all())
    assert bool(attend(attention, MIXED, query_size=1e6, **options)[0].isfinite().all())
