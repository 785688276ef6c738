"""Chooses what computes a linear layer, and compares it with torch.

Shapes: K inputs, N_i outputs of the i-th of several layers that become one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.worker.errors import ConfigError
from millrace.worker.host_memory import free_host_bytes
from millrace.worker.kernels.library import KERNEL_DTYPES, find_kernels
from millrace.worker.linear.codes import CodedWeight
from millrace.worker.linear.packed import CodedLinear, CompiledLinear, KernelLinear, PackedLinear, TorchLinear

logger = logging.getLogger("millrace.worker")

COMPARED_ROWS, COMPARED_OUTPUTS = (1, 7, 40), 256
"""The results of each shape are compared with torch's at these numbers of rows: the first and the last outputs."""
MANY_ROWS = 300
"""More than a decode step has."""
LEAST_SCREENED_OUTPUTS = 4096
LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Between a packed layer and torch, relative to the standard deviation of the results."""
LARGEST_ROUNDED_DIFFERENCE = {torch.float32: 2e-3, torch.bfloat16: 0.05}
"""The same for a quantized layer, which rounds its inputs, and torch with the rounded weights."""


@torch.no_grad()
def pack_linear(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> PackedLinear:
    """Return a layer of these weights [N_i, K] and biases [N_i].

    The choice between the compiled kernel and torch depends only on the dtypes and on the machine, so that two starts
    round in the same way. The first layer of each shape is compared with torch. Without memory for a packed copy
    torch computes the layer.

    `dtype`: of the inputs; None means that of the weights. `output_dtype`: None means that of the inputs.
    `batch_invariant`: the result of a row must not depend on the others. Raises `ConfigError` without the compiled kernel.
    """
    dtype, bias = dtype or weights[0].dtype, join_biases(weights, biases)
    if any(isinstance(each, CodedWeight) for each in weights):
        weights = [join(weights)]
    packed = _pack(weights, bias, dtype, output_dtype)
    if packed is not None and _is_accepted(packed, weights, bias):
        return packed
    if batch_invariant:
        raise ConfigError("batch_invariant: torch computes linear layers here, with results that depend on the batch")
    return TorchLinear(join(weights), bias, dtype, output_dtype)


def _pack(
    weights: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype, output_dtype: torch.dtype | None
) -> KernelLinear | None:
    """Return a layer that is faster than torch's. None if there is none, or no memory for it."""
    kernels, weight_dtype = find_kernels(), weights[0].dtype
    if kernels is None or kernels.instruction_set == "generic" or not {weight_dtype, dtype} <= set(KERNEL_DTYPES):
        return None
    if 2 * sum(weight.nbytes for weight in weights) >= free_host_bytes():  # the packed copy, and one on the way to it
        _warn_once("there is no memory for packed weights: torch computes linear layers, which is slower")
        return None
    if isinstance(weights[0], CodedWeight):
        return CodedLinear(weights[0], bias, kernels, dtype, output_dtype or dtype)
    return CompiledLinear(weights, bias, kernels, dtype, output_dtype)


def screen_argmax(head: PackedLinear) -> None:
    """Let a head find the largest output from rounded weights first."""
    if not isinstance(head, CompiledLinear) or head.bias is not None or head.dtype != torch.float32:
        return
    has_memory = 2 * head.num_outputs * head.num_inputs < free_host_bytes()  # half of it for what is rounded together
    if head.num_outputs >= LEAST_SCREENED_OUTPUTS and has_memory:
        head.screen_argmax()


@torch.no_grad()
def quantize(layers: Sequence[PackedLinear]) -> None:
    """Round the weights of layers to 8 bits. The first layer of each shape is compared with torch. Raises `ConfigError`
    where the compiled kernel does not compute a layer, and where it differs."""
    began_s = time.perf_counter()
    seen: set[tuple[object, ...]] = set()
    for layer in layers:
        if not isinstance(layer, CompiledLinear):
            raise ConfigError(
                "quantization: torch computes linear layers here, and int8 needs the compiled kernels: leave it out"
            )
        key = layer.num_inputs, layer.num_outputs, layer.row_dtype
        if key in seen:
            layer.quantize()
            continue
        seen.add(key)
        weights = [_rows(layer, first) for first in _ends(layer)]
        layer.quantize()
        rounded = [_rows(layer, first) for first in _ends(layer)]
        is_close = all(map(_is_rounded, rounded, weights))
        if not (is_close and all(_is_like_torch(layer, rounded, layer.bias, num_rows) for num_rows in COMPARED_ROWS)):
            raise ConfigError(
                f"quantization: the compiled kernel differs from torch in linear layers of {layer.num_inputs} inputs and "
                f"{layer.num_outputs} outputs: leave it out"
            )
    seconds = time.perf_counter() - began_s
    logger.info("quantization: the weights of %d linear layers have 8 bits, rounded in %.2f s", len(layers), seconds)


