"""Triton's row operations against torch's: on a GPU, and in Triton's interpreter (`tests/worker/test_interpreted.py`)."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest
import torch

from millrace.worker.kernels import rows_torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, HALF = ("cpu", torch.float16) if IS_INTERPRETED else ("cuda", torch.bfloat16)
"""The interpreter rounds bfloat16 wrongly."""

if not IS_INTERPRETED:
    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.fixture(scope="module")
def rows_triton() -> ModuleType:
    return importlib.import_module("millrace.worker.kernels.rows_triton")


@pytest.fixture(params=[torch.float32, HALF])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    epsilon = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, theirs, atol=64 * epsilon, rtol=4 * epsilon)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("size", [1, 24, 1000])
def test_norms(rows_triton: ModuleType, size: int, adds: bool, dtype: torch.dtype) -> None:
    inputs, weights = random(5, size, dtype=dtype), random(size, dtype=torch.float32, seed=1)
    ours, theirs = random(5, size, dtype=dtype, seed=2), random(5, size, dtype=dtype, seed=2)
    rows_triton.rms_norm(weights, 1e-5, inputs, ours, adds=adds)
    rows_torch.rms_norm(weights, 1e-5, inputs, theirs, adds=adds)
    check(ours, theirs)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 1500])
def test_activations(rows_triton: ModuleType, size: int, activation: str, dtype: torch.dtype) -> None:
    inputs = random(4, 2 * size, dtype=dtype) * 3
    ours, theirs = torch.empty(2, 4, size, dtype=dtype, device=DEVICE)
    rows_triton.gated_activation(activation, inputs, ours)
    rows_torch.gated_activation(activation, inputs, theirs)
    check(ours, theirs)


def test_a_step_without_rows_does_nothing(rows_triton: ModuleType) -> None:
    empty = torch.empty(0, 8, device=DEVICE)
    rows_triton.rms_norm(torch.ones(8, device=DEVICE), 1e-6, empty, empty)
    rows_triton.gated_activation("silu", torch.empty(0, 16, device=DEVICE), empty)
