"""The operations of a fused forward pass, as the decoder calls them, and those of the compiled kernels.

Shapes: T tokens of the step, W outputs of the attention's projections, Hq query heads, Dv size of a value head, H hidden
size, M rows, K entries in each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from millrace.executor.heap import release_freed_memory
from millrace.worker.attention.compiled import LayerAttention, StepRows, step_rows
from millrace.worker.errors import ConfigError
from millrace.worker.fusion.parts import AttentionParts, Norm, RecurrentParts
from millrace.worker.fusion.workspace import Workspace
from millrace.worker.input_batch import StepBatch
from millrace.worker.kernels.library import Kernels
from millrace.worker.kernels.rows import GatedActivation, RowNorm
from millrace.worker.kv_pool import LayerCache
from millrace.worker.linear.choice import quantize, round_inputs, screen_argmax
from millrace.worker.linear.modules import pack_modules, use_packed_linear
from millrace.worker.linear.packed import CompiledLinear, PackedLinear

RunFewRows: TypeAlias = Callable[[Tensor, Tensor], bool]
"""Writes the outputs [M, N] of few rows for their inputs [M, K]. Returns False where it cannot."""


ActivationOperation: TypeAlias = Callable[[Tensor, Tensor], None]
"""Writes the outputs [M, K] for contiguous inputs [M, 2 K]: the gates, then the values."""


class NormOperation(Protocol):
    def __call__(self, inputs: Tensor, outputs: Tensor, *, adds: bool = False) -> None:
        """Write the norms of contiguous rows [M, K] to the outputs [M, K], or add them to the outputs."""


class AttentionOperation(Protocol):
    def run(self, projected: Tensor, rows: Any) -> Tensor:  # [T, W] -> [T, Hq * Dv]
        """Write the keys and values, and return the attention of the queries. `rows`: see `Operations.prepare`."""


class Operations(Protocol):
    """Makes the operations of one model from its parts. Operations own their weights, and write to `workspace`."""

    workspace: Workspace
    mlp_tokens: int
    """Maximum tokens that pass an MLP at a time."""
    splits_experts: bool
    """Whether a mixture of experts runs as several MLPs; otherwise its module runs."""
    tensors: nn.ParameterList
    """What the operations own besides the model's weights and must move with them."""

    def linear(self, modules: list[nn.Linear], *, keeps: bool = False) -> PackedLinear:
        """Return one layer for several. Unless it `keeps` them, the modules lose their own weights."""

    def for_few_rows(self, linear: PackedLinear, norm: Norm | None, activation: str | None) -> RunFewRows | None:
        """Return what does all of a `Projection` at once if it has few rows. None: nothing does."""

    def head(
        self, module: nn.Linear, embedding: nn.Module | None, *, is_tied: bool
    ) -> tuple[PackedLinear, nn.Module | None]:
        """Return the head, and what embeds tokens: the embedding, or None for the head itself."""

    def norm(self, norm: Norm) -> NormOperation: ...

    def activation(self, name: str, size: int) -> ActivationOperation: ...

    def attention(self, parts: AttentionParts, layer: LayerCache) -> AttentionOperation: ...

    def recurrence(self, parts: RecurrentParts) -> AttentionOperation:
        """Return what a recurrent layer does between its projections."""

    def prepare_module(self, module: nn.Module) -> None:
        """Prepare a module that runs as it is. Raises `ConfigError` where the operations are batch-invariant."""

    def quantize_layers(self) -> None:
        """Round the weights of the layers, or the inputs of those with quantized weights, if these operations are made for
        that. Raises `ConfigError`."""

    def prepare(self, batch: StepBatch) -> Any:
        """Return what the attention of all layers of a step has in common."""

    def release_memory(self) -> None:
        """Return the memory of replaced weights to the system."""


def not_batch_invariant(what: str) -> ConfigError:
    """Return the error for something that transformers or torch computes."""
    return ConfigError(
        f"batch_invariant: {what} is computed by transformers or torch, whose results depend on the batch; leave "
        "batch_invariant out"
    )


