"""Compiled attention against the reference, over shapes and on every instruction set of this machine."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from millrace.worker.attention.compiled import CompiledAttention
from millrace.worker.attention.cpu import CPUAttention
from millrace.worker.attention.interface import Attention
from millrace.worker.attention.reference import ReferenceAttention
from millrace.worker.input_batch import StepBatch
from millrace.worker.kernels.library import Kernels
from millrace.worker.kv_pool import KVPool, LayerCache, LayerSpec
from tests.worker.rows import make_batch

NUM_BLOCKS = 600
CPU = torch.device("cpu")


class Shape(NamedTuple):
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None
    """None: `dtype`."""


SHAPES = [
    Shape(),
    Shape(block_size=32),
    Shape(block_size=4),
    Shape(block_size=5, key_dim=24, value_dim=24),
    Shape(heads=6, kv_heads=6, key_dim=128, value_dim=128),
    Shape(heads=8, kv_heads=1, key_dim=80, value_dim=48),
    Shape(heads=3, kv_heads=1, key_dim=1, value_dim=3),
    Shape(heads=71, kv_heads=1, key_dim=16, value_dim=16),
    Shape(heads=2, kv_heads=2, key_dim=257, value_dim=31),
]
IN_BF16 = [Shape(dtype=torch.bfloat16), Shape(heads=5, kv_heads=1, key_dim=20, value_dim=33, dtype=torch.bfloat16)]
IN_TWO_DTYPES = [
    Shape(pool_dtype=torch.bfloat16),
    Shape(dtype=torch.bfloat16, pool_dtype=torch.float32),
    Shape(heads=5, kv_heads=1, key_dim=20, value_dim=33, block_size=5, pool_dtype=torch.bfloat16),
    Shape(heads=4, kv_heads=1, key_dim=48, value_dim=17, dtype=torch.bfloat16, pool_dtype=torch.float32),
]


def make_layer(batch: StepBatch, shape: Shape, generator: torch.Generator) -> LayerCache:
    """A pool with the rows' earlier tokens in it, and NaN everywhere else."""
    spec = LayerSpec(0, shape.kv_heads, shape.key_dim, shape.value_dim, None)
    layer = KVPool([spec], NUM_BLOCKS, shape.block_size, shape.pool_dtype or shape.dtype, CPU).layers[0]
    for pool in (layer.keys, layer.values):
        pool.fill_(float("nan"))
        for row, length in enumerate(batch.kv_lens):
            past = torch.arange(length - batch.query_starts[row + 1] + batch.query_starts[row])
            slots = batch.block_tables[0, row, past // shape.block_size] * shape.block_size + past % shape.block_size
            numbers = torch.randn(len(past), shape.kv_heads, pool.shape[-1], generator=generator)
            is_held = slots >= shape.block_size
            pool.flatten(0, 1)[slots[is_held]] = numbers[is_held].to(pool.dtype)
    return layer


def attend(
    attention: Attention,
    rows: list[tuple[int, int]],
    shape: Shape,
    window: int | None = None,
    softcap: float | None = None,
    seed: int = 1,
    last: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, LayerCache]:
    """The output, and the layer with the step's keys and values. The queries lie as transformers makes them. With `last`
    the one row is computed in two steps, and the output is that of its last tokens."""
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(rows, shape.block_size, NUM_BLOCKS, seed, window)
    layer = make_layer(batch, shape, generator)
    sizes = ((shape.heads, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim))
    query, key, value = (
        torch.randn(batch.query_starts[-1], *size, generator=generator).to(shape.dtype).transpose(0, 1)
        for size in sizes
    )
    scaling = shape.key_dim**-0.5
    if last is not None:
        begin = replace(batch, query_starts=[0, rows[0][1] - last], kv_lens=[rows[0][0] - last], derived={})
        given = query[:, :-last], key[:, :-last], value[:, :-last]
        attention.forward(*given, layer, scaling, window, softcap, begin, sinks)
        batch = replace(batch, query_starts=[0, last], derived={})
        query, key, value = query[:, -last:], key[:, -last:], value[:, -last:]
    return attention.forward(query, key, value, layer, scaling, window, softcap, batch, sinks), layer


def check(
    kernels: Kernels,
    rows: list[tuple[int, int]],
    shape: Shape,
    window: int | None = None,
    softcap: float | None = None,
    *,
    rounds: bool = False,
    sinks: torch.Tensor | None = None,
) -> None:
    expected, layer = attend(ReferenceAttention(), rows, shape, window, softcap, sinks=sinks)
    actual, written = attend(CompiledAttention(kernels, rounds=rounds), rows, shape, window, softcap, sinks=sinks)
    assert bool(expected.isfinite().all())
    rtol, atol = (1e-5, 4e-6) if shape.dtype == torch.float32 else (1e-2, 1e-2)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(written.keys, layer.keys, rtol=0.0, atol=0.0, equal_nan=True)
    torch.testing.assert_close(written.values, layer.values, rtol=0.0, atol=0.0, equal_nan=True)


def random_rows(seed: int) -> list[tuple[int, int]]:
    source = random.Random(seed)
    lengths = [source.choice([1, 2, 3, 5, 8, 13, 29, 64, 90, 130]) for _ in range(10)]
    return [(length, source.choice([1, 1, length, source.randint(1, length)])) for length in lengths]


@pytest.mark.parametrize("shape", SHAPES + IN_BF16 + IN_TWO_DTYPES)
@pytest.mark.parametrize("window", [None, 1, 7, 16, 40])
def test_it_equals_the_reference(kernels: Kernels, shape: Shape, window: int | None) -> None:
    check(kernels, random_rows(shape.key_dim), shape, window)


ROUNDED = [
    IN_BF16[0],
    Shape(heads=8, kv_heads=1, key_dim=128, value_dim=128, dtype=torch.bfloat16),
    Shape(heads=7, kv_heads=1, key_dim=96, value_dim=64, block_size=5, dtype=torch.bfloat16),
    Shape(heads=3, kv_heads=3, key_dim=256, value_dim=32, block_size=32, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("shape", [*ROUNDED, IN_BF16[1], SHAPES[0], *IN_TWO_DTYPES])
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (1, None), (7, None), (40, 2.0), (130, None), (None, 0.5)]
)
def test_chunks_with_rounded_queries_and_weights(
    all_kernels: Kernels, shape: Shape, window: int | None, softcap: float | None
) -> None:
    rows = [*random_rows(shape.key_dim), (300, 300), (260, 130), (129, 9), (400, 33)]
    check(all_kernels, rows, shape, window, softcap, rounds=True)


def test_rounding_is_for_bfloat16_alone_and_leaves_single_tokens_as_they_are(all_kernels: Kernels) -> None:
    rounds = all_kernels.instruction_set == "amx"
    for shape, is_other in ((IN_BF16[0], rounds), (SHAPES[0], False), *((each, False) for each in IN_TWO_DTYPES)):
        for rows in ([(300, 300)], [(300, 1), (40, 1), (5, 1)]):
            plain, _ = attend(CompiledAttention(all_kernels), rows, shape)
            rounded, _ = attend(CompiledAttention(all_kernels, rounds=True), rows, shape)
            assert torch.equal(plain, rounded) != (is_other and rows[0][1] > 1)


def sinks_up_to(size: float, shape: Shape) -> torch.Tensor:
    """Far below and far above the scores, if the size is large."""
    return torch.linspace(-size, size, shape.heads).to(shape.dtype)


@pytest.mark.parametrize("size", [2.0, 200.0])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (130, 2.0)])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[7], IN_BF16[0], IN_TWO_DTYPES[2]])
def test_attention_sinks(
    all_kernels: Kernels, shape: Shape, window: int | None, softcap: float | None, size: float
) -> None:
    rows = [*random_rows(shape.key_dim), (300, 300), (260, 130), (400, 33)]
    check(all_kernels, rows, shape, window, softcap, rounds=True, sinks=sinks_up_to(size, shape))