@torch.no_grad()
def round_inputs(layers: Sequence[PackedLinear]) -> None:
    """Let the layers of quantized checkpoints round their inputs where that is faster. The first layer of each shape is
    compared with itself: another result leaves its inputs as they are."""
    is_close: dict[tuple[object, ...], bool] = {}
    for layer in layers:
        if not isinstance(layer, CodedLinear) or not layer.can_round:
            continue
        key = layer.name, layer.num_inputs, layer.num_outputs
        if key not in is_close:
            inputs = [_random_inputs(layer, num_rows) for num_rows in COMPARED_ROWS]
            exact = [layer.forward(each) for each in inputs]
            layer.rounds_inputs = True
            limit = LARGEST_ROUNDED_DIFFERENCE[layer.dtype]
            is_close[key] = all(
                _is_close(limit, layer.forward(each), expected) for each, expected in zip(inputs, exact, strict=True)
            )
        layer.rounds_inputs = is_close[key]
    if not all(is_close.values()):
        logger.warning(
            "the compiled kernel differs from itself with rounded inputs, so they are not rounded: it is slower"
        )


def _ends(layer: CompiledLinear) -> tuple[int, int]:
    """Return the first of the outputs that are compared first, and of those that are compared last."""
    return 0, max(0, layer.num_outputs - COMPARED_OUTPUTS)


def _rows(layer: CompiledLinear, first: int) -> Tensor:  # [N, K]
    """Return the weights of some outputs."""
    output_ids = torch.arange(first, min(first + COMPARED_OUTPUTS, layer.num_outputs), device="cpu")
    dtype = torch.float32 if layer.is_quantized else layer.row_dtype  # without another rounding
    rows = torch.empty(len(output_ids), layer.num_inputs, dtype=dtype, device="cpu")
    layer.weight_rows(output_ids, rows)
    return rows


def _is_rounded(rounded: Tensor, weights: Tensor) -> bool:
    """Whether weights [N, K] differ from the exact ones by at most their spacing. Outputs with NaN or infinity pass."""
    spacing = weights.float().abs().amax(dim=1, keepdim=True) / 127
    return not bool(((rounded.float() - weights.float()).abs() > spacing).any())


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Return one tensor. It is no copy if the tensors follow one another in memory."""
    first, *others = tensors
    if any(isinstance(each, CodedWeight) for each in tensors):
        return torch.cat(list(tensors)) if others else first
    ends = [each.data_ptr() + each.nbytes for each in tensors]
    is_in_order = all(each.data_ptr() == end for each, end in zip(others, ends, strict=False))
    storages = {each.untyped_storage().data_ptr() for each in tensors}
    if is_in_order and len(storages) == 1 and all(each.is_contiguous() for each in tensors):
        return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride()) if others else first
    return torch.cat(list(tensors))


def join_biases(weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None) -> Tensor | None:
    if biases is None or all(bias is None for bias in biases):
        return None
    return join(
        [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
    )


_accepted: dict[tuple[object, ...], bool] = {}
"""Results of the comparisons with torch, by shape."""


def _is_accepted(packed: KernelLinear, weights: Sequence[Tensor], bias: Tensor | None) -> bool:
    """Whether the first and the last outputs of a layer are those of torch. Each shape is compared once."""
    key = (packed.name, bias is None, packed.num_inputs, packed.num_outputs, packed.dtype, weights[0].dtype)
    if key not in _accepted:
        _accepted[key] = all(_is_like_torch(packed, weights, bias, num_rows) for num_rows in COMPARED_ROWS)
        if not _accepted[key]:
            logger.warning(
                "the %s differs from torch in linear layers of %d inputs and %d outputs: torch computes them",
                *(packed.name, packed.num_inputs, packed.num_outputs),
            )
    return _accepted[key]


def is_like_numbers(layer: PackedLinear, weight: CodedWeight, bias: Tensor | None) -> bool:
    """Whether a layer of codes on a GPU gives the results of torch with their numbers, for few rows and for many."""
    numbers, limit = weight.numbers(), LARGEST_DIFFERENCE.get(layer.dtype, LARGEST_DIFFERENCE[torch.bfloat16])
    for num_rows in (*COMPARED_ROWS, MANY_ROWS):
        inputs = _random_inputs(layer, num_rows).to(weight.device)
        outputs = inputs.new_empty(num_rows, layer.num_outputs)
        layer.into(inputs, outputs)
        if not _is_close(limit, outputs, F.linear(inputs, numbers, bias)):
            return False
    return True


def _is_like_torch(packed: KernelLinear, weights: Sequence[Tensor], bias: Tensor | None, num_rows: int) -> bool:
    inputs = _random_inputs(packed, num_rows)
    outputs = packed.forward(inputs)
    first, last = weights[0][:COMPARED_OUTPUTS], weights[-1][-COMPARED_OUTPUTS:]
    is_rounded = isinstance(packed, CompiledLinear) and packed.is_quantized
    limit = (LARGEST_ROUNDED_DIFFERENCE if is_rounded else LARGEST_DIFFERENCE)[packed.dtype]
    return all(
        _is_close(
            limit,
            outputs[:, part],
            F.linear(inputs, weight.to(packed.dtype), None if bias is None else bias[part].to(packed.dtype)),
        )
        for part, weight in ((slice(len(first)), first), (slice(-len(last), None), last))
    )


def _random_inputs(layer: PackedLinear, num_rows: int) -> Tensor:  # [M, K]
    generator, shape = torch.Generator().manual_seed(0), (num_rows, layer.num_inputs)
    return torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator).to(layer.dtype)


def _is_close(limit: float, outputs: Tensor, expected: Tensor) -> bool:
    difference = (outputs.float() - expected.float()).abs().max()
    return bool(difference <= limit * expected.float().square().mean().sqrt())
