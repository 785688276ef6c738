"""The MLPs of a decoder's layers: a gated MLP, a mixture of them, transformers' own module, or sums of these.

Shapes: T tokens, H hidden size, E experts, C experts chosen for each token.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from millrace.worker.fusion.operations import Operations
from millrace.worker.fusion.parts import ExpertsParts, MLPParts, Norm, SumParts
from millrace.worker.fusion.projection import Projection


def make_mlp(parts: MLPParts | ExpertsParts | SumParts | nn.Module, operations: Operations, norm: Norm) -> MLP:
    """Return what computes an MLP, and the norm before it. Takes its weights."""
    if isinstance(parts, MLPParts):
        return GatedMLP(parts, operations, norm)
    return NormedMLP(_without_norm(parts, operations), norm, operations)


def _without_norm(parts: MLPParts | ExpertsParts | SumParts | nn.Module, operations: Operations) -> UnnormedMLP:
    if isinstance(parts, MLPParts):
        return GatedMLP(parts, operations)
    if isinstance(parts, SumParts):
        return MLPSum([_without_norm(each, operations) for each in parts.mlps])
    if isinstance(parts, ExpertsParts):
        return Experts(parts, operations) if operations.splits_experts else ModuleMLP(parts.block, operations)
    return ModuleMLP(parts, operations)


class GatedMLP:
    """An MLP whose gate and value are one projection."""

    def __init__(self, parts: MLPParts, operations: Operations, norm: Norm | None = None) -> None:
        self._workspace, self._max_tokens = operations.workspace, operations.mlp_tokens
        self._projections = Projection(operations, parts.projections, norm, parts.activation)
        self._output = operations.linear([parts.output])

    def into(self, inputs: Tensor, outputs: Tensor, *, accumulate: bool = False) -> None:
        """Write the results for inputs [T, H] to the outputs [T, H], or add them."""
        size = self._max_tokens
        if inputs.shape[0] > size:
            for rows, results in zip(inputs.split(size), outputs.split(size), strict=True):
                self.into(rows, results, accumulate=accumulate)
            return
        activated = self._workspace.rows("activated", inputs.shape[0], self._output.num_inputs)
        self._projections.into(inputs, activated)
        self._output.into(activated, outputs, accumulate=accumulate)


class Experts:
    """A mixture of MLPs: a router chooses some of them for each token, and weights their results."""

    def __init__(self, parts: ExpertsParts, operations: Operations) -> None:
        self._router = operations.linear([parts.router], keeps=True)
        self._experts = [GatedMLP(each, operations) for each in parts.experts]
        self._num_chosen, self._is_normalized = parts.num_chosen, parts.is_normalized
        parts.replace_stacked_weights()

    def into(self, inputs: Tensor, outputs: Tensor, *, accumulate: bool = False) -> None:
        """As that of `GatedMLP`. The tokens of one expert pass it together. The result of a token does not depend on the
        others: the order of each sum is that of the token's own choice."""
        weights, chosen = self._choose(inputs)
        order = chosen.flatten().argsort(stable=True)  # [T * C], by expert
        grouped = inputs.index_select(0, order // self._num_chosen)
        results = torch.empty_like(grouped)
        counts = chosen.flatten().bincount(minlength=len(self._experts)).tolist()
        for expert, rows, rows_out in zip(self._experts, grouped.split(counts), results.split(counts), strict=True):
            if rows.shape[0]:
                expert.into(rows, rows_out)
        by_token = grouped.index_copy_(0, order, results).view(-1, self._num_chosen, inputs.shape[1])
        by_token *= weights.unsqueeze(-1)
        total, *others = by_token.unbind(1)
        for each in others:
            total += each
        if accumulate:
            outputs += total
        else:
            outputs.copy_(total)

    def _choose(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [T, C] and the ids [T, C] of each token's experts."""
        weights, chosen = self._router.forward(inputs).softmax(-1, dtype=torch.float32).topk(self._num_chosen)
        if self._is_normalized:
            weights /= weights.sum(-1, keepdim=True)
        return weights.to(inputs.dtype), chosen


class ModuleMLP:
    """transformers' own module, for a structure that is not known, and for experts on a GPU."""

    def __init__(self, module: nn.Module, operations: Operations) -> None:
        self._module = module
        operations.prepare_module(module)

    def into(self, inputs: Tensor, outputs: Tensor, *, accumulate: bool = False) -> None:
        result = self._module(inputs.unsqueeze(0))
        result = (result[0] if isinstance(result, tuple) else result)[0]
        if accumulate:
            outputs += result
        else:
            outputs.copy_(result)


class MLPSum:
    """Several MLPs of the same inputs."""

    def __init__(self, mlps: list[UnnormedMLP]) -> None:
        self._mlps = mlps

    def into(self, inputs: Tensor, outputs: Tensor, *, accumulate: bool = False) -> None:
        for mlp in self._mlps:
            mlp.into(inputs, outputs, accumulate=accumulate)
            accumulate = True


class NormedMLP:
    """One of the other MLPs, with the norm before it."""

    def __init__(self, mlp: UnnormedMLP, norm: Norm, operations: Operations) -> None:
        self.mlp, self._norm, self._workspace = mlp, operations.norm(norm), operations.workspace

    def into(self, inputs: Tensor, outputs: Tensor, *, accumulate: bool = False) -> None:
        normed = self._workspace.rows("normed", *inputs.shape)
        self._norm(inputs, normed)
        self.mlp.into(normed, outputs, accumulate=accumulate)


UnnormedMLP: TypeAlias = GatedMLP | Experts | ModuleMLP | MLPSum
MLP: TypeAlias = GatedMLP | NormedMLP
