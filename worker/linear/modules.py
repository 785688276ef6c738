"""Packs the linear layers of modules: several as one, or each for itself in modules that run as they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from millrace.worker.kernels.library import KERNEL_DTYPES
from millrace.worker.linear.choice import join, join_biases, pack_linear
from millrace.worker.linear.codes import CodedWeight
from millrace.worker.linear.packed import PackedLinear, TorchLinear

IS_READ = "_is_read"
"""The attribute of a parameter that other code than the forward of its own layer reads, as the probe has seen."""


@torch.no_grad()
def use_packed_linear(model: nn.Module, dtype: torch.dtype) -> list[PackedLinear]:
    """Replace the forward of the model's linear layers, and their weights by packed ones. Return the layers that compute in
    `dtype` now.

    `dtype`: of the activations. Modules of derived classes and modules with hooks are left alone. Weights that other
    modules use as well (a tied head, or a router that multiplies by the weights of its layer) keep their unpacked copy.
    """
    shared = _shared_weights(model)
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    layers: list[PackedLinear] = []
    for module in model.modules():
        if not _is_replaceable(module):
            continue
        assert isinstance(module, nn.Linear)
        # A float32 layer has float32 inputs in a bfloat16 model too, such as the router of experts.
        packed = pack_linear([module.weight], [module.bias], dtype=torch.promote_types(module.weight.dtype, dtype))
        if packed.dtype == dtype:
            layers.append(packed)
        if isinstance(packed, TorchLinear):
            continue
        packed.keeps_large_outputs = module is head
        module.forward = packed.forward  # type: ignore[method-assign, assignment]
        if module.weight not in shared:
            module.weight = as_parameter(packed)
    return layers


def pack_modules(
    linears: list[nn.Linear],
    dtype: torch.dtype,
    output_dtype: torch.dtype | None = None,
    *,
    keeps: bool = False,
    batch_invariant: bool = False,
) -> PackedLinear:
    """Return one layer for several. Unless it `keeps` them, the modules get the packed weights instead of their own, so that
    nothing is in memory twice. `batch_invariant`: see `pack_linear`."""
    weights, biases = [each.weight for each in linears], [each.bias for each in linears]
    packed = pack_linear(weights, biases, dtype=dtype, output_dtype=output_dtype, batch_invariant=batch_invariant)
    if not keeps:
        first, *others = linears
        if packed.weights is not first.weight:
            first.weight = as_parameter(packed)
        for each in others:
            each.weight = nn.Parameter(torch.empty(0, dtype=each.weight.dtype, device="cpu"), requires_grad=False)
    return packed


def widened_linear(module: nn.Linear, dtype: torch.dtype, inputs: Tensor) -> Tensor:
    """The forward of a layer whose activations have another dtype than its weights, until these are packed."""
    return F.linear(inputs, module.weight.to(dtype), module.bias)


def as_parameter(layer: PackedLinear) -> nn.Parameter:
    """Return a parameter for a module that is also the `weights` of the layer: `quantize` changes it for both."""
    layer.weights = parameter = nn.Parameter(layer.weights, requires_grad=False)
    return parameter


def merge_modules(linears: list[nn.Linear], dtype: torch.dtype, kind: type[TorchLinear] = TorchLinear) -> PackedLinear:
    """Return one layer of this kind for several, on their device. The first module has the weights of all, and they stay its
    parameters; the others have none."""
    first = linears[0]
    weight = join([each.weight for each in linears])
    if isinstance(weight, CodedWeight):
        weight = weight.numbers()
    if weight is not first.weight:
        give_weight(linears, weight, join_biases([each.weight for each in linears], [each.bias for each in linears]))
    return kind(first.weight, first.bias, dtype)


def give_weight(linears: list[nn.Linear], weight: Tensor, bias: Tensor | None) -> None:
    """Let the first module have the weight and the bias of all, and the others none."""
    first, *others = linears
    first.weight = nn.Parameter(weight, requires_grad=False)
    first.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
    for each in others:
        each.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
        each.register_parameter("bias", None)


def _shared_weights(model: nn.Module) -> set[Tensor]:
    """Return the parameters that several modules have, and those that another module reads."""
    found: set[Tensor] = set()
    shared: set[Tensor] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (shared if parameter in found or hasattr(parameter, IS_READ) else found).add(parameter)
    return shared


def _is_replaceable(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    weight = module.weight
    return not has_hooks and weight.device.type == "cpu" and weight.dtype in KERNEL_DTYPES and weight.numel() > 0
