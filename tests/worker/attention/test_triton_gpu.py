"""Attention in Triton on a GPU, against the reference there. `tests/worker/interpreted` has more shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from millrace.worker.attention.interface import Attention
from millrace.worker.attention.select import choose_attention
from millrace.worker.kv_pool import FP8
from tests.worker.attention.paged import MIXED, Shape, attend, check, check_fp8_extremes, check_projected

if TYPE_CHECKING:
    from millrace.worker.attention.triton import TritonAttention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

LARGE, SMALL = (16, 8, 128, 128), (6, 2, 24, 16)


@pytest.fixture
def triton() -> Attention:
    return choose_attention("triton", torch.device("cuda"))


@pytest.mark.parametrize(
    ("dtype", "pool_dtype", "shape", "window", "softcap", "block_size"),
    [
        (torch.bfloat16, torch.bfloat16, LARGE, None, None, 16),
        (torch.bfloat16, torch.bfloat16, (7, 1, 64, 64), 40, None, 32),
        (torch.bfloat16, torch.bfloat16, (4, 2, 256, 256), None, 2.0, 256),
        (torch.bfloat16, FP8, LARGE, 270, None, 16),
        (torch.bfloat16, FP8, (4, 2, 256, 256), None, 2.0, 16),
        (torch.float16, FP8, (16, 2, 64, 64), None, None, 32),
        (torch.float32, FP8, SMALL, None, None, 16),
        (torch.float16, torch.float16, SMALL, 40, 5.0, 16),
        (torch.float32, torch.float32, SMALL, 270, None, 256),
        (torch.float32, torch.bfloat16, LARGE, None, None, 16),
    ],
)
def test_decodes_and_chunks_equal_the_reference(
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    shape: Shape,
    window: int | None,
    softcap: float | None,
    block_size: int,
    triton: Attention,
) -> None:
    options = {"dtype": dtype, "pool_dtype": pool_dtype, "window": window, "softcap": softcap, "block_size": block_size}
    check(triton, MIXED, shape=shape, device="cuda", **options)


@pytest.mark.parametrize("sink_size", [2.0, 200.0])
@pytest.mark.parametrize(
    ("dtype", "pool_dtype", "shape", "window"),
    [
        (torch.bfloat16, torch.bfloat16, (64, 8, 64, 64), 128),
        (torch.bfloat16, torch.bfloat16, LARGE, None),
        (torch.bfloat16, FP8, (64, 8, 64, 64), None),
        (torch.float16, torch.float16, SMALL, 40),
        (torch.float32, torch.float32, SMALL, None),
    ],
)
def test_attention_sinks_equal_the_reference(
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    shape: Shape,
    window: int | None,
    sink_size: float,
    triton: Attention,
) -> None:
    options = {"dtype": dtype, "pool_dtype": pool_dtype, "window": window, "sink_size": sink_size}
    check(triton, MIXED, shape=shape, device="cuda", **options)
    check(triton, [(2100, 1), (1, 1), (600, 1)], shape=shape, device="cuda", **options)


@pytest.mark.parametrize("value_size", [1e-5, 1e4])
def test_small_and_large_values_in_fp8_equal_the_reference(value_size: float, triton: Attention) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "pool_dtype": FP8, "device": "cuda"}
    check(triton, MIXED, shape=LARGE, value_size=value_size, **options)


def test_with_a_pool_in_fp8_nan_stays_nan_and_what_float16_does_not_hold_stays_finite(triton: Attention) -> None:
    check_fp8_extremes(triton, "cuda")


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "rotary_dim"), [(LARGE, 128), ((9, 3, 24, 24), 24), ((32, 32, 96, 96), 72)])
def test_projections_are_rotated_and_written(
    shape: Shape, rotary_dim: int, dtype: torch.dtype, has_norms: bool, triton: TritonAttention
) -> None:
    check_projected(triton, shape, rotary_dim, has_norms=has_norms, dtype=dtype, device="cuda")


def test_projections_are_written_to_a_pool_in_fp8(triton: TritonAttention) -> None:
    check_projected(triton, LARGE, 128, has_norms=True, dtype=torch.bfloat16, pool_dtype=FP8, device="cuda")


@pytest.mark.parametrize("window", [None, 5000])
@pytest.mark.parametrize("shape", [LARGE, (24, 3, 64, 64), (10, 2, 80, 80)])
def test_long_rows_beside_short_ones_equal_the_reference_in_every_call(
    shape: Shape, window: int | None, triton: Attention
) -> None:
    """Some hundred programs share the chunks of these rows. A race would show in some of the calls."""
    rows = [(length, 1) for length in (9000, 1, 2100, 256, 2048, 2049, 600, 200, 300, 257, 100)]
    options: dict[str, Any] = {"shape": shape, "window": window, "block_size": 256}
    options |= {"dtype": torch.bfloat16, "device": "cuda"}
    check(triton, rows, **options)
    first, _ = attend(triton, rows, **options)
    assert all(torch.equal(attend(triton, rows, **options)[0], first) for _ in range(10))


@pytest.mark.parametrize("window", [None, 300])
def test_a_row_does_not_depend_on_the_other_rows(window: int | None, triton: Attention) -> None:
    rows = [(300, 1), (30, 9), (600, 1), (5, 5)]
    options = {"shape": LARGE, "dtype": torch.bfloat16, "window": window, "device": "cuda"}
    together, _ = attend(triton, rows, **options)  # type: ignore[arg-type]
    alone, _ = attend(triton, rows, num_kept=2, **options)  # type: ignore[arg-type]
    assert torch.equal(alone, together[:10])


def test_other_lengths_of_sequences_compile_nothing_again(triton: Attention) -> None:
    from millrace.worker.attention import triton as launches

    names = ("write_kv", "cut_decodes", "decode_chunks", "merge_chunks", "prefill")
    kernels = [getattr(launches, name) for name in names]

    def num_compiled() -> int:
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    check(triton, MIXED, shape=LARGE, dtype=torch.bfloat16, device="cuda")
    before = num_compiled()
    for rows in ([(5, 1), (7, 3)], [(256, 1), (256, 1), (256, 256)], [(300, 1), (9, 1), (8, 8), (6, 2)]):
        check(triton, rows, shape=LARGE, dtype=torch.bfloat16, device="cuda")
    assert num_compiled() == before
