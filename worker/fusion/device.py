"""The operations of a fused forward pass on any device: torch's products, any attention, and the row operations of Triton
or of torch. Chooses between these and the compiled ones.

Shapes: T tokens of the step, W outputs of the attention's projections, Hq query heads, Hkv key and value heads, D size of
a head, P positions, R rotary size.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

from millrace.executor.wire.failures import is_interruption
from millrace.worker.attention.compiled import CompiledAttention
from millrace.worker.attention.interface import Attention
from millrace.worker.fusion.operations import (
    ActivationOperation,
    CompiledOperations,
    NormOperation,
    Operations,
    Recurrence,
    RunFewRows,
    not_batch_invariant,
)
from millrace.worker.fusion.parts import AttentionParts, Norm, RecurrentParts
from millrace.worker.fusion.workspace import Workspace
from millrace.worker.input_batch import StepBatch
from millrace.worker.kernels import rows_torch
from millrace.worker.kernels.library import KERNEL_DTYPES
from millrace.worker.kv_pool import LayerCache
from millrace.worker.linear.choice import is_like_numbers, join, join_biases
from millrace.worker.linear.codes import CodedWeight
from millrace.worker.linear.modules import merge_modules
from millrace.worker.linear.packed import PackedLinear, TorchLinear
from millrace.worker.recurrent.layer import MixerLayer
from millrace.worker.triton_support import find_triton

logger = logging.getLogger("millrace.worker")


def choose_operations(
    attention: Attention,
    dtype: torch.dtype,
    device: torch.device,
    *,
    batch_invariant: bool = False,
    quantizes: bool = False,
    rounds: bool = False,
) -> Operations | None:
    """Return the fastest operations of the device, or None if the model's modules serve better, or if the attention is not
    batch-invariant and has to be. `quantizes`: weights are rounded to 8 bits; only on a CPU.
    `rounds`: inputs of quantized weights may be rounded on a CPU."""
    if device.type == "cuda":
        if batch_invariant and attention.name == "reference":
            return None
        return DeviceOperations(attention, dtype, device, find_row_kernels(), batch_invariant=batch_invariant)
    if isinstance(attention, CompiledAttention) and dtype in KERNEL_DTYPES:
        return CompiledOperations(
            attention.kernels, dtype, batch_invariant=batch_invariant, quantizes=quantizes, rounds=rounds
        )
    return None


def find_row_kernels() -> ModuleType:
    """Return Triton's norms and activations where they run, else torch's. `rows_torch` describes them."""
    if not find_triton():
        return rows_torch
    from millrace.worker.kernels import rows_triton

    return rows_triton


class DeviceOperations:
    """Runs on the device of the model. Nothing in it waits for the device."""

    mlp_tokens = sys.maxsize
    splits_experts = False

    def __init__(
        self,
        attention: Attention,
        dtype: torch.dtype,
        device: torch.device,
        rows: ModuleType,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._attention, self._dtype, self._device, self._rows = attention, dtype, device, rows
        self._batch_invariant = batch_invariant
        self.workspace = Workspace(dtype, device)
        self.tensors = nn.ParameterList()
        self._kept: set[int] = set()
        """The ids of the tensors."""
        self._recurrent: list[MixerLayer] = []
        self._takes_codes: dict[tuple[object, ...], bool] = {}
        """Whether Triton's product of codes is right, by shape and kind."""

    def linear(self, modules: list[nn.Linear], *, keeps: bool = False) -> PackedLinear:
        if self._rows is rows_torch and not self._batch_invariant:
            return merge_modules(modules, self._dtype)
        from millrace.worker.linear.linear_triton import FewRowsLinear, TritonLinear

        if (coded := self._coded_linear(modules, TritonLinear if self._batch_invariant else TorchLinear)) is not None:
            return coded
        return merge_modules(modules, self._dtype, TritonLinear if self._batch_invariant else FewRowsLinear)

    def _coded_linear(self, modules: list[nn.Linear], kind: type[TorchLinear]) -> PackedLinear | None:
        """Return a layer that computes with codes. None: these have none, or the first layer of this shape was not right."""
        weight = join([each.weight for each in modules])
        if not isinstance(weight, CodedWeight):
            return None
        from millrace.worker.linear.codes_triton import CodedTritonLinear, can_multiply

        key = (*weight.shape, weight.coded.codes.dtype, weight.coded.group_size)
        if not can_multiply(weight) or not self._takes_codes.get(key, True):
            return None
        bias = join_biases([each.weight for each in modules], [each.bias for each in modules])
        layer = CodedTritonLinear(weight, bias, partial(self.workspace.rows, "weights"), kind)
        if key not in self._takes_codes:
            try:
                is_close = is_like_numbers(layer, weight, bias)
                reason = "it differs from torch"
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:  # of Triton
                if is_interruption(error):
                    raise
                is_close, reason = False, str(error)
            self._takes_codes[key] = is_close
            if not is_close:
                logger.warning(
                    "Triton's product of quantized weights is not used for layers %s: %.300s", key[:2], reason
                )
                return None
        layer.give_to(modules)
        return layer

    def for_few_rows(self, linear: PackedLinear, norm: Norm | None, activation: str | None) -> RunFewRows | None:
        multiply_few = getattr(linear, "multiply_few", None)
        if multiply_few is None:
            return None
        given = (self._keep(norm.weights), norm.epsilon) if norm is not None else None
        return partial(multiply_few, norm=given, activation=activation)

    def head(
        self, module: nn.Linear, embedding: nn.Module | None, *, is_tied: bool
    ) -> tuple[PackedLinear, nn.Module | None]:
        return self.linear([module]), embedding

    def norm(self, norm: Norm) -> NormOperation:
        return partial(self._rows.rms_norm, self._keep(norm.weights), norm.epsilon)

    def activation(self, name: str, size: int) -> ActivationOperation:
        return partial(self._rows.gated_activation, name)

    def attention(self, parts: AttentionParts, layer: LayerCache) -> DeviceAttention:
        tables = self._keep(parts.rotary.cosines), self._keep(parts.rotary.sines)
        norms = parts.head_norms
        kept = (self._keep(norms[0].weights), self._keep(norms[1].weights)) if norms else None
        return DeviceAttention(parts, layer, self._attention, self.workspace, tables, kept)

    def recurrence(self, parts: RecurrentParts) -> Recurrence:
        self._recurrent.append(parts.layer)
        return Recurrence(parts, self.workspace)

    def prepare_module(self, module: nn.Module) -> None:
        if self._batch_invariant:
            raise not_batch_invariant(type(module).__name__)

    def quantize_layers(self) -> None:
        pass

    def prepare(self, batch: StepBatch) -> StepBatch:
        if self._recurrent and batch.on_host is None:  # a graph of decode rows, which only the device knows
            from millrace.worker.recurrent.mixer_triton import decode_rows

            rows = decode_rows(batch.sampled.slots, batch.positions[0])
            for layer in self._recurrent:
                layer.rows = rows
        return batch

    def release_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _keep(self, tensor: nn.Parameter) -> Tensor:
        if id(tensor) not in self._kept:
            self._kept.add(id(tensor))
            self.tensors.append(tensor)
        return tensor


