"""Linear layers whose weights are codes of quantized checkpoints, on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.worker.kernels.library import Kernels
from millrace.worker.linear import choice
from millrace.worker.linear.choice import pack_linear, round_inputs
from millrace.worker.linear.codes import CodedWeight, Codes, pack_halves
from millrace.worker.linear.packed import CodedLinear, CompiledLinear, TorchLinear

SHAPES = [(64, 50, 64), (776, 16, 160), (1024, 200, 128), (1920, 70, 384), (200, 49, 200), (512, 33, 16)]
"""Inputs, outputs and inputs of a group: groups of whole vectors and not, the last one shorter, and one for all."""
KINDS = ("table", "4 bits", "4 bits, zeros", "8 bits", "8 bits, zeros", "float8")
ROWS = (1, 5, 33, 300)


@pytest.fixture
def kernels(all_kernels: Kernels) -> Kernels:
    return all_kernels


def make_codes(kind: str, shape: tuple[int, int, int], *, in_order: bool = True) -> Codes:
    num_inputs, num_outputs, size = shape
    torch.manual_seed(num_inputs + num_outputs)
    groups = (torch.arange(num_inputs) // size).int()
    num_groups, table, zeros = int(groups.max()) + 1, None, None
    if not in_order:
        groups = groups[torch.randperm(num_inputs)]
    if kind.endswith("zeros"):
        zeros = torch.randint(0, 17, (num_outputs, num_groups)).float()
    if kind.startswith("8"):
        codes = torch.randint(-128, 128, (num_outputs, num_inputs)).to(torch.int8)
    elif kind == "float8":
        codes = (torch.randn(num_outputs, num_inputs) * 100).to(torch.float8_e4m3fn)
        small = torch.arange(-20, 20) * 2.0**-9
        codes[-1, : len(small)] = small.to(torch.float8_e4m3fn)
    else:
        codes = pack_halves(torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8))
        table = torch.randn(16) if kind == "table" else torch.arange(16).float() - (0 if zeros is not None else 8)
    return Codes(codes, table, torch.rand(num_outputs, num_groups) + 0.1, zeros, groups)


def make_layer(codes: Codes, kernels: Kernels, dtype: torch.dtype) -> CodedLinear:
    bias = torch.randn(codes.shape[0])
    return CodedLinear(CodedWeight(codes, dtype), bias, kernels, dtype, torch.float32)


def relative(difference: Tensor, expected: Tensor) -> float:
    return float(difference.abs().max() / expected.std())


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_numbers(
    kernels: Kernels, kind: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    codes = make_codes(kind, shape)
    layer = make_layer(codes, kernels, dtype)
    assert layer.bias is not None
    for rounds in (False, True):
        layer.rounds_inputs = rounds
        assert layer.rounds_inputs == (rounds and layer.can_round)
        for num_rows in ROWS:
            inputs = torch.randn(num_rows, shape[0]).to(dtype)
            expected = F.linear(inputs.double(), codes.numbers().double(), layer.bias.double())
            # Weights may be rounded to bfloat16, or else inputs to 15 bits of the largest one.
            limit = 1e-3 if layer.rounds_inputs else 1e-5 if dtype == torch.float32 else 0.03
            assert relative(layer.forward(inputs) - expected, expected) < limit


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_groups_may_be_in_any_order(kernels: Kernels, kind: str) -> None:
    codes = make_codes(kind, (512, 70, 64), in_order=False)
    layer, inputs = make_layer(codes, kernels, torch.float32), torch.randn(7, 512)
    assert not layer.can_round
    expected = F.linear(inputs, codes.numbers(), layer.bias)
    assert relative(layer.forward(inputs) - expected, expected) < 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_others(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    layer, inputs = make_layer(make_codes(kind, (512, 70, 128)), kernels, dtype), torch.randn(300, 512).to(dtype)
    for layer.rounds_inputs in (False, True):
        expected = layer.forward(inputs)
        for first, last in ((0, 1), (3, 5), (7, 20), (100, 140)):
            assert torch.equal(layer.forward(inputs[first:last]), expected[first:last])


@torch.inference_mode()
def test_without_rounding_the_bits_are_those_of_packed_weights(kernels: Kernels) -> None:
    for kind in ("table", "4 bits", "8 bits, zeros"):
        codes = make_codes(kind, (776, 100, 160))
        inputs = torch.randn(33, 776)
        packed = CompiledLinear([codes.numbers()], None, kernels)
        coded = CodedLinear(CodedWeight(codes, torch.float32), None, kernels, torch.float32, torch.float32)
        assert torch.equal(coded.forward(inputs), packed.forward(inputs))


@torch.inference_mode()
def test_layers_that_become_one_keep_their_codes(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_kernels", lambda: kernels)
    if kernels.instruction_set == "generic":
        pytest.skip("torch computes linear layers there")
    first, second = (make_codes("4 bits, zeros", (256, num_outputs, 64)) for num_outputs in (96, 41))
    weights = [CodedWeight(each, torch.float32) for each in (first, second)]
    layer, inputs = pack_linear(weights), torch.randn(9, 256)
    assert isinstance(layer, CodedLinear)
    expected = F.linear(inputs, torch.cat([first.numbers(), second.numbers()]))
    assert relative(layer.forward(inputs) - expected, expected) < 1e-5
    round_inputs([layer])
    assert layer.rounds_inputs
    assert 0 < relative(layer.forward(inputs) - expected, expected) < 1e-3
    other = CodedWeight(make_codes("8 bits", (256, 41, 64)), torch.float32)
    mixed = pack_linear([weights[0], other])  # of two kinds: they become numbers
    assert isinstance(mixed, CompiledLinear)
    expected = F.linear(inputs, torch.cat([first.numbers(), other.numbers()]))
    assert relative(mixed.forward(inputs) - expected, expected) < 1e-5


def test_other_results_with_rounded_inputs_are_not_taken(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "LARGEST_ROUNDED_DIFFERENCE", {torch.float32: 1e-7})
    layer = make_layer(make_codes("4 bits", (256, 64, 64)), kernels, torch.float32)
    round_inputs([layer, TorchLinear(torch.zeros(2, 2), None)])
    assert not layer.rounds_inputs
    assert "so they are not rounded" in caplog.text


def test_a_weight_gives_its_numbers_to_every_operation() -> None:
    for kind in KINDS:
        codes = make_codes(kind, (64, 24, 16))
        weight, numbers = CodedWeight(codes, torch.bfloat16), codes.numbers(torch.bfloat16)
        inputs = torch.randn(3, 64).bfloat16()
        assert torch.equal(F.linear(inputs, weight), F.linear(inputs, numbers))
        assert torch.equal(weight * 2, numbers * 2)
        assert torch.equal(weight.view(6, 4, 64)[:, 1], numbers.view(6, 4, 64)[:, 1])
        rows = torch.tensor([5, 0, 23])
        for kept, expected in (
            (weight[3:7], numbers[3:7]),
            (weight[-4:], numbers[-4:]),
            (weight[:, 16:48], numbers[:, 16:48]),
            (weight[rows], numbers[rows]),
            (weight[:, 32:].clone(), numbers[:, 32:]),
            (torch.cat([weight[:5], weight[9:]]), torch.cat([numbers[:5], numbers[9:]])),
            (torch.nn.Parameter(weight, requires_grad=False), numbers),
        ):
            assert isinstance(kept, CodedWeight)
            assert kept.shape == expected.shape
            assert torch.equal(kept.numbers(), expected)
        experts, stacked = (
            torch.stack([weight, weight[rows[[0] * 24]]]),
            torch.stack([numbers, numbers[rows[[0] * 24]]]),
        )
        for kept, expected in (
            (experts, stacked),
            (experts[1], stacked[1]),
            (experts[rows[1:2]], stacked[rows[1:2]]),
            (next(iter(experts)), stacked[0]),
            (torch.cat([experts, experts], dim=1), torch.cat([stacked, stacked], dim=1)),
            (torch.cat([experts, experts], dim=-2)[0, :3], torch.cat([stacked, stacked], dim=-2)[0, :3]),
        ):
            assert isinstance(kept, CodedWeight)
            assert kept.shape == expected.shape
            assert torch.equal(kept.numbers(), expected)
        for plain, expected in (
            (weight[::2], numbers[::2]),
            (weight[:, 1:5], numbers[:, 1:5]),
            (torch.cat([weight, weight], dim=-1), torch.cat([numbers, numbers], dim=-1)),
            (torch.cat([weight, numbers]), torch.cat([numbers, numbers])),
        ):
            assert not isinstance(plain, CodedWeight)
            assert torch.equal(plain, expected)
        assert weight.nbytes < numbers.nbytes


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_keeps_the_codes_of_its_part(kernels: Kernels, kind: str) -> None:
    codes = make_codes(kind, (512, 70, 64))
    whole, inputs = CodedWeight(codes, torch.float32), torch.randn(5, 256)
    for part, numbers in (
        (whole[:, 256:], codes.numbers()[:, 256:]),
        (whole[35:, 128:384], codes.numbers()[35:, 128:384]),
    ):
        assert isinstance(part, CodedWeight)
        assert part.coded.group_size == 64
        layer = CodedLinear(part, None, kernels, torch.float32, torch.float32)
        expected = F.linear(inputs, numbers)
        assert relative(layer.forward(inputs) - expected, expected) < 1e-5
