"""The CPU path against the reference, and the reference against a mask written out for all positions at once."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from millrace.worker.attention.cpu import CPUAttention
from millrace.worker.attention.interface import Attention
from millrace.worker.attention.reference import ReferenceAttention, visible_positions
from millrace.worker.input_batch import StepBatch
from millrace.worker.kv_pool import FP8, KVPool, LayerCache, LayerSpec
from tests.worker.rows import make_batch

BLOCK_SIZE = 4
NUM_BLOCKS = 400
HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 6, 2, 16, 8
CPU = torch.device("cpu")


def make_layer(batch: StepBatch, seed: int, dtype: torch.dtype) -> LayerCache:
    """A pool with the rows' earlier tokens in it, and NaN everywhere else."""
    generator = torch.Generator().manual_seed(seed)
    spec = LayerSpec(0, KV_HEADS, KEY_DIM, VALUE_DIM, None)
    layer = KVPool([spec], NUM_BLOCKS, BLOCK_SIZE, dtype, CPU).layers[0]
    for pool in (layer.keys, layer.values):
        pool.fill_(float("nan"))
        for row, length in enumerate(batch.kv_lens):
            past = torch.arange(length - batch.query_starts[row + 1] + batch.query_starts[row])
            slots = batch.block_tables[0, row, past // BLOCK_SIZE] * BLOCK_SIZE + past % BLOCK_SIZE
            numbers = torch.randn(len(past), KV_HEADS, pool.shape[-1], generator=generator)
            is_held = slots >= BLOCK_SIZE
            pool.flatten(0, 1)[slots[is_held]] = numbers[is_held].to(dtype)
    return layer


def attend(
    attention: Attention,
    rows: list[tuple[int, int]],
    seed: int,
    window: int | None,
    softcap: float | None = None,
    pool_dtype: torch.dtype = torch.float32,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    batch = make_batch(rows, BLOCK_SIZE, NUM_BLOCKS, seed, window)
    layer = make_layer(batch, seed, pool_dtype)
    query, key, value = new_tokens(batch.query_starts[-1], seed)
    return attention.forward(query, key, value, layer, 0.3, window, softcap, batch, sinks)


def new_tokens(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    shapes = ((HEADS, KEY_DIM), (KV_HEADS, KEY_DIM), (KV_HEADS, VALUE_DIM))
    query, key, value = (torch.randn(heads, num_tokens, size, generator=generator) for heads, size in shapes)
    return query, key, value


def random_rows(seed: int) -> list[tuple[int, int]]:
    source = random.Random(seed)
    lengths = [source.choice([1, 2, 3, 4, 5, 8, 13, 29, 64, 90]) for _ in range(12)]
    return [(length, source.choice([1, 1, length, source.randint(1, length)])) for length in lengths]


@pytest.mark.parametrize("window", [None, 1, 3, 4, 17, 500])
@pytest.mark.parametrize("seed", range(6))
def test_the_cpu_path_equals_the_reference(seed: int, window: int | None) -> None:
    expected = attend(ReferenceAttention(), random_rows(seed), seed, window)
    assert bool(expected.isfinite().all())
    torch.testing.assert_close(attend(CPUAttention(), random_rows(seed), seed, window), expected, rtol=1e-5, atol=2e-6)


def test_the_cpu_path_equals_the_reference_with_a_pool_of_another_dtype() -> None:
    expected, actual = (
        attend(kind, random_rows(3), 3, 7, pool_dtype=torch.bfloat16) for kind in (ReferenceAttention(), CPUAttention())
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)
    assert not torch.equal(expected, attend(ReferenceAttention(), random_rows(3), 3, 7))


def test_the_cpu_path_equals_the_reference_with_capped_scores() -> None:
    expected = attend(ReferenceAttention(), random_rows(3), 3, 5, softcap=2.0)
    torch.testing.assert_close(attend(CPUAttention(), random_rows(3), 3, 5, softcap=2.0), expected)


@pytest.mark.parametrize("window", [None, 5])
def test_the_cpu_path_equals_the_reference_with_attention_sinks(window: int | None) -> None:
    sinks = torch.linspace(-5, 5, HEADS)
    expected = attend(ReferenceAttention(), random_rows(3), 3, window, sinks=sinks)
    actual = attend(CPUAttention(), random_rows(3), 3, window, sinks=sinks)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("size", [2.0, 300.0])
def test_attention_sinks_are_what_transformers_computes(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.worker.attention.reference.MAX_SCORES", 1 << 8)  # in several parts
    query, key, value = (each[None] for each in new_tokens(30, seed=5))
    sinks = torch.linspace(-size, size, HEADS)
    module: Any = SimpleNamespace(sinks=sinks, num_key_value_groups=HEADS // KV_HEADS, training=False)
    mask = torch.full((30, 30), float("-inf")).triu(1)
    expected, _ = eager_attention_forward(module, query, key, value, mask, scaling=0.3)
    actual = attend(ReferenceAttention(), [(30, 30)], 5, None, sinks=sinks)
    torch.testing.assert_close(actual, expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 6])
def test_a_batch_of_decodes_is_computed_in_groups_that_fit(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(length, 1) for length in range(1, 91, 3)]
    expected = attend(ReferenceAttention(), rows, 1, window)
    for elements in (1, 1 << 10, 1 << 13, 1 << 30):
        monkeypatch.setattr("millrace.worker.attention.cpu.GATHERED_ELEMENTS", elements)
        torch.testing.assert_close(attend(CPUAttention(), rows, 1, window), expected, rtol=1e-5, atol=2e-6)


def test_a_low_cap_makes_all_positions_count_alike() -> None:
    _, _, value = new_tokens(30, seed=5)
    mean = value.cumsum(1) / torch.arange(1, 31).view(1, -1, 1)
    capped = attend(ReferenceAttention(), [(30, 30)], 5, None, softcap=1e-4)
    torch.testing.assert_close(capped[:, 0], mean[0], rtol=1e-3, atol=1e-3)


def test_each_sequence_sees_only_its_own_window_of_the_past() -> None:
    """One call over all positions, with a mask that is written out, for a sequence that was fed in one row."""
    query, key, value = new_tokens(20, seed=5)
    mask = torch.tensor([[0 <= i - j < 7 for j in range(20)] for i in range(20)])
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(3, 0), value.repeat_interleave(3, 0), attn_mask=mask, scale=0.3
    )
    actual = attend(ReferenceAttention(), [(20, 20)], 5, 7)
    torch.testing.assert_close(actual, expected.transpose(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 7])
def test_a_long_chunk_is_computed_in_parts_that_fit(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(90, 64), (90, 1), (40, 40)]
    expected = attend(ReferenceAttention(), rows, 1, window)
    sizes: list[int] = []

    def note(num_queries: int, kv_len: int, *rest: Any) -> torch.Tensor:
        sizes.append(HEADS * num_queries * kv_len)
        return visible_positions(num_queries, kv_len, *rest)

    monkeypatch.setattr("millrace.worker.attention.reference.visible_positions", note)
    for most in (1, 1 << 12):
        monkeypatch.setattr("millrace.worker.attention.reference.MAX_SCORES", most)
        sizes.clear()
        torch.testing.assert_close(attend(ReferenceAttention(), rows, 1, window), expected, rtol=1e-5, atol=2e-6)
        assert max(sizes) <= max(most, HEADS * 90)


@pytest.mark.parametrize("block_size", [4, 16])
def test_an_fp8_pool_keeps_its_scales_with_its_blocks(block_size: int) -> None:
    spec = LayerSpec(0, KV_HEADS, KEY_DIM, VALUE_DIM, None)
    pool = KVPool([spec], 6, block_size, FP8, CPU)
    assert pool.num_bytes() == 6 * block_size * spec.bytes_per_token(FP8)
    layer = pool.layers[0]
    _, key, value = new_tokens(2 * block_size, 1)
    key[:, 0], key[0, 1] = 0.0, 1e4
    value[:, 5] *= 1e-4
    layer.write(key, value, torch.arange(block_size, 3 * block_size))
    pool.add_host_tier(2)
    assert pool.host is not None
    pool.copy_blocks([(2, 4)])
    pool.host.swap_out([(1, 0)])
    pool.host.swap_in([(0, 3)])
    for blocks in ([1, 2], [3, 4]):
        gathered = layer.gather(torch.tensor([0, *blocks]), block_size, 3 * block_size)
        for numbers, given in zip(gathered, (key, value), strict=True):
            expected = given.transpose(0, 1)
            largest = expected.abs().amax(-1, keepdim=True)
            assert ((numbers - expected).abs() <= expected.abs() / 16 + largest * 2**-18).all()


def test_a_nan_in_an_fp8_pool_stays_one() -> None:
    layer = KVPool([LayerSpec(0, 1, 4, 4, None)], 2, 4, FP8, CPU).layers[0]
    key = torch.ones(1, 2, 4)
    key[0, 1, 2] = float("nan")
    layer.write(key, key, torch.tensor([4, 5]))
    keys, _ = layer.gather(torch.tensor([1]), 0, 2)
    assert keys[0].tolist() == [[1.0] * 4]
    assert bool(keys[1].isnan().any())
