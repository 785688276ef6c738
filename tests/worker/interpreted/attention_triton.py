"""Attention in Triton against the reference."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from millrace.worker.attention.triton import CHUNK, Rows, TritonAttention
from millrace.worker.attention.write_triton import locate
from millrace.worker.kv_pool import FP8
from tests.worker.attention.paged import MIXED, Shape, attend, check, check_fp8_extremes, check_projected

DTYPES = [torch.float32, torch.float16]
TRITON = TritonAttention()


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 2.0), (3, 5.0), (270, None)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_and_chunks_equal_the_reference(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    check(TRITON, MIXED, dtype=dtype, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 2, 24, 24), (6, 2, 24, 16), (3, 1, 80, 80), (7, 1, 128, 128), (2, 1, 256, 256)])
def test_heads_of_any_size_and_number_equal_the_reference(dtype: torch.dtype, shape: Shape) -> None:
    check(TRITON, [(20, 1), (19, 3)], shape=shape, dtype=dtype)


def test_more_query_heads_of_a_key_head_than_a_tile_has_rows_equal_the_reference() -> None:
    check(TRITON, [(20, 1), (19, 3)], shape=(130, 1, 16, 16))


@pytest.mark.parametrize(
    ("rows", "block_size"),
    [
        ([(1, 1)], 16),
        ([(16, 1), (17, 1)], 16),
        *product(([(256, 1), (257, 2), (33, 33)], [(513, 1), (32, 32)]), (16, 256)),
    ],
)
def test_rows_that_end_at_the_border_of_a_block_equal_the_reference(
    rows: list[tuple[int, int]], block_size: int
) -> None:
    check(TRITON, rows, shape=(2, 1, 16, 16), block_size=block_size)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 255, 256, 257])
def test_windows_that_begin_at_the_border_of_a_block_equal_the_reference(window: int) -> None:
    check(TRITON, [(513, 1), (257, 1), (33, 1), (272, 16), (16, 16)], shape=(2, 1, 16, 16), window=window)


def test_rows_of_more_chunks_than_are_merged_at_once_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.worker.attention.triton.CHUNKS_AT_ONCE", 2)
    check(TRITON, [(600, 1), (30, 1), (150, 1)], shape=(2, 1, 24, 24))


def test_a_pool_of_another_dtype_equals_the_reference() -> None:
    check(TRITON, MIXED, pool_dtype=torch.float16)


@pytest.fixture
def exact_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter loses the carry when it rounds to fp8."""
    convert = interpreter._convert_float

    def convert_exactly(numbers: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if target != tl.float8e4nv:
            return convert(numbers, source, target, rounding_mode)
        return torch.from_numpy(numbers).to(FP8).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert_exactly)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize(("dtype", "shape"), [(torch.float32, (6, 2, 24, 16)), (torch.float16, (4, 2, 64, 64))])
def test_a_pool_in_fp8_equals_the_reference(dtype: torch.dtype, shape: Shape) -> None:
    check(TRITON, MIXED, dtype=dtype, shape=shape, pool_dtype=FP8, window=40, softcap=5.0)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("value_size", [1e-5, 1.0, 1e4])
def test_a_pool_in_fp8_with_queries_in_bfloat16_equals_the_reference(value_size: float) -> None:
    """The products are float16's."""
    check(TRITON, MIXED, dtype=torch.bfloat16, pool_dtype=FP8, value_size=value_size)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("exact_fp8")
def test_with_a_pool_in_fp8_nan_stays_nan_and_what_float16_does_not_hold_stays_finite() -> None:
    check_fp8_extremes(TRITON)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "rotary_dim"), [((2, 1, 16, 16), 16), ((9, 3, 24, 24), 24), ((9, 9, 16, 16), 8)])
def test_projections_are_rotated_and_written(
    shape: Shape, rotary_dim: int, dtype: torch.dtype, has_norms: bool
) -> None:
    check_projected(TRITON, shape, rotary_dim, has_norms=has_norms, dtype=dtype)


@pytest.mark.usefixtures("exact_fp8")
def test_projections_are_written_to_a_pool_in_fp8() -> None:
    check_projected(TRITON, (9, 3, 24, 24), 24, has_norms=True, dtype=torch.float32, pool_dtype=FP8)


