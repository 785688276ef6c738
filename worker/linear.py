"""Linear layers of a model on a CPU: packed weights for the compiled kernel, else torch.

With the compiled kernel the result of a row does not depend on the other rows of the step; torch rounds differently for
other numbers of rows.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import ctypes
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from millrace.worker.host_memory import free_host_bytes
from millrace.worker.kernels import sampling
from millrace.worker.kernels.library import DTYPES, Kernels, LinearCall, check, find_kernels

logger = logging.getLogger("millrace.worker")

COMPARED_ROWS = (1, 7, 16)
"""Numbers of rows at which the results of each shape are compared with torch's, once at load."""
LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Between a packed layer and torch, relative to the standard deviation of the results."""


class PackedLinear(ABC):
    """One linear layer, or several with the same inputs whose outputs follow one another (q, k and v; gate and up).

    Inputs are contiguous and of the type `dtype`, outputs of the type `output_dtype`. Neither is checked.
    """

    def __init__(self, num_inputs: int, num_outputs: int, dtype: torch.dtype, output_dtype: torch.dtype) -> None:
        self.num_inputs, self.num_outputs = num_inputs, num_outputs
        self.dtype, self.output_dtype = dtype, output_dtype

    weights: Tensor
    """The layer's only copy of the weights. Their order is that of the implementation."""

    @abstractmethod
    def into(self, inputs: Tensor, outputs: Tensor, accumulate: bool = False) -> None:
        """Write the result for inputs [M, K] to outputs [M, N], or add it to them. M is at least 1."""

    @abstractmethod
    def argmax(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest outputs [M] (float32), and the lowest ids [M] that have them. A row with a NaN has the peak
        NaN. M is at least 1."""

    def forward(self, inputs: Tensor) -> Tensor:  # [..., K] -> [..., N]
        """Replaces the forward of an `nn.Linear`."""
        if inputs.dtype is not self.dtype or inputs.shape[-1] != self.num_inputs:
            raise RuntimeError(
                f"inputs {list(inputs.shape)} of dtype {inputs.dtype}, but the layer has {self.num_inputs} inputs of "
                f"dtype {self.dtype}"
            )
        outputs = inputs.new_empty((*inputs.shape[:-1], self.num_outputs), dtype=self.output_dtype)
        if outputs.numel():
            self.into(inputs.reshape(-1, self.num_inputs).contiguous(), outputs.view(-1, self.num_outputs))
        return outputs


class CompiledLinear(PackedLinear):
    """A layer that the compiled kernel computes, from weights in panels."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kernels: Kernels,
        dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is that of the weights if it is None, and `output_dtype` is `dtype`. All are float32 or bfloat16."""
        dtype = dtype or weight.dtype
        super().__init__(weight.shape[1], weight.shape[0], dtype, output_dtype or dtype)
        self.weights = _panels(weight, kernels.library.millrace_panel_outputs())
        self._bias = None if bias is None else bias.float().contiguous()
        self._call = LinearCall(
            panels=self.weights.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_outputs=self.num_outputs,
            num_inputs=self.num_inputs,
            weight_dtype=DTYPES[weight.dtype],
            input_dtype=DTYPES[dtype],
            output_dtype=DTYPES[self.output_dtype],
        )
        self._reference = ctypes.byref(self._call)
        self._linear = kernels.library.millrace_linear
        self._linear_argmax = kernels.library.millrace_linear_argmax

    def into(self, inputs: Tensor, outputs: Tensor, accumulate: bool = False) -> None:
        call = self._call
        call.input, call.output = inputs.data_ptr(), outputs.data_ptr()
        call.num_rows, call.accumulates, call.num_threads = inputs.shape[0], accumulate, torch.get_num_threads()
        if self._linear(self._reference):
            check(-1)

    def argmax(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        call, num_rows = self._call, inputs.shape[0]
        peaks, token_ids = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
        call.input, call.peaks, call.token_ids = inputs.data_ptr(), peaks.data_ptr(), token_ids.data_ptr()
        call.num_rows, call.num_threads = num_rows, torch.get_num_threads()
        check(self._linear_argmax(self._reference))
        return peaks, token_ids


class TorchLinear(PackedLinear):
    """A layer that torch computes, from weights that are not packed."""

    def __init__(self, weight: Tensor, bias: Tensor | None, output_dtype: torch.dtype | None = None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], weight.dtype, output_dtype or weight.dtype)
        self.weights, self._bias = weight, bias

    def into(self, inputs: Tensor, outputs: Tensor, accumulate: bool = False) -> None:
        results = F.linear(inputs, self.weights, self._bias)
        if accumulate:
            outputs.add_(results)
        else:
            outputs.copy_(results)

    def argmax(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(inputs, self.weights, self._bias).float()
        kernels = find_kernels()
        if kernels is not None:
            return sampling.argmax(kernels, logits)
        peaks, token_ids = logits.max(dim=-1)
        return peaks, token_ids


def _panels(weight: Tensor, panel_outputs: int) -> Tensor:
    """Return the weights [N, K] in panels, as linear.inc.h describes them."""
    num_outputs, num_inputs = weight.shape
    per_line = 2 if weight.dtype == torch.bfloat16 else 1
    whole = F.pad(weight, (0, -num_inputs % per_line, 0, -num_outputs % panel_outputs))
    return whole.view(-1, panel_outputs, whole.shape[1] // per_line, per_line).transpose(1, 2).contiguous()


@torch.no_grad()
def pack_linear(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
) -> PackedLinear:
    """Return a layer of these weights [N_i, K] and biases [N_i], computed in the fastest way that this machine has.

    `dtype`: of the inputs; None means that of the weights. `output_dtype`: None means that of the inputs.
    """
    weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    bias = _join_biases(weights, biases)
    kernels = find_kernels()
    if kernels is not None and weight.dtype in DTYPES and _has_memory_for(weight):
        return CompiledLinear(weight, bias, kernels, dtype, output_dtype)
    if dtype is not None:
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return TorchLinear(weight, bias, output_dtype)


def _join_biases(weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None) -> Tensor | None:
    if biases is None or all(bias is None for bias in biases):
        return None
    return torch.cat(
        [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
    )


def _has_memory_for(weight: Tensor) -> bool:
    """Whether a packed copy fits into memory, beside a copy on the way to it."""
    return 2 * weight.nbytes < free_host_bytes()


@torch.no_grad()
def use_compiled_linear(model: nn.Module, kernels: Kernels) -> None:
    """Replace the forward of the model's linear layers, and their weights by packed ones.

    Compares each shape once with torch. A shape whose results differ is left alone. Modules of derived classes and modules
    with hooks are left alone too. Weights that other modules use as well (a tied head) keep their unpacked copy.
    """
    began_s = time.perf_counter()
    shared = _shared_weights(model)
    accepted: dict[tuple[torch.dtype, torch.Size], bool] = {}
    num_compiled = num_left = 0
    for module in model.modules():
        if not _is_replaceable(module):
            continue
        assert isinstance(module, nn.Linear)
        key = (module.weight.dtype, module.weight.shape)
        if not accepted.get(key, True) or not _has_memory_for(module.weight):
            num_left += 1
            continue
        compiled = CompiledLinear(module.weight, module.bias, kernels)
        if key not in accepted:
            accepted[key] = _is_accepted(compiled, module)
        if not accepted[key]:
            num_left += 1
            continue
        num_compiled += 1
        module.forward = compiled.forward  # type: ignore[method-assign, assignment]
        if module.weight not in shared:
            module.weight = nn.Parameter(compiled.weights, requires_grad=False)
    logger.info(
        "compiled linear layers: %d, of torch: %d; packed in %.2f s",
        *(num_compiled, num_left, time.perf_counter() - began_s),
    )


def _shared_weights(model: nn.Module) -> set[Tensor]:
    """Return the parameters that several modules use."""
    found: set[Tensor] = set()
    shared: set[Tensor] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (shared if parameter in found else found).add(parameter)
    return shared


def _is_replaceable(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    weight = module.weight
    bias: Tensor | None = module.bias
    is_readable = weight.device.type == "cpu" and weight.dtype in DTYPES and weight.numel() > 0
    return not has_hooks and is_readable and (bias is None or bias.dtype == weight.dtype)


def _is_accepted(packed: PackedLinear, linear: nn.Linear) -> bool:
    generator = torch.Generator().manual_seed(0)
    for num_rows in COMPARED_ROWS:
        inputs = torch.randn(num_rows, linear.in_features, generator=generator).to(linear.weight.dtype)
        if not _is_close(packed.forward(inputs), F.linear(inputs, linear.weight, linear.bias)):
            logger.warning(
                "the compiled kernel differs from torch in linear layers of %d inputs and %d outputs: torch computes them",
                *(linear.in_features, linear.out_features),
            )
            return False
    return True


def _is_close(outputs: Tensor, expected: Tensor) -> bool:
    difference = (outputs.float() - expected.float()).abs().max()
    return bool(difference <= LARGEST_DIFFERENCE[expected.dtype] * expected.float().square().mean().sqrt())
