"""The compiled linear layer against torch's, on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from millrace.worker.kernels import sampling
from millrace.worker.kernels.library import Kernels
from millrace.worker.linear.packed import CompiledLinear, RowMasks
from tests.worker.kernels.masks import masked, random_masks

SHAPES = [(1, 1), (3, 2), (15, 5), (16, 8), (17, 47), (64, 48), (100, 49), (384, 12), (385, 96), (1024, 9), (48, 1000)]
"""Inputs and outputs: below, at and above the sizes of vectors, panels and spans."""
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 33, 300)


@pytest.fixture
def kernels(all_kernels: Kernels) -> Kernels:
    return all_kernels


def make_linear(shape: tuple[int, int], dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Linear:
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    linear = nn.Linear(*shape, bias=bias, dtype=dtype)
    for parameter in linear.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return linear


def pack(linear: nn.Linear, kernels: Kernels, dtype: torch.dtype | None = None) -> CompiledLinear:
    return CompiledLinear([linear.weight], linear.bias, kernels, dtype)


def make_inputs(num_rows: int, linear: nn.Linear) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, linear.in_features, generator=generator).to(linear.weight.dtype)


@torch.inference_mode()
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_equals_torchs(kernels: Kernels, shape: tuple[int, int], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    try:
        for num_rows in ROWS:
            for bias in (True, False):
                linear = make_linear(shape, bias=bias)
                inputs = make_inputs(num_rows, linear)
                expected = F.linear(inputs.double(), linear.weight.double(), linear.bias.double() if bias else None)
                outputs = pack(linear, kernels).forward(inputs)
                torch.testing.assert_close(outputs.double(), expected, rtol=1e-5, atol=1e-6 * shape[0])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_weights_can_be_read_by_output(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    linear, generator = make_linear(shape, dtype), torch.Generator().manual_seed(0)
    output_ids = torch.cat([torch.tensor([0, shape[1] - 1]), torch.randint(shape[1], (300,), generator=generator)])
    rows = torch.empty(len(output_ids), shape[0], dtype=dtype)
    pack(linear, kernels).weight_rows(output_ids, rows)
    assert torch.equal(rows, linear.weight[output_ids])


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_summed_in_float32_and_rounded_once(kernels: Kernels, shape: tuple[int, int]) -> None:
    for num_rows in (1, 4, 7, 23, 40):
        linear = make_linear(shape, torch.bfloat16)
        inputs = make_inputs(num_rows, linear)
        expected = F.linear(inputs.double(), linear.weight.double(), linear.bias.double())
        outputs = pack(linear, kernels).forward(inputs)
        assert outputs.dtype == torch.bfloat16
        torch.testing.assert_close(outputs.double(), expected, rtol=2**-8, atol=1e-6 * shape[0])


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_weights_take_float32_inputs(kernels: Kernels, shape: tuple[int, int]) -> None:
    for num_rows in (1, 4, 7, 23, 40):
        linear = make_linear(shape, torch.bfloat16)
        inputs = torch.randn(num_rows, shape[0], generator=torch.Generator().manual_seed(num_rows))
        expected = F.linear(inputs.double(), linear.weight.double(), linear.bias.double())
        outputs = pack(linear, kernels, torch.float32).forward(inputs)
        assert outputs.dtype == torch.float32
        torch.testing.assert_close(outputs.double(), expected, rtol=1e-5, atol=1e-6 * shape[0])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(5, 60, 3), (48, 1, 96), (100,), (1, 1, 1)])
@pytest.mark.parametrize("num_inputs", [1, 64, 131])
def test_several_weights_are_packed_one_after_the_other(
    kernels: Kernels, sizes: tuple[int, ...], num_inputs: int, dtype: torch.dtype
) -> None:
    weights = [torch.randn(size, num_inputs).to(dtype) for size in sizes]
    weights[0] = weights[0].t().contiguous().t()
    inputs = torch.randn(9, num_inputs).to(dtype)
    together = CompiledLinear([torch.cat(weights)], None, kernels).forward(inputs)
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(CompiledLinear(weights, None, kernels).forward(inputs), together)
    torch.set_num_threads(1)
    expected = inputs.double() @ torch.cat(weights).double().t()
    torch.testing.assert_close(together.double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_added_to_the_outputs(kernels: Kernels, dtype: torch.dtype) -> None:
    linear = make_linear((400, 50), dtype)
    packed = pack(linear, kernels)
    for num_rows in (1, 9):
        inputs = make_inputs(num_rows, linear)
        before = torch.randn(num_rows, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
        outputs = before.clone()
        packed.into(inputs, outputs, accumulate=True)
        expected = F.linear(inputs.double(), linear.weight.double(), linear.bias.double()) + before.double()
        torch.testing.assert_close(
            outputs.double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=4e-4
        )


@torch.inference_mode()
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("shape", [*SHAPES, (8, 3000)])
def test_the_argmax_is_that_of_the_stored_outputs(kernels: Kernels, shape: tuple[int, int], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    try:
        packed = pack(make_linear(shape), kernels)
        for num_rows in (1, 5, 300):
            inputs = torch.randn(num_rows, shape[0], generator=torch.Generator().manual_seed(num_rows)).round()
            peaks, token_ids = packed.argmax(inputs)
            expected_peaks, expected_ids = sampling.argmax(kernels, packed.forward(inputs))
            assert torch.equal(peaks, expected_peaks)
            assert torch.equal(token_ids, expected_ids)
    finally:
        torch.set_num_threads(1)


def wild_inputs(num_inputs: int) -> torch.Tensor:
    inputs = torch.randn(9, num_inputs, generator=torch.Generator().manual_seed(9))
    inputs[1], inputs[2, 0], inputs[3, 1], inputs[4, 2] = 0.0, torch.nan, torch.inf, 3.4e38
    inputs[5] *= 1e-25
    inputs[6] *= 1e-42
    inputs[7] *= 1e30
    return inputs


@torch.inference_mode()
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("weights", ["random", "alike", "equal", "tiny", "wild"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_screened_argmax_is_that_of_all_outputs(
    kernels: Kernels, weights: str, dtype: torch.dtype, num_threads: int
) -> None:
    linear = make_linear((37, 3001), dtype, bias=False)
    weight = linear.weight.data
    if weights == "alike":
        weight[:] = weight[0] + 1e-5 * weight
    elif weights == "equal":
        weight[1500:3000] = weight[:1500]
    elif weights == "tiny":
        weight *= 1e-30
    elif weights == "wild":
        weight[700, 3], weight[900, 4], weight[1700, 5], weight[2999] = torch.nan, torch.inf, 3.4e38, 1e-41
    exact, screened = (pack(linear, kernels, torch.float32) for _ in range(2))
    screened.screen_argmax()
    torch.set_num_threads(num_threads)
    try:
        for inputs in (*(make_inputs(num_rows, linear).float() for num_rows in (1, 5, 300)), wild_inputs(37)):
            for found, expected in zip(screened.argmax(inputs), exact.argmax(inputs), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    finally:
        torch.set_num_threads(1)


@torch.inference_mode()
def test_a_screened_argmax_computes_only_panels_that_can_have_it(kernels: Kernels) -> None:
    linear = make_linear((32, 3000), bias=False)
    packed, inputs = pack(linear, kernels), make_inputs(20, linear)
    packed.screen_argmax()
    assert packed._screen is not None
    rounded, _, errors = packed._screen
    errors.zero_()
    rounded = rounded.view(torch.int8).zero_()
    width = kernels.table.panel_outputs
    rounded[3] = 1  # now only this panel seems to have outputs that are not 0
    inputs = inputs.abs()
    _, found = packed.argmax(inputs)
    assert torch.equal(found, 3 * width + packed.forward(inputs)[:, 3 * width : 4 * width].argmax(dim=1))


@torch.inference_mode()
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("screens", [False, True])
@pytest.mark.parametrize("shares", [(-1.0,), (1.0,), (0.0, 0.5, -1.0), (0.001, 0.1, 0.95)])
def test_a_masked_argmax_is_that_of_the_stored_outputs_that_are_allowed(
    kernels: Kernels, shares: tuple[float, ...], screens: bool, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    try:
        for shape in ((1, 1), (64, 48), (17, 47), (385, 96), (37, 3001)):
            linear = make_linear(shape, bias=shape[1] < 90)
            linear.weight.data[shape[1] // 2 :] = linear.weight.data[: shape[1] - shape[1] // 2].clone()  # equal ones
            packed = pack(linear, kernels)
            if screens and linear.bias is None:
                packed.screen_argmax()
            for num_rows in (1, 2, 5, 61):
                inputs, masks = make_inputs(num_rows, linear), random_masks(num_rows, shape[1], shares)
                expected = sampling.argmax(kernels, masked(packed.forward(inputs), masks))
                for found, wanted in zip(packed.argmax(inputs, masks), expected, strict=True):
                    assert torch.equal(found, wanted)
                free = sampling.argmax(kernels, packed.forward(inputs))
                assert torch.equal(packed.argmax(inputs)[1], free[1])  # a call leaves no masks behind
    finally:
        torch.set_num_threads(1)


@torch.inference_mode()
def test_a_masked_argmax_computes_only_panels_with_an_allowed_output(kernels: Kernels) -> None:
    linear = make_linear((32, 3000), bias=False)
    width = kernels.table.panel_outputs
    linear.weight.data[2 * width :] = torch.nan  # it would be reported
    packed, inputs = pack(linear, kernels), make_inputs(20, linear)
    bits = torch.zeros(20, 376, dtype=torch.uint8)
    bits[:, 0], bits[:, 3 * width // 8] = 2, 1
    masks = RowMasks(torch.arange(20), bits)
    assert packed.argmax(inputs, masks)[0].isnan().all()
    bits[:, 3 * width // 8] = 0
    assert packed.argmax(inputs, masks)[1].tolist() == [1] * 20


@torch.inference_mode()
@pytest.mark.parametrize("num_threads", [1, 3])
def test_of_equal_outputs_the_lowest_id_wins_and_a_nan_is_reported(kernels: Kernels, num_threads: int) -> None:
    weight = torch.zeros(200, 4)
    weight[[60, 131, 199], 0] = 1.0
    weight[:, 1] = -torch.inf
    weight[77, 2] = torch.nan
    packed = CompiledLinear([weight], None, kernels)
    inputs = torch.zeros(4, 4)
    inputs[0, 0] = 2.0
    torch.set_num_threads(num_threads)
    try:
        weight[:, 1:] = 0.0
        peaks, token_ids = CompiledLinear([weight], None, kernels).argmax(inputs)
        assert peaks.tolist() == [2.0, 0.0, 0.0, 0.0]
        assert token_ids.tolist() == [60, 0, 0, 0]
        assert packed.argmax(inputs)[0].isnan().all()
        bias = torch.full((200,), -torch.inf)
        peaks, token_ids = CompiledLinear([weight], bias, kernels).argmax(inputs)
        assert peaks.tolist() == [-torch.inf] * 4
        assert token_ids.tolist() == [0] * 4
    finally:
        torch.set_num_threads(1)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(288, 96), (1100, 50)])
def test_a_row_has_the_same_bits_with_any_other_rows(
    kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    linear = make_linear(shape, dtype)
    compiled = pack(linear, kernels)
    inputs = make_inputs(600, linear)
    together = compiled.forward(inputs)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 23, 64, 257):
        first = 600 - num_rows
        assert torch.equal(compiled.forward(inputs[first:]), together[first:]), num_rows


@torch.inference_mode()
def test_not_a_number_stays_in_its_row_and_output(kernels: Kernels) -> None:
    linear = make_linear((40, 8))
    linear.weight[7] = float("inf")
    inputs = make_inputs(9, linear)
    inputs[4, 39] = float("nan")
    outputs = pack(linear, kernels).forward(inputs)
    assert outputs[4].isnan().all()
    others = outputs[[0, 1, 2, 3, 5, 6, 7, 8]]
    assert others[:, :7].isfinite().all()
    assert not others[:, 7].isfinite().any()


@torch.inference_mode()
@pytest.mark.parametrize("num_inputs", [1, 5, 288, 1023])
def test_a_rounded_output_differs_by_less_than_its_panels_error(kernels: Kernels, num_inputs: int) -> None:
    """What a row's first pass is sure of: the arithmetic of linear.inc.h, done with integers of torch."""
    linear = make_linear((num_inputs, 500), bias=False)
    linear.weight.data[::7] *= 20
    packed = pack(linear, kernels)
    packed.screen_argmax()
    assert packed._screen is not None
    rounded, scales, errors = packed._screen
    integers = rounded.view(torch.int8).unflatten(2, (-1, 4)).permute(0, 2, 1, 3).flatten(2)[..., :num_inputs].double()
    weights = (integers * scales.view(-1, 1, 1)).flatten(0, 1)[:500]
    for scale in (1e-3, 1.0, 1e4):
        inputs = make_inputs(8, linear).double() * scale
        inputs[4:, 0] *= 1000
        factor = inputs.abs().amax(dim=1, keepdim=True) / 16383
        difference = ((inputs / factor).round() * factor @ weights.T - inputs @ linear.weight.double().T).abs()
        bound = inputs.norm(dim=1, keepdim=True) * errors.double().repeat_interleave(rounded.shape[2])[:500]
        assert (difference < bound).all()
        assert (difference > bound / 1000).any()