def test_a_sink_counts_once_however_a_sequence_is_cut(kernels: Kernels) -> None:
    sinks = sinks_up_to(2.0, SHAPES[0])
    whole, _ = attend(CompiledAttention(kernels), [(300, 300)], SHAPES[0], sinks=sinks)
    for num_tokens in (1, 3, 100):
        last, _ = attend(CompiledAttention(kernels), [(300, 300)], SHAPES[0], last=num_tokens, sinks=sinks)
        assert torch.equal(last, whole[-num_tokens:])
    check_sharing(kernels, SHAPES[0], SHARED_LENGTHS, SHARED, sinks=sinks)


def test_a_sink_that_is_no_number_shows_in_its_head_alone(kernels: Kernels) -> None:
    sinks = torch.tensor([0.0, float("nan"), 0.0, 0.0])
    output, _ = attend(CompiledAttention(kernels), random_rows(1), SHAPES[0], sinks=sinks)
    assert output.isnan().all(-1).any(0).tolist() == [False, True, False, False]
    assert bool(output[:, 1].isnan().all())


def test_a_layer_uses_the_block_tables_of_its_group(kernels: Kernels) -> None:
    rows, shape = [(40, 1), (23, 1), (30, 12), (9, 9)], Shape()
    first, second = (make_batch(rows, shape.block_size, NUM_BLOCKS, seed) for seed in (1, 2))
    both = replace(
        first,
        token_blocks=torch.cat([first.token_blocks, second.token_blocks], dim=1),
        block_tables=torch.cat([first.block_tables, second.block_tables]),
    )
    sizes = ((shape.heads, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim))
    query, key, value = (torch.randn(heads, 23, size, generator=torch.Generator()) for heads, size in sizes)
    implementations: list[Attention] = [ReferenceAttention(), CPUAttention(), CompiledAttention(kernels)]
    for attention in implementations:
        for group, alone in enumerate((first, second)):
            layers = [make_layer(alone, shape, torch.Generator().manual_seed(4)) for _ in range(2)]
            expected = attention.forward(query, key, value, layers[0], 0.1, None, None, replace(alone, derived={}))
            layer = replace(layers[1], group=group)
            actual = attention.forward(query, key, value, layer, 0.1, None, None, both)
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_lengths_at_the_borders_of_blocks_and_spans(kernels: Kernels, block_size: int) -> None:
    lengths = [*range(1, 20), 31, 32, 33, 127, 128, 129, 143, 144, 145]
    shape = Shape(block_size=block_size if block_size > 1 else 4, key_dim=32, value_dim=32)
    check(kernels, [(length, 1) for length in lengths], shape)
    check(kernels, [(length, min(length, 2)) for length in lengths], shape, window=16)