class DeviceAttention:
    """Norms of heads and rotation, then the attention that the rank has chosen. Triton's does all of it."""

    def __init__(
        self,
        parts: AttentionParts,
        layer: LayerCache,
        attention: Attention,
        workspace: Workspace,
        tables: tuple[Tensor, Tensor],  # cosines and sines, float32 [P, R / 2]
        norms: tuple[Tensor, Tensor] | None,  # of queries and of keys, float32 [D]
    ) -> None:
        self._parts, self._attention, self._workspace = parts, attention, workspace
        self._how = layer, parts.scaling, parts.spec.sliding_window, parts.softcap
        epsilon = parts.head_norms[0].epsilon if parts.head_norms else 0.0
        self._rotation = tables, norms, epsilon, parts.num_heads
        self._run_projected = getattr(attention, "forward_projected", None)

    def run(self, projected: Tensor, rows: StepBatch) -> Tensor:
        if self._run_projected is not None:
            attended = self._run_projected(projected, *self._rotation, *self._how, rows, self._parts.sinks)
        else:
            query, key, value = self._rotated(projected, rows)
            attended = self._attention.forward(query, key, value, *self._how, rows, self._parts.sinks)
        return attended.reshape(len(projected), self._parts.output_width)

    def _rotated(self, projected: Tensor, rows: StepBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [Hq, T, D], keys and values [Hkv, T, D]."""
        spec, num_heads, num_tokens = self._parts.spec, self._parts.num_heads, len(projected)
        num_rotated = num_heads + spec.num_kv_heads
        rotated = self._workspace.rows("rotated", num_tokens, num_rotated * spec.key_dim)
        rows_torch.norm_and_rotate(projected, rows.positions[0], *self._rotation, spec.key_dim, rotated)
        heads = rotated.view(num_tokens, num_rotated, spec.key_dim).transpose(0, 1)
        values = projected[:, rotated.shape[1] :].view(num_tokens, spec.num_kv_heads, spec.value_dim).transpose(0, 1)
        return heads[:num_heads], heads[num_heads:], values
