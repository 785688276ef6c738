"""Linear layers of a model on a CPU: packed weights for the compiled kernel or for oneDNN, else torch.

With the compiled kernel the result of a row does not depend on the other rows of the step; oneDNN and torch round
differently for other numbers of rows.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from millrace.worker.host_memory import free_host_bytes
from millrace.worker.kernels import sampling
from millrace.worker.kernels.library import DTYPES, Kernels, LinearCall, PackCall, check, find_kernels, has_amx

logger = logging.getLogger("millrace.worker")

COMPARED_ROWS, COMPARED_OUTPUTS = (1, 7, 16), 256
"""The results of each shape are compared with torch's at these numbers of rows: the first and the last outputs."""
LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Between a packed layer and torch, relative to the standard deviation of the results."""

ROWS_OF_ONEDNN, ROW_MULTIPLE = 256, 16
"""Number of rows for which oneDNN orders its weights, and the multiple to which more rows than that are padded."""
LARGE_BYTES = 32 << 20
"""Memory of this size is always returned to the system when it is released."""


class PackedLinear(ABC):
    """One linear layer, or several with the same inputs whose outputs follow one another (q, k and v; gate and up).

    Inputs are contiguous and of the type `dtype`, outputs of the type `output_dtype`. Neither is checked.
    """

    def __init__(self, num_inputs: int, num_outputs: int, dtype: torch.dtype, output_dtype: torch.dtype) -> None:
        self.num_inputs, self.num_outputs = num_inputs, num_outputs
        self.dtype, self.output_dtype = dtype, output_dtype

    name: str
    """Of what computes the layer, for logs."""
    weights: Tensor
    """The layer's only copy of the weights. Their order is that of the implementation."""

    @abstractmethod
    def into(self, inputs: Tensor, outputs: Tensor, accumulate: bool = False) -> None:
        """Write the result for inputs [M, K] to outputs [M, N], or add it to them. M is at least 1."""

    @abstractmethod
    def argmax(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest outputs [M] (float32), and the lowest ids [M] that have them. A row with a NaN has the peak
        NaN. M is at least 1."""

    keeps_large_outputs = False
    """Whether `forward` returns large outputs in the memory of its last call: for a head, whose logits are read before
    the next step. New memory of that size is mapped anew each time, which takes as long as the multiplication."""
    _kept: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:  # [..., K] -> [..., N]
        """Replaces the forward of an `nn.Linear`."""
        if inputs.dtype is not self.dtype or inputs.shape[-1] != self.num_inputs:
            raise RuntimeError(
                f"inputs {list(inputs.shape)} of dtype {inputs.dtype}, but the layer has {self.num_inputs} inputs of "
                f"dtype {self.dtype}"
            )
        num_rows = inputs.numel() // self.num_inputs
        outputs = self._output_memory(num_rows)
        if num_rows:
            self.into(inputs.reshape(-1, self.num_inputs).contiguous(), outputs)
        return outputs.view(*inputs.shape[:-1], self.num_outputs)

    def _output_memory(self, num_rows: int) -> Tensor:  # [M, N]
        if not self.keeps_large_outputs or num_rows * self.num_outputs * self.output_dtype.itemsize < LARGE_BYTES:
            return torch.empty(num_rows, self.num_outputs, dtype=self.output_dtype)
        if self._kept is None or len(self._kept) < num_rows:
            self._kept = torch.empty(num_rows, self.num_outputs, dtype=self.output_dtype)
        return self._kept[:num_rows]


class CompiledLinear(PackedLinear):
    """A layer that the compiled kernel computes, from weights in panels."""

    name = "compiled kernel"

    def __init__(
        self,
        weights: Sequence[Tensor],
        bias: Tensor | None,
        kernels: Kernels,
        dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is that of the weights if it is None, and `output_dtype` is `dtype`. All are float32 or bfloat16."""
        dtype, weight_dtype = dtype or weights[0].dtype, weights[0].dtype
        super().__init__(weights[0].shape[1], sum(map(len, weights)), dtype, output_dtype or dtype)
        self.weights = _pack(weights, self.num_outputs, kernels)
        self._bias = None if bias is None else bias.float().contiguous()
        self._call = LinearCall(
            panels=self.weights.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_outputs=self.num_outputs,
            num_inputs=self.num_inputs,
            weight_dtype=DTYPES[weight_dtype],
            input_dtype=DTYPES[dtype],
            output_dtype=DTYPES[self.output_dtype],
        )
        self._reference = ctypes.byref(self._call)
        self._linear = kernels.table.linear
        self._linear_argmax = kernels.table.linear_argmax

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


def _pack(weights: Sequence[Tensor], num_outputs: int, kernels: Kernels) -> Tensor:
    """Return the weights [N_i, K] one after the other in panels, as linear.inc.h describes them."""
    num_inputs, dtype = weights[0].shape[1], weights[0].dtype
    width, per_line = kernels.table.panel_outputs, 2 if dtype == torch.bfloat16 else 1
    panels = torch.zeros(-(-num_outputs // width), -(-num_inputs // per_line), width, per_line, dtype=dtype)
    first_output = 0
    for weight in weights:
        assert weight.dtype == dtype and weight.shape[1] == num_inputs
        rows = weight.contiguous()
        kernels.table.pack(
            ctypes.byref(
                PackCall(
                    weights=rows.data_ptr(),
                    panels=panels.data_ptr(),
                    first_output=first_output,
                    num_outputs=len(rows),
                    num_inputs=num_inputs,
                    dtype=DTYPES[dtype],
                    num_threads=torch.get_num_threads(),
                )
            )
        )
        first_output += len(rows)
    return panels


class StoringLinear(PackedLinear):
    """A layer whose results are new tensors."""

    @abstractmethod
    def _multiply(self, inputs: Tensor) -> Tensor:  # [M, K] -> [M, N]
        pass

    def into(self, inputs: Tensor, outputs: Tensor, accumulate: bool = False) -> None:
        results = self._multiply(inputs)
        if accumulate:
            outputs.add_(results)
        else:
            outputs.copy_(results)

    def argmax(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._multiply(inputs).float()
        kernels = find_kernels()
        if kernels is not None:
            return sampling.argmax(kernels, logits)
        peaks, token_ids = logits.max(dim=-1)
        return peaks, token_ids


class OneDNNLinear(StoringLinear):
    """A bfloat16 layer that oneDNN computes, from weights in its own order. Uses private functions of torch."""

    name = "oneDNN"

    def __init__(self, weight: Tensor, bias: Tensor | None, output_dtype: torch.dtype | None = None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], weight.dtype, output_dtype or weight.dtype)
        self.weights, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_OF_ONEDNN), bias

    def _multiply(self, inputs: Tensor) -> Tensor:
        num_rows = inputs.shape[0]
        if num_rows > ROW_MULTIPLE:  # oneDNN prepares itself for each new number of rows, which takes up to 1 ms
            inputs = F.pad(inputs, (0, 0, 0, -num_rows % ROW_MULTIPLE))
        results: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weights, self._bias, "none", [], "")
        return results[:num_rows]


class TorchLinear(StoringLinear):
    """A layer that torch computes, from weights that are not packed."""

    name = "torch"

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        dtype = dtype or weight.dtype
        super().__init__(weight.shape[1], weight.shape[0], dtype, output_dtype or dtype)
        self.weights, self._bias = weight, None if bias is None else bias.to(dtype)

    def _multiply(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weights.to(self.dtype), self._bias)


@torch.no_grad()
def pack_linear(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
) -> PackedLinear:
    """Return a layer of these weights [N_i, K] and biases [N_i].

    The choice between the compiled kernel, oneDNN and torch depends only on the dtypes and on the machine, so that two
    starts round in the same way. The first layer of each shape is compared with torch. Without memory for a packed copy
    torch computes the layer.

    `dtype`: of the inputs; None means that of the weights. `output_dtype`: None means that of the inputs.
    """
    dtype = dtype or weights[0].dtype
    joined_biases = _join_biases(weights, biases)
    kind = _choose_kind(weights[0].dtype, dtype)
    kernels = find_kernels()
    if kind is not TorchLinear and not _has_memory_for(weights):
        _warn_once("there is no memory for packed weights: torch computes linear layers, which is slower")
    elif kind is not TorchLinear and kernels is not None:
        packed = (
            CompiledLinear(weights, joined_biases, kernels, dtype, output_dtype)
            if kind is CompiledLinear
            else OneDNNLinear(_join(weights), joined_biases, output_dtype)
        )
        if _is_accepted(packed, weights, joined_biases):
            return packed
    return TorchLinear(_join(weights), joined_biases, dtype, output_dtype)


def _choose_kind(weight_dtype: torch.dtype, dtype: torch.dtype) -> type[PackedLinear]:
    kernels = find_kernels()
    if kernels is None or kernels.instruction_set == "generic" or not {weight_dtype, dtype} <= set(DTYPES):
        return TorchLinear
    is_bfloat16 = weight_dtype == dtype == torch.bfloat16
    return OneDNNLinear if is_bfloat16 and has_amx(kernels) and _has_onednn() else CompiledLinear


@cache
def _has_onednn() -> bool:
    """Whether the private functions of torch that `OneDNNLinear` uses exist and compute what they did."""
    weight = torch.linspace(-1, 1, 48 * 40).sin().view(48, 40).bfloat16()
    try:
        packed = OneDNNLinear(weight, None)
        inputs = weight[: ROW_MULTIPLE + 1]
        if _is_close(packed.forward(inputs), F.linear(inputs, weight)):
            return True
        reason = "the results are wrong"
    except (AttributeError, RuntimeError, TypeError) as error:
        reason = str(error)
    logger.warning("oneDNN cannot be used through torch %s, so bfloat16 is slower: %.200s", torch.__version__, reason)
    return False


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


def _join_biases(weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None) -> Tensor | None:
    if biases is None or all(bias is None for bias in biases):
        return None
    return _join(
        [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
    )


def _has_memory_for(weights: Sequence[Tensor]) -> bool:
    """Whether a packed copy fits into memory, beside a copy on the way to it."""
    return 2 * sum(weight.nbytes for weight in weights) < free_host_bytes()


_accepted: dict[tuple[object, ...], bool] = {}
"""Of the shapes that were compared with torch."""


def _is_accepted(packed: PackedLinear, weights: Sequence[Tensor], bias: Tensor | None) -> bool:
    """Whether the first and the last outputs of a layer are those of torch. Each shape is compared once."""
    key = (packed.name, bias is None, packed.num_inputs, packed.num_outputs, packed.dtype, weights[0].dtype)
    if key not in _accepted:
        _accepted[key] = all(
            _is_close(packed.forward(inputs)[:, part], F.linear(inputs, weight.to(packed.dtype), part_of_bias))
            for num_rows in COMPARED_ROWS
            for inputs in [_random_inputs(num_rows, packed)]
            for part, weight, part_of_bias in _compared_parts(weights, bias, packed.dtype)
        )
        if not _accepted[key]:
            logger.warning(
                "the %s differs from torch in linear layers of %d inputs and %d outputs: torch computes them",
                *(packed.name, packed.num_inputs, packed.num_outputs),
            )
    return _accepted[key]


def _compared_parts(
    weights: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    for part, weight in (
        (slice(0, len(weights[0][:COMPARED_OUTPUTS])), weights[0][:COMPARED_OUTPUTS]),
        (slice(-len(weights[-1][-COMPARED_OUTPUTS:]), None), weights[-1][-COMPARED_OUTPUTS:]),
    ):
        yield part, weight, None if bias is None else bias[part].to(dtype)


def _random_inputs(num_rows: int, packed: PackedLinear) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, packed.num_inputs, generator=generator).to(packed.dtype)


def _is_close(outputs: Tensor, expected: Tensor) -> bool:
    difference = (outputs.float() - expected.float()).abs().max()
    return bool(difference <= LARGEST_DIFFERENCE[expected.dtype] * expected.float().square().mean().sqrt())


# --- modules that run as they are ---


@torch.no_grad()
def use_packed_linear(model: nn.Module, dtype: torch.dtype) -> Counter[str]:
    """Replace the forward of the model's linear layers, and their weights by packed ones. Return how many layers are
    computed by what.

    `dtype`: of the activations. Modules of derived classes and modules with hooks are left alone. Weights that other
    modules use as well (a tied head) keep their unpacked copy.
    """
    shared = _shared_weights(model)
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    kinds: Counter[str] = Counter()
    for module in model.modules():
        if not _is_replaceable(module):
            continue
        assert isinstance(module, nn.Linear)
        # A float32 layer has float32 inputs in a bfloat16 model too, such as the router of experts.
        packed = pack_linear([module.weight], [module.bias], dtype=torch.promote_types(module.weight.dtype, dtype))
        kinds[packed.name] += 1
        if isinstance(packed, TorchLinear):
            continue
        packed.keeps_large_outputs = module is head
        module.forward = packed.forward  # type: ignore[method-assign, assignment]
        if module.weight not in shared:
            module.weight = nn.Parameter(packed.weights, requires_grad=False)
    return kinds


def _shared_weights(model: nn.Module) -> set[Tensor]:
    """Return the parameters that several modules use."""
    found: set[Tensor] = set()
    shared: set[Tensor] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (shared if parameter in found else found).add(parameter)
    return shared


def _is_replaceable(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    weight = module.weight
    return not has_hooks and weight.device.type == "cpu" and weight.dtype in DTYPES and weight.numel() > 0