@pytest.mark.parametrize(
    "rows", [[(1, 1)], [(300, 1)], [(300, 300)], [(300, 17), (1, 1)], [(2, 2), (260, 1), (129, 128)]]
)
def test_one_to_three_rows(kernels: Kernels, rows: list[tuple[int, int]]) -> None:
    for window in (None, 33):
        check(kernels, rows, Shape(heads=8, kv_heads=2, key_dim=48, value_dim=48), window)


def test_a_sequence_at_the_end_of_the_pool(kernels: Kernels) -> None:
    """What lies behind it is not ours; the run under AddressSanitizer sees a read of it."""
    for block_size, length in ((4, 1), (4, 3), (16, 15), (16, 17)):
        shape = Shape(block_size=block_size)
        batch = make_batch([(length, 1)], block_size, NUM_BLOCKS, 1)
        batch.block_tables[0, 0, -1] = NUM_BLOCKS - 1
        layer = make_layer(batch, shape, torch.Generator().manual_seed(1))
        query, key, value = torch.ones(4, 1, 64), torch.ones(2, 1, 64), torch.ones(2, 1, 64)
        output = CompiledAttention(kernels).forward(query, key, value, layer, 0.1, None, None, batch)
        assert bool(output.isfinite().all())


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("window", [None, 9])
def test_capped_scores(kernels: Kernels, softcap: float, window: int | None) -> None:
    for shape in (SHAPES[0], IN_BF16[1]):
        check(kernels, random_rows(5), shape, window, softcap)