def quantize(linear: nn.Linear, kernels: Kernels, dtype: torch.dtype | None = None) -> CompiledLinear:
    packed = pack(linear, kernels, dtype)
    packed.quantize()
    return packed


def rounded_weights(weight: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """The weights [N, K] as a quantized layer has them."""
    rows = torch.empty(weight.shape)
    packed = CompiledLinear([weight.float()], None, kernels)
    packed.quantize()
    packed.weight_rows(torch.arange(len(weight)), rows)
    return rows


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantized_weights_are_multiples_of_a_scale_of_each_output(
    kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    linear = make_linear(shape, dtype)
    linear.weight[shape[1] // 2] *= 1000
    linear.weight[shape[1] // 3] = 0
    rows = torch.empty(shape[1], shape[0], dtype=dtype)
    packed = quantize(linear, kernels)
    packed.weight_rows(torch.arange(shape[1]), rows)
    assert packed.weights.dtype == torch.int8
    spacing = linear.weight.double().abs().amax(dim=1, keepdim=True) / 127
    difference = (rows.double() - linear.weight.double()).abs()
    assert bool((difference <= spacing * (0.501 if dtype == torch.float32 else 1)).all())
    exact = torch.empty(shape[1], shape[0])
    packed.weight_rows(torch.arange(shape[1]), exact)
    assert torch.equal(exact.to(dtype), rows)


@torch.inference_mode()
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_quantized_layer_is_one_of_the_rounded_weights(
    kernels: Kernels, shape: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    weight_dtype, dtype = dtypes
    try:
        for num_rows in (1, 4, 7, 23, 300):
            for bias in (True, False):
                linear = make_linear(shape, weight_dtype, bias=bias)
                packed, inputs = quantize(linear, kernels, dtype), make_inputs(num_rows, linear).to(dtype)
                inputs[0, 0] *= 100  # the others of this row are rounded by as much more
                weights = rounded_weights(linear.weight, kernels).double()
                expected = F.linear(inputs.double(), weights, linear.bias.double() if bias else None)
                largest = inputs.double().abs().amax(dim=1, keepdim=True) * weights.abs().amax()
                rounding = expected.abs() * (2**-8 if dtype == torch.bfloat16 else 2**-20)
                error = rounding + largest * shape[0] ** 0.5 * 2.0**-13
                outputs = packed.forward(inputs)
                assert outputs.dtype == dtype
                assert bool(((outputs.double() - expected).abs() <= error).all())
                before = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
                added = before.clone()
                packed.into(inputs, added, accumulate=True)
                error += (before.double() + expected).abs() * 2**-8
                assert bool(((added.double() - before.double() - expected).abs() <= error).all())
    finally:
        torch.set_num_threads(1)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_layer_has_the_same_bits_with_any_rows_and_any_instructions(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    linear = make_linear((1100, 50), dtype)
    packed, inputs = quantize(linear, kernels), make_inputs(600, linear)
    together = packed.forward(inputs)
    for num_rows in (1, 2, 7, 8, 15, 16, 17, 64, 257):
        assert torch.equal(packed.forward(inputs[600 - num_rows :]), together[600 - num_rows :]), num_rows
    generic = quantize(linear, Kernels(kernels.library, "generic"))
    assert torch.equal(generic.forward(inputs), together)


@torch.inference_mode()
def test_the_argmax_of_a_quantized_layer_is_that_of_its_outputs(kernels: Kernels) -> None:
    for bias in (True, False):
        linear = make_linear((100, 3001), bias=bias)
        packed = quantize(linear, kernels)
        for num_rows in (1, 5, 61):
            inputs, masks = make_inputs(num_rows, linear), random_masks(num_rows, 3001, (0.0, 0.5, -1.0))
            for chosen in (masks, None):
                logits = packed.forward(inputs)
                expected = sampling.argmax(kernels, masked(logits, masks) if chosen else logits)
                for found, wanted in zip(packed.argmax(inputs, chosen), expected, strict=True):
                    assert torch.equal(found, wanted)


@torch.inference_mode()
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_not_a_number_stays_in_the_row_and_the_output_of_a_quantized_layer(kernels: Kernels, wrong: float) -> None:
    linear = make_linear((70, 60))
    linear.weight[7, 3] = wrong
    inputs = make_inputs(9, linear)
    inputs[4, 69] = wrong
    outputs = quantize(linear, kernels).forward(inputs)
    assert outputs[4].isnan().all()
    assert outputs[:, 7].isnan().all()
    others = outputs[[0, 1, 2, 3, 5, 6, 7, 8]]
    assert others[:, [i for i in range(60) if i != 7]].isfinite().all()
