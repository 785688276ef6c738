"""Triton's row operations, in Triton's interpreter and on a GPU, against torch's."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from millrace.worker.kernels import rows_torch
from tests.worker.triton_interpreter import interpreted

NAME = "millrace.worker.kernels.rows_triton"
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rows_triton(device: str) -> Iterator[ModuleType]:
    if device == "cuda":
        yield importlib.import_module(NAME)
        return
    with interpreted(NAME, "millrace.worker.launch_triton") as module:
        yield module


@pytest.fixture(params=[torch.float32, "half"], ids=["float32", "half"])
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    """Half: bfloat16 on a GPU. The interpreter rounds it wrongly."""
    return request.param if request.param != "half" else torch.bfloat16 if device == "cuda" else torch.float16


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    epsilon = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, theirs, atol=64 * epsilon, rtol=4 * epsilon)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("size", [1, 24, 1000])
def test_norms(rows_triton: ModuleType, size: int, adds: bool, dtype: torch.dtype, device: str) -> None:
    inputs, weights = (
        random(5, size, dtype=dtype, device=device),
        random(size, dtype=torch.float32, device=device, seed=1),
    )
    ours, theirs = (
        random(5, size, dtype=dtype, device=device, seed=2),
        random(5, size, dtype=dtype, device=device, seed=2),
    )
    rows_triton.rms_norm(inputs, weights, 1e-5, ours, adds)
    rows_torch.rms_norm(inputs, weights, 1e-5, theirs, adds)
    check(ours, theirs)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 1500])
def test_activations(rows_triton: ModuleType, size: int, activation: str, dtype: torch.dtype, device: str) -> None:
    inputs = random(4, 2 * size, dtype=dtype, device=device) * 3
    ours, theirs = torch.empty(4, size, dtype=dtype, device=device), torch.empty(4, size, dtype=dtype, device=device)
    rows_triton.gated_activation(inputs, ours, activation)
    rows_torch.gated_activation(inputs, theirs, activation)
    check(ours, theirs)


def test_a_step_without_rows_does_nothing(rows_triton: ModuleType, device: str) -> None:
    empty = torch.empty(0, 8, device=device)
    rows_triton.rms_norm(empty, torch.ones(8, device=device), 1e-6, empty, False)
    rows_triton.gated_activation(torch.empty(0, 16, device=device), empty, "silu")
