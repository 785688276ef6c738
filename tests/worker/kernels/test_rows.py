"""Norms and gated activations against torch's, on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.worker.kernels.library import Kernels
from millrace.worker.kernels.rows import GatedActivation, RowNorm

SIZES = [1, 3, 15, 16, 17, 64, 255, 256, 257, 1000]
"""Below, at and above the sizes of vectors and chunks."""
TOLERANCES = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (2**-7, 1e-3)}
FUNCTIONS = {"silu": F.silu, "gelu_tanh": lambda gates: F.gelu(gates, approximate="tanh")}


def make_rows(num_rows: int, size: int, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows * 1000 + size)
    return (factor * torch.randn(num_rows, size, generator=generator)).to(dtype)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("adds", [False, True])
def test_a_norm_is_that_of_torch(kernels: Kernels, size: int, dtype: torch.dtype, adds: bool) -> None:
    for num_rows in (1, 2, 70):
        inputs, before = make_rows(num_rows, size, dtype), make_rows(num_rows + 1, size, dtype)[1:]
        weights = 1 + make_rows(1, size, torch.float32)[0]
        outputs = before.clone()
        RowNorm(kernels, weights, 1e-5, dtype)(inputs, outputs, adds=adds)
        normed = F.rms_norm(inputs.float(), (size,), weights, 1e-5)
        expected = before.float() + normed if adds else normed
        torch.testing.assert_close(outputs.float(), expected, rtol=TOLERANCES[dtype][0], atol=TOLERANCES[dtype][1])


@torch.inference_mode()
def test_a_norm_in_place(kernels: Kernels) -> None:
    rows = make_rows(5, 100, torch.float32)
    expected = F.rms_norm(rows, (100,), torch.ones(100), 1e-6)
    RowNorm(kernels, torch.ones(100), 1e-6, torch.float32)(rows, rows)
    torch.testing.assert_close(rows, expected)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_a_gated_activation_is_that_of_torch(kernels: Kernels, activation: str, size: int, dtype: torch.dtype) -> None:
    for num_rows in (1, 2, 70):
        inputs = make_rows(num_rows, 2 * size, dtype, factor=4.0)
        outputs = torch.empty(num_rows, size, dtype=dtype)
        GatedActivation(kernels, activation, size, dtype)(inputs, outputs)
        gates, values = inputs.double().chunk(2, dim=1)  # in float32, torch's GELU of -8 is 0
        expected = (FUNCTIONS[activation](gates) * values).float()
        torch.testing.assert_close(outputs.float(), expected, rtol=TOLERANCES[dtype][0], atol=TOLERANCES[dtype][1])


@torch.inference_mode()
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_large_gates_and_nan(kernels: Kernels, activation: str) -> None:
    gates = torch.tensor([[float("nan"), 1e30, -1e30, 200.0, -200.0, 0.0]])
    outputs = torch.empty_like(gates)
    GatedActivation(kernels, activation, 6, torch.float32)(torch.cat([gates, torch.ones(1, 6)], dim=1), outputs)
    torch.testing.assert_close(outputs, FUNCTIONS[activation](gates), equal_nan=True, rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_a_nan_stays_in_its_row(kernels: Kernels) -> None:
    rows = make_rows(3, 40, torch.float32)
    rows[1, 7] = float("nan")
    outputs = torch.empty_like(rows)
    RowNorm(kernels, torch.ones(40), 1e-5, torch.float32)(rows, outputs)
    assert outputs.isnan().all(dim=1).tolist() == [False, True, False]
    assert not outputs[[0, 2]].isnan().any()