@pytest.mark.parametrize("window", [None, 300])
def test_a_row_does_not_depend_on_the_other_rows(window: int | None) -> None:
    rows = [(300, 1), (30, 9), (600, 1), (5, 5)]
    together, _ = attend(TRITON, rows, shape=(2, 1, 16, 16), window=window)
    alone, _ = attend(TRITON, rows, shape=(2, 1, 16, 16), window=window, num_kept=2)
    assert torch.equal(alone, together[:10])


@pytest.mark.parametrize("window", [0, 300])
def test_the_chunks_of_many_rows_are_listed_in_order(window: int) -> None:
    positions, tokens = torch.arange(160).mul(17).remainder(1000).view(1, -1), list(range(7, 138))
    tokens[3] = tokens[128] = tokens[130] = -1  # no token
    decodes = torch.tensor([[row, token, 0, 0] for row, token in enumerate(tokens)], dtype=torch.int32)
    rows = Rows(decodes[:0], decodes, decodes.new_zeros(2000, 4), decodes.new_zeros(1), window, 16)
    rows.cut(positions)
    expected = list[list[int]]()
    for row, token in enumerate(tokens):
        kv_len = int(positions[0, token]) + 1 if token >= 0 else 0
        assert decodes[row].tolist() == [row, token, kv_len, len(expected)]
        first = max(0, kv_len - window) // CHUNK * CHUNK if window else 0
        expected += [[row, token, kv_len, begin] for begin in range(first, kv_len, CHUNK)]
    assert rows.chunks[: rows.num_chunks.item()].tolist() == expected


@pytest.mark.parametrize("window", [None, 40])
def test_a_token_has_the_same_bits_in_a_decode_row_and_in_any_chunk(window: int | None) -> None:
    """Batch-invariant: the last row of each is the same 20 tokens of a prompt, in other parts. A tile has 16."""
    attention = TritonAttention(batch_invariant=True)
    whole, _ = attend(attention, [(300, 20)], shape=(4, 1, 16, 16), window=window)
    for first in (19, 10, 1):
        part, _ = attend(attention, [(300, 20)], shape=(4, 1, 16, 16), window=window, first_token=first)
        assert torch.equal(part, whole[first:])
    check(attention, MIXED, window=window)


@pytest.mark.parametrize(("window", "sink_size"), [(None, 2.0), (40, 200.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_sinks_equal_the_reference(dtype: torch.dtype, window: int | None, sink_size: float) -> None:
    check(TRITON, MIXED, shape=(6, 2, 24, 16), dtype=dtype, window=window, sink_size=sink_size)


def test_a_sink_counts_once_for_all_chunks_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.worker.attention.triton.CHUNKS_AT_ONCE", 2)
    options: dict[str, Any] = {"shape": (2, 1, 16, 16), "sink_size": 2.0}
    check(TRITON, [(600, 1), (30, 9), (300, 1)], **options)
    together, _ = attend(TRITON, [(600, 1), (30, 9), (300, 1)], **options)
    alone, _ = attend(TRITON, [(600, 1), (30, 9), (300, 1)], **options, num_kept=1)
    assert torch.equal(alone, together[:1])
    attention = TritonAttention(batch_invariant=True)
    whole, _ = attend(attention, [(300, 20)], **options)
    part, _ = attend(attention, [(300, 20)], **options, first_token=19)
    assert torch.equal(part, whole[19:])


@pytest.mark.usefixtures("exact_fp8")
def test_attention_sinks_with_a_pool_in_fp8_equal_the_reference() -> None:
    check(TRITON, MIXED, shape=(4, 2, 16, 16), pool_dtype=FP8, sink_size=2.0)


def test_projections_are_rotated_for_attention_with_sinks() -> None:
    check_projected(TRITON, (4, 2, 16, 16), 16, has_norms=False, has_sinks=True, dtype=torch.float32)


@triton.jit
def store_offset(block, offset, output, block_stride, token_stride):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
    place = locate(output, tl.load(block), tl.load(offset), 3, block_stride, token_stride)
    tl.store(output, (place.to(tl.int64) - output.to(tl.int64)) // 8)


def test_offsets_into_the_pool_exceed_31_bits() -> None:
    output = torch.zeros(1, dtype=torch.int64)
    block, offset = torch.tensor([3_000_000], dtype=torch.int32), torch.tensor([255], dtype=torch.int32)
    store_offset[(1,)](block, offset, output, 256 * 8192, 8192)
    assert output.item() == 3_000_000 * 256 * 8192 + 255 * 8192 + 3
