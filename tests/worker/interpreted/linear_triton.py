"""Linear layers in Triton against torch's: batch-invariant ones, and products of few rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from millrace.worker.kernels import rows_torch
from millrace.worker.linear.linear_triton import FewRowsLinear, TritonLinear
from tests.worker.attention.paged import TOLERANCES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(1, 1), (64, 128), (128, 33), (100, 33), (200, 300)])
def test_a_layer_is_that_of_torch_and_no_row_depends_on_the_others(
    num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_inputs)
    weight = (torch.randn(num_outputs, num_inputs, generator=generator) * num_inputs**-0.5).to(dtype)
    inputs, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((70, num_inputs), (num_outputs,)))
    expected = F.linear(inputs.float(), weight.float())
    tolerance = 2 * TOLERANCES[dtype]
    plain, biased = TritonLinear(weight, None), TritonLinear(weight, bias)
    together = plain.forward(inputs)
    torch.testing.assert_close(together.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(biased.forward(inputs).float(), expected + bias.float(), rtol=tolerance, atol=tolerance)
    for first, last in ((0, 1), (5, 6), (3, 40), (64, 70)):
        assert torch.equal(plain.forward(inputs[first:last]), together[first:last])
    outputs = torch.ones_like(together)
    plain.into(inputs, outputs, accumulate=True)
    torch.testing.assert_close(outputs.float(), expected + 1, rtol=tolerance, atol=tolerance)


def test_weights_of_another_dtype_are_converted() -> None:
    weight, inputs = torch.randn(40, 24).half(), torch.randn(3, 24)
    outputs = TritonLinear(weight, None, torch.float32).forward(inputs)
    torch.testing.assert_close(outputs, F.linear(inputs, weight.float()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("has_norm", "has_bias", "activation"),
    [(False, False, None), (True, False, None), (True, False, "silu"), (True, True, "gelu_tanh")],
)
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"), [(1, 1, 1), (2, 64, 128), (3, 100, 33), (1, 1500, 12), (4, 700, 9)]
)
def test_few_rows_pass_norm_layer_and_activation_at_once(
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    has_norm: bool,
    has_bias: bool,
    activation: str | None,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(num_inputs)
    width = num_outputs * (1 if activation is None else 2)
    weight = (torch.randn(width, num_inputs, generator=generator) * num_inputs**-0.5).to(dtype)
    inputs, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((num_rows, num_inputs), (width,)))
    norm = torch.rand(num_inputs, generator=generator), 1e-3
    normed, expected = inputs.clone(), torch.zeros(num_rows, num_outputs)
    if has_norm:
        rows_torch.rms_norm(*norm, inputs, normed)
    products = F.linear(normed.float(), weight.float(), bias.float() if has_bias else None)
    if activation is None:
        expected = products
    else:
        rows_torch.gated_activation(activation, products, expected)
    layer, outputs = FewRowsLinear(weight, bias if has_bias else None), torch.ones(num_rows, num_outputs, dtype=dtype)
    for accumulate in (False, True):
        assert layer.multiply_few(inputs, outputs, norm if has_norm else None, activation, accumulate=accumulate)
        tolerance = 2 * TOLERANCES[dtype]
        torch.testing.assert_close(outputs.float(), expected * (1 + accumulate), rtol=tolerance, atol=tolerance)


def test_more_rows_are_torchs() -> None:
    layer, inputs = FewRowsLinear(torch.randn(40, 24), None), torch.randn(5, 24)
    outputs = torch.empty(5, 40)
    assert not layer.multiply_few(inputs, outputs)
    layer.into(inputs, outputs)
    assert torch.equal(outputs, torch.mm(inputs, layer.weights.T))
