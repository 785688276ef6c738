"""Linear layers in Triton whose weights are codes of quantized checkpoints."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from millrace.worker.attention.reference import ReferenceAttention
from millrace.worker.fusion.device import DeviceOperations
from millrace.worker.fusion.workspace import Workspace
from millrace.worker.kernels import rows_triton
from millrace.worker.linear.codes import CodedWeight
from millrace.worker.linear.codes_triton import CodedTritonLinear, can_multiply
from millrace.worker.linear.linear_triton import TritonLinear
from millrace.worker.linear.packed import TorchLinear
from tests.worker.attention.paged import TOLERANCES
from tests.worker.kernels.test_codes import make_codes

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["4 bits", "4 bits, zeros", "8 bits", "float8"])
@pytest.mark.parametrize("shape", [(128, 33, 64), (200, 40, 200), (512, 70, 128)])
def test_results_are_those_of_the_numbers(kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    codes = make_codes(kind, shape)
    weight = CodedWeight(codes._replace(scales=codes.scales * 1e-3), dtype)
    assert can_multiply(weight)
    bias = torch.randn(shape[1]).to(dtype)
    numbers, tolerance = weight.coded.numbers(), 4 * TOLERANCES[dtype]
    for linear in (TorchLinear, TritonLinear):
        layer = CodedTritonLinear(weight, bias, partial(Workspace(dtype, CPU).rows, "weights"), linear)
        for num_rows in (1, 17, 65, 257):
            inputs = torch.randn(num_rows, shape[0]).to(dtype)
            expected = F.linear(inputs.float(), numbers, bias.float())
            outputs = torch.ones(num_rows, shape[1], dtype=dtype)
            layer.into(inputs, outputs)
            torch.testing.assert_close(outputs.float(), expected, rtol=tolerance, atol=tolerance)
            layer.into(inputs, outputs.fill_(1.0), accumulate=True)
            torch.testing.assert_close(outputs.float(), expected + 1, rtol=tolerance, atol=tolerance)


def test_formats_without_a_kernel_have_none() -> None:
    for codes in (
        make_codes("table", (128, 16, 64)),
        make_codes("8 bits, zeros", (128, 16, 64)),
        make_codes("4 bits", (128, 16, 32)),
        make_codes("4 bits", (128, 16, 64), in_order=False),
    ):
        assert not can_multiply(CodedWeight(codes, torch.float32))


@pytest.mark.parametrize("is_right", [True, False])
def test_modules_become_one_layer_of_codes_or_of_numbers(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_right:
        monkeypatch.setattr(CodedTritonLinear, "into", lambda self, inputs, outputs, accumulate=False: outputs.zero_())
    operations = DeviceOperations(ReferenceAttention(), torch.float32, CPU, rows_triton)
    codes = [make_codes("4 bits, zeros", (128, num_outputs, 64)) for num_outputs in (32, 17)]
    modules = [nn.Linear(128, len(each.codes)).requires_grad_(False) for each in codes]
    biases = torch.cat([module.bias for module in modules])
    for module, each in zip(modules, codes, strict=True):
        module.weight = nn.Parameter(CodedWeight(each, torch.float32), requires_grad=False)
    expected = torch.cat([each.numbers() for each in codes])
    layer = operations.linear(modules)
    assert isinstance(layer, CodedTritonLinear) == is_right
    if is_right:
        assert modules[0].weight.dtype == torch.uint8
        assert {name for name, _ in modules[0].named_parameters()} == {"weight", "bias", "scales", "zeros"}
        assert layer.weights is modules[0].weight  # so that both move
    assert modules[1].weight.numel() == 0
    inputs, outputs = torch.randn(3, 128), torch.empty(3, 49)
    layer.into(inputs, outputs)
    torch.testing.assert_close(outputs, F.linear(inputs, expected, biases), rtol=1e-4, atol=1e-4)