class CompiledOperations:
    """Runs on a CPU through the compiled kernels."""

    mlp_tokens = 256  # so that the intermediate results stay in the CPU's cache
    splits_experts = True

    def __init__(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        *,
        batch_invariant: bool = False,
        quantizes: bool = False,
        rounds: bool = False,
    ) -> None:
        self._kernels, self._dtype = kernels, dtype
        self._batch_invariant, self._quantizes, self._rounds = batch_invariant, quantizes, rounds
        self._layers: list[PackedLinear] = []
        """Those that can be quantized."""
        self.workspace = Workspace(dtype, torch.device("cpu"))
        self.tensors = nn.ParameterList()

    def linear(self, modules: list[nn.Linear], *, keeps: bool = False) -> PackedLinear:
        layer = pack_modules(modules, self._dtype, keeps=keeps, batch_invariant=self._batch_invariant)
        if not keeps:  # such as a router of experts: small, and the most sensitive
            self._layers.append(layer)
        return layer

    def for_few_rows(self, linear: PackedLinear, norm: Norm | None, activation: str | None) -> None:
        return None

    def head(
        self, module: nn.Linear, embedding: nn.Module | None, *, is_tied: bool
    ) -> tuple[PackedLinear, nn.Module | None]:
        is_plain = type(embedding) is nn.Embedding
        keeps = is_tied and not is_plain
        head = pack_modules([module], self._dtype, torch.float32, keeps=keeps, batch_invariant=self._batch_invariant)
        embeds = is_tied and is_plain and isinstance(head, CompiledLinear)  # ranks that divide the ids keep both
        if embeds:
            assert embedding is not None
            embedding.weight = module.weight
        self._layers.append(head)
        if not self._quantizes:
            screen_argmax(head)
        return head, None if embeds else embedding

    def norm(self, norm: Norm) -> RowNorm:
        return RowNorm(self._kernels, norm.weights, norm.epsilon, self._dtype)

    def activation(self, name: str, size: int) -> GatedActivation:
        return GatedActivation(self._kernels, name, size, self._dtype)

    def attention(self, parts: AttentionParts, layer: LayerCache) -> CompiledLayerAttention:
        return CompiledLayerAttention(parts, layer, self._kernels, self.workspace, rounds=not self._batch_invariant)

    def recurrence(self, parts: RecurrentParts) -> Recurrence:
        return Recurrence(parts, self.workspace)

    def prepare_module(self, module: nn.Module) -> None:
        if self._batch_invariant:
            raise not_batch_invariant(type(module).__name__)
        self._layers += use_packed_linear(module, self._dtype)

    def quantize_layers(self) -> None:
        if self._quantizes:
            quantize(self._layers)
        elif self._rounds:
            round_inputs(self._layers)

    def prepare(self, batch: StepBatch) -> StepRows:
        return step_rows(self._kernels, batch)

    def release_memory(self) -> None:
        release_freed_memory()


class CompiledLayerAttention:
    """Norms of heads, rotation, write and attention in one call."""

    def __init__(
        self, parts: AttentionParts, layer: LayerCache, kernels: Kernels, workspace: Workspace, *, rounds: bool
    ) -> None:
        norms = parts.head_norms
        self._workspace, self._width = workspace, parts.output_width
        self._attention = LayerAttention(
            kernels,
            layer,
            parts.num_heads,
            workspace.dtype,
            parts.scaling,
            parts.spec.sliding_window,
            parts.softcap,
            rotary=(parts.rotary.cosines, parts.rotary.sines),
            norms=(norms[0].weights, norms[1].weights) if norms else None,
            norm_eps=norms[0].epsilon if norms else 0.0,
            sinks=parts.sinks,
            rounds=rounds,
        )

    def run(self, projected: Tensor, rows: StepRows) -> Tensor:
        attended = self._workspace.rows("attended", projected.shape[0], self._width)
        self._attention.run(projected, attended, rows)
        return attended


class Recurrence:
    """What a recurrent layer does between its projections. Its rows are those of the last `RecurrentStates.begin`."""

    def __init__(self, parts: RecurrentParts, workspace: Workspace) -> None:
        self._layer, self._workspace = parts.layer, workspace

    def run(self, projected: Tensor, rows: Any) -> Tensor:
        mixed = self._workspace.rows("attended", projected.shape[0], self._layer.output_width)
        return self._layer.mix(projected, mixed)
