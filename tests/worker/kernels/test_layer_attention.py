"""Attention from fused queries, keys and values, against transformers' norms and rotation and the reference attention."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from millrace.worker.attention.compiled import LayerAttention, step_rows
from millrace.worker.attention.reference import ReferenceAttention
from millrace.worker.kernels.library import Kernels
from tests.worker.kernels.test_attention import IN_BF16, IN_TWO_DTYPES, NUM_BLOCKS, Shape, make_layer, random_rows
from tests.worker.rows import make_batch

NUM_POSITIONS = 140
EPS = 1e-3
SHAPES = [Shape(), Shape(heads=3, kv_heads=1, key_dim=24, value_dim=24, block_size=5), Shape(key_dim=34, value_dim=7)]


class Preparation(NamedTuple):
    rotary_dim: int | None = None
    norm: type[Qwen3RMSNorm] | type[Gemma3RMSNorm] | None = None


def tables(rotary_dim: int) -> tuple[Tensor, Tensor]:
    frequencies = 100.0 ** -(torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    angles = torch.arange(NUM_POSITIONS).unsqueeze(1) * frequencies
    return angles.cos() * 1.1, angles.sin() * 1.1  # yarn scales them too


def rotate(query: Tensor, key: Tensor, positions: Tensor, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """Rotate [heads, T, D] as transformers' models do."""
    cosines, sines = (
        torch.cat([table, table], dim=1)[positions].to(query.dtype).unsqueeze(0) for table in tables(rotary_dim)
    )
    parts = (query[None, ..., :rotary_dim], key[None, ..., :rotary_dim])
    rotated_query, rotated_key = apply_rotary_pos_emb(*parts, cosines, sines)
    return torch.cat([rotated_query[0], query[..., rotary_dim:]], -1), torch.cat(
        [rotated_key[0], key[..., rotary_dim:]], -1
    )


def check(
    kernels: Kernels,
    rows: list[tuple[int, int]],
    shape: Shape,
    preparation: Preparation,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    generator = torch.Generator().manual_seed(3)
    batch = make_batch(rows, shape.block_size, NUM_BLOCKS, 3)
    layer = make_layer(batch, shape, generator)
    expected_layer = make_layer(batch, shape, generator.manual_seed(3))
    sizes = [shape.heads * shape.key_dim, shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim]
    qkv = torch.randn(batch.query_starts[-1], sum(sizes), generator=generator).to(shape.dtype)
    query, key, value = (
        part.unflatten(1, (heads, -1)).transpose(0, 1)
        for part, heads in zip(qkv.split(sizes, 1), (shape.heads, shape.kv_heads, shape.kv_heads), strict=True)
    )

    weights = None
    if preparation.norm is not None:
        norms = [preparation.norm(shape.key_dim, eps=EPS).to(shape.dtype) for _ in range(2)]
        for norm in norms:
            norm.weight.data.copy_(torch.randn(shape.key_dim, generator=generator))
        query, key = norms[0](query), norms[1](key)
        weights = (norms[0].weight.data, norms[1].weight.data)
    if preparation.rotary_dim is not None:
        query, key = rotate(query, key, batch.positions[0], preparation.rotary_dim)
    scaling = shape.key_dim**-0.5
    expected = ReferenceAttention().forward(query, key, value, expected_layer, scaling, window, softcap, batch, sinks)

    offset = 1.0 if preparation.norm is Gemma3RMSNorm else 0.0
    compiled = LayerAttention(
        *(kernels, layer, shape.heads, shape.dtype, scaling, window, softcap),
        rotary=None if preparation.rotary_dim is None else tables(preparation.rotary_dim),
        norms=weights and (weights[0] + offset, weights[1] + offset),
        norm_eps=EPS,
        sinks=sinks,
    )
    output = torch.full((qkv.shape[0], shape.heads * shape.value_dim), float("nan"), dtype=shape.dtype)
    compiled.run(qkv, output, step_rows(kernels, batch))
    # Gemma's modules round to bfloat16 three times on the way, the kernel once.
    is_exact = torch.bfloat16 not in (shape.dtype, shape.pool_dtype)
    rtol, atol = (1e-5, 1e-5) if is_exact else (3e-2, 3e-2)
    torch.testing.assert_close(output.view_as(expected), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(layer.keys, expected_layer.keys, rtol=rtol, atol=atol, equal_nan=True)
    torch.testing.assert_close(layer.values, expected_layer.values, rtol=0.0, atol=0.0, equal_nan=True)


@torch.inference_mode()
@pytest.mark.parametrize("norm", [None, Qwen3RMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("shape", [*SHAPES, *IN_BF16, *IN_TWO_DTYPES])
def test_it_equals_norm_rotation_and_reference(
    kernels: Kernels, shape: Shape, norm: type[Qwen3RMSNorm] | type[Gemma3RMSNorm] | None
) -> None:
    for rotary_dim in (None, 2, shape.key_dim // 4 * 2, shape.key_dim):
        check(kernels, random_rows(shape.key_dim), shape, Preparation(rotary_dim, norm))


@torch.inference_mode()
@pytest.mark.parametrize("rows", [[(1, 1)], [(NUM_POSITIONS, 1)], [(NUM_POSITIONS, 17), (1, 1), (33, 33)]])
def test_windows_caps_and_the_last_position_of_the_tables(kernels: Kernels, rows: list[tuple[int, int]]) -> None:
    for window, softcap in ((None, None), (9, None), (16, 5.0)):
        check(kernels, rows, Shape(), Preparation(64, Gemma3RMSNorm), window, softcap)
        check(kernels, rows, Shape(), Preparation(64), window, softcap, torch.tensor([-3.0, 0.5, 2.0, 6.0]))


def test_a_position_behind_the_tables_is_refused(kernels: Kernels) -> None:
    batch = make_batch([(3, 3), (NUM_POSITIONS + 1, 1)], 16, NUM_BLOCKS, 1)
    layer = make_layer(batch, Shape(), torch.Generator())
    attention = LayerAttention(kernels, layer, 4, torch.float32, 1.0, rotary=tables(64))
    qkv, output = torch.zeros(4, attention.width), torch.zeros(4, 4 * 64)
    with pytest.raises(AssertionError, match=f"end before position {NUM_POSITIONS}"):
        attention.run(qkv, output, step_rows(kernels, batch))
