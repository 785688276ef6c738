"""The compiled linear layer against torch's, on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from millrace.worker.kernels.library import Kernels
from millrace.worker.linear import CompiledLinear

SHAPES = [(1, 1), (3, 2), (15, 5), (16, 6), (17, 7), (64, 64), (100, 13), (768, 12), (769, 4), (1600, 9), (48, 1000)]
"""Inputs and outputs: below, at and above the sizes of vectors, tiles and spans."""


def make_linear(shape: tuple[int, int], dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Linear:
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    linear = nn.Linear(*shape, bias=bias, dtype=dtype)
    for parameter in linear.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return linear


def make_inputs(num_rows: int, linear: nn.Linear) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, linear.in_features, generator=generator).to(linear.weight.dtype)


@torch.inference_mode()
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_equals_torchs(kernels: Kernels, shape: tuple[int, int], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    try:
        for num_rows in (1, 2, 3, 4, 5, 11, 33, 300):
            for bias in (True, False):
                linear = make_linear(shape, bias=bias)
                inputs = make_inputs(num_rows, linear)
                expected = F.linear(inputs.double(), linear.weight.double(), linear.bias.double() if bias else None)
                outputs = CompiledLinear(linear, kernels).forward(inputs)
                torch.testing.assert_close(outputs.double(), expected, rtol=1e-5, atol=1e-6 * shape[0])
    finally:
        torch.set_num_threads(1)


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_summed_in_float32_and_rounded_once(kernels: Kernels, shape: tuple[int, int]) -> None:
    for num_rows in (1, 4, 7, 40):
        linear = make_linear(shape, torch.bfloat16)
        inputs = make_inputs(num_rows, linear)
        expected = F.linear(inputs.double(), linear.weight.double(), linear.bias.double())
        outputs = CompiledLinear(linear, kernels).forward(inputs)
        assert outputs.dtype == torch.bfloat16
        torch.testing.assert_close(outputs.double(), expected, rtol=2**-8, atol=1e-6 * shape[0])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(288, 96), (1100, 50)])
def test_a_row_has_the_same_bits_with_any_other_rows(
    kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    linear = make_linear(shape, dtype)
    compiled = CompiledLinear(linear, kernels)
    inputs = make_inputs(600, linear)
    together = compiled.forward(inputs)
    for num_rows in (1, 2, 3, 4, 5, 6, 64, 257):
        first = 600 - num_rows
        assert torch.equal(compiled.forward(inputs[first:]), together[first:]), num_rows


@torch.inference_mode()
def test_not_a_number_stays_in_its_row_and_output(kernels: Kernels) -> None:
    linear = make_linear((40, 8))
    linear.weight[7] = float("inf")
    inputs = make_inputs(9, linear)
    inputs[4, 39] = float("nan")
    outputs = CompiledLinear(linear, kernels).forward(inputs)
    assert outputs[4].isnan().all()
    others = outputs[[0, 1, 2, 3, 5, 6, 7, 8]]
    assert others[:, :7].isfinite().all()
    assert not others[:, 7].isfinite().any()
