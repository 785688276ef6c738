"""Batch-invariant linear layers in Triton against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from millrace.worker.linear.linear_triton import TritonLinear
from tests.worker.attention.paged import TOLERANCES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(1, 1), (64, 128), (100, 33), (200, 300)])
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
    peaks, token_ids = plain.argmax(inputs)
    assert torch.equal(peaks, together.float().amax(dim=1)) and torch.equal(token_ids, together.float().argmax(dim=1))


def test_weights_of_another_dtype_are_converted() -> None:
    weight, inputs = torch.randn(40, 24).half(), torch.randn(3, 24)
    outputs = TritonLinear(weight, None, torch.float32).forward(inputs)
    torch.testing.assert_close(outputs, F.linear(inputs, weight.float()), rtol=1e-5, atol=1e-5)
