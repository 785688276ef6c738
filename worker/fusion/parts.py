"""The parts of a decoder, from which its operations are made.

Shapes: R rotary size, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from millrace.worker.kv_pool import LayerSpec
from millrace.worker.parallel.layers import RowParallelLinear, VocabParallelEmbedding
from millrace.worker.recurrent.layer import MixerLayer


@dataclass(frozen=True)
class Norm:
    """An RMSNorm."""

    weights: nn.Parameter  # float32, with the offset that some models add to them
    epsilon: float


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a layer, at positions 0 to P - 1. Without one R is 0."""

    cosines: nn.Parameter  # [P, R / 2] float32
    sines: nn.Parameter  # [P, R / 2] float32


@dataclass(frozen=True)
class AttentionParts:
    projections: list[nn.Linear]
    """Projections of query, key and value, or one projection for all three."""
    output: nn.Linear
    divided: RowParallelLinear | None
    """Sums the outputs over the ranks that divide the heads; None if this rank has all."""
    num_heads: int
    head_norms: tuple[Norm, Norm] | None
    """Norms of each query head and of each key head."""
    rotary: Rotary
    scaling: float
    softcap: float | None
    sinks: nn.Parameter | None
    """One more score of each query head. None: the layer has none."""
    has_gates: bool
    """Whether the projection of the queries has, behind each head's query, gates of its results."""
    spec: LayerSpec

    @property
    def output_width(self) -> int:
        """Entries of all heads' results."""
        return self.num_heads * self.spec.value_dim

    def divide_gates(self) -> nn.Linear | None:
        """Leave the queries alone in their projection, and return that of the gates, which it owns. None: there are none."""
        if not self.has_gates:
            return None
        query: Any = self.projections[0]
        rows = torch.arange(len(query.weight), device=query.weight.device).view(self.num_heads, 2, -1)
        query.gate = gate = as_linear(query.weight[rows[:, 1].flatten()])
        query.weight = nn.Parameter(query.weight[rows[:, 0].flatten()], requires_grad=False)
        query.out_features = gate.out_features
        return gate


@dataclass(frozen=True)
class RecurrentParts:
    projections: list[nn.Linear]
    output: nn.Linear
    layer: MixerLayer
    """Computes what is between them."""
    divided: RowParallelLinear | None = None
    """As in `AttentionParts`. No recurrent layer is divided."""


@dataclass(frozen=True)
class MLPParts:
    projections: list[nn.Linear]
    """Projections of gate and value, or one projection for both."""
    output: nn.Linear
    activation: str
    divided: RowParallelLinear | None = None
    """As in `AttentionParts`, for the inner width."""


@dataclass(frozen=True)
class ExpertsParts:
    """A mixture of experts."""

    router: nn.Linear
    experts: list[MLPParts]
    num_chosen: int
    is_normalized: bool
    """Whether the weights of a token's experts are divided by their sum."""
    block: nn.Module
    """Computes all of it."""
    module: nn.Module
    """Has the weights of all experts in two tensors, of which those of `experts` are views."""

    def replace_stacked_weights(self) -> None:
        """Let the module hold the layers of the single experts instead."""
        no_weight = nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"), requires_grad=False)
        self.module.gate_up_proj = self.module.down_proj = no_weight
        self.module.own = nn.ModuleList(linear for each in self.experts for linear in (*each.projections, each.output))


@dataclass(frozen=True)
class SumParts:
    """MLPs of the same inputs, whose results are added."""

    mlps: list[MLPParts | ExpertsParts | nn.Module]


@dataclass(frozen=True)
class LayerParts:
    attention: AttentionParts | RecurrentParts
    mlp: MLPParts | ExpertsParts | SumParts | nn.Module
    """A module is run as it is."""
    input_norm: Norm
    attention_norm: Norm | None
    """Norm of the output of the attention."""
    mlp_input_norm: Norm
    mlp_norm: Norm | None
    """Norm of the output of the MLP."""
    multiplier: float
    """Of what is added to the hidden states. 1 if there are norms of outputs."""


@dataclass(frozen=True)
class DecoderParts:
    """A whole model, or one of the stages that divide its layers. Other stages have what is None."""

    embedding: nn.Embedding | VocabParallelEmbedding | None
    layers: list[LayerParts]
    norm: Norm | None
    head: nn.Linear | None
    logit_softcap: float | None
    embedding_multiplier: float
    logit_divisor: float


def own_part(module: Any) -> Any:
    """Return this rank's part of a divided linear layer or embedding; another module as it is."""
    return module.own if isinstance(module, RowParallelLinear | VocabParallelEmbedding) else module


def as_linear(weight: Tensor) -> nn.Linear:
    """Return a layer without a bias that has this weight [outputs, inputs]."""
    linear = nn.Linear(1, 1, bias=False, dtype=torch.float32, device="cpu")
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