def test_large_scores_neither_overflow_nor_lose_their_order(kernels: Kernels) -> None:
    shape = Shape(key_dim=16, value_dim=16)
    batch = make_batch([(200, 200)], shape.block_size, NUM_BLOCKS, 1)
    query = torch.full((4, 200, 16), 40.0)
    key = torch.linspace(-40.0, 40.0, 200).view(1, 200, 1).expand(2, 200, 16).contiguous()
    value = torch.arange(200.0).view(1, 200, 1).expand(2, 200, 16).contiguous()
    layer = make_layer(batch, shape, torch.Generator())
    output = CompiledAttention(kernels).forward(query, key, value, layer, 1.0, None, None, batch)
    torch.testing.assert_close(output, torch.arange(200.0).view(200, 1, 1).expand(200, 4, 16))


def test_nan_stays_in_its_own_row(kernels: Kernels) -> None:
    shape = Shape()
    batch = make_batch([(40, 1), (50, 1), (20, 5)], shape.block_size, NUM_BLOCKS, 1)
    layer = make_layer(batch, shape, torch.Generator().manual_seed(1))
    query, key, value = torch.ones(4, 7, 64), torch.ones(2, 7, 64), torch.ones(2, 7, 64)
    query[:, 1] = float("nan")
    output = CompiledAttention(kernels).forward(query, key, value, layer, 0.1, None, None, batch)
    assert output.isnan().flatten(1).all(dim=1).tolist() == [False, True, False, False, False, False, False]
    assert output.isnan().flatten(1).any(dim=1).tolist() == [False, True, False, False, False, False, False]


def test_nan_stays_in_its_own_token_of_a_chunk_that_is_rounded(all_kernels: Kernels) -> None:
    shape = ROUNDED[0]
    batch = make_batch([(60, 40), (30, 30)], shape.block_size, NUM_BLOCKS, 1)
    layer = make_layer(batch, shape, torch.Generator().manual_seed(1))
    query, key, value = (torch.ones(heads, 70, 64, dtype=shape.dtype) for heads in (4, 2, 2))
    query[:, 5] = float("nan")
    output = CompiledAttention(all_kernels, rounds=True).forward(query, key, value, layer, 0.1, None, None, batch)
    assert output.isnan().flatten(1).any(dim=1).nonzero().flatten().tolist() == [5]


def test_a_row_does_not_depend_on_its_neighbours_or_the_threads(kernels: Kernels) -> None:
    rows = [(90, 1), (130, 70), (33, 1), (300, 1)]
    whole, _ = attend(CompiledAttention(kernels), rows, Shape())
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        again, _ = attend(CompiledAttention(kernels), rows, Shape())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(whole, again)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4], IN_BF16[0], IN_TWO_DTYPES[0]])
def test_a_token_has_the_same_bits_in_any_chunk(kernels: Kernels, shape: Shape, window: int | None) -> None:
    """A sequence that was preempted is computed again in other chunks than before."""
    whole, layer = attend(CompiledAttention(kernels), [(300, 300)], shape, window)
    for num_tokens in (1, 2, 7, 130):
        last, other = attend(CompiledAttention(kernels), [(300, 300)], shape, window, last=num_tokens)
        assert torch.equal(last, whole[-num_tokens:])
        assert torch.equal(other.keys.nan_to_num(), layer.keys.nan_to_num())


SHARED_LENGTHS = [300, 129, 420, 415, 128, 130, 257, 300, 3, 415, 290, 60]
SHARED = [([0, 2, 3, 5, 6, 7, 9, 10], 130), ([2, 3, 9], 400), ([0, 7], 290), ([5, 6], 128)]
"""Rows, and how many positions they have in common."""


@pytest.mark.parametrize("window", [None, 200, 1000])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[5], IN_BF16[0], IN_TWO_DTYPES[2]])
def test_rows_that_share_blocks_have_the_same_bits_alone(kernels: Kernels, shape: Shape, window: int | None) -> None:
    check_sharing(kernels, shape, SHARED_LENGTHS, SHARED, window)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4], SHAPES[5], SHAPES[8], *IN_BF16, IN_TWO_DTYPES[1]])
def test_many_rows_that_share_blocks_have_the_same_bits_alone(
    kernels: Kernels, shape: Shape, softcap: float | None
) -> None:
    lengths = [129 + 7 * row % 160 for row in range(41)]
    check_sharing(kernels, shape, lengths, [(list(range(41)), 128), (list(range(20, 24)), 144)], softcap=softcap)


@pytest.mark.parametrize("shape", [ROUNDED[0], ROUNDED[1], ROUNDED[3]])
def test_rows_that_share_blocks_with_rounded_queries_and_weights(all_kernels: Kernels, shape: Shape) -> None:
    check_sharing(all_kernels, shape, SHARED_LENGTHS, SHARED, rounds=True)
    check_sharing(all_kernels, shape, [129 + 7 * row % 160 for row in range(41)], [(list(range(41)), 128)], rounds=True)


def test_many_rows_that_share_one_span_of_one_head(kernels: Kernels) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        check_sharing(kernels, Shape(heads=2, kv_heads=1, block_size=32), [160] * 90, [(list(range(90)), 128)])
    finally:
        torch.set_num_threads(threads)


def check_sharing(
    kernels: Kernels,
    shape: Shape,
    lengths: list[int],
    shared: list[tuple[list[int], int]],
    window: int | None = None,
    softcap: float | None = None,
    *,
    rounds: bool = False,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute groups of rows whose first blocks are the same in one step, and each row in a step of its own."""
    batch = make_batch([(length, 1) for length in lengths], shape.block_size, NUM_BLOCKS, 5)
    generator = torch.Generator().manual_seed(5)
    for rows, num_positions in shared:
        num_blocks = num_positions // shape.block_size
        batch.block_tables[0, rows, :num_blocks] = batch.block_tables[0, rows[0], :num_blocks].clone()
    layer = make_layer(batch, shape, generator)
    query, key, value = (
        torch.randn(heads, len(lengths), dim, generator=generator).to(shape.dtype)
        for heads, dim in (
            (shape.heads, shape.key_dim),
            (shape.kv_heads, shape.key_dim),
            (shape.kv_heads, shape.value_dim),
        )
    )
    attention = CompiledAttention(kernels, rounds=rounds)
    together = attention.forward(query, key, value, layer, 0.2, window, softcap, batch, sinks)
    expected = ReferenceAttention().forward(query, key, value, layer, 0.2, window, softcap, batch, sinks)
    rtol, atol = (1e-5, 4e-6) if shape.dtype == torch.float32 else (1e-2, 1e-2)
    torch.testing.assert_close(together, expected, rtol=rtol, atol=atol)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = replace(
            batch, query_starts=[0, 1], kv_lens=[length], block_tables=batch.block_tables[:, one], derived={}
        )
        given = query[:, one], key[:, one], value[:, one]
        output = attention.forward(*given, layer, 0.2, window, softcap, alone, sinks)
        if rounds:
            torch.testing.assert_close(output[0], together[row], rtol=rtol, atol=atol)
        else:
            assert torch.equal(output[0], together[row]), row


def test_other_dtypes_take_the_torch_path(kernels: Kernels) -> None:
    shape = Shape(dtype=torch.float64)
    expected, _ = attend(ReferenceAttention(), random_rows(1), shape)
    actual, _ = attend(CompiledAttention(kernels), random_rows(1), shape)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
