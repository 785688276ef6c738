"""Reads the parts of a decoder from transformers' modules.

The modules are recognised by what they have: the names and kinds of their children. What they compute with it may still
differ from what is assumed here, so a recognised model is compared with transformers' forward pass before it is used.

Shapes: H hidden size, D size of a head, R rotary size, P positions.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from millrace.worker.kv_pool import LayerSpec
from millrace.worker.parallel.layers import RowParallelLinear, VocabParallelEmbedding
from millrace.worker.parallel.stages import PPMissingLayer
from millrace.worker.recurrent.compiled import CompiledLayer

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Our name of an activation by its name in transformers."""

_ATTENTION_CHILDREN = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
_OUTPUT_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_LAYER_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm", *_OUTPUT_NORMS}


class NotRecognised(Exception):
    """Raised when a model has a structure that is not known here. Its text is the reason."""


@dataclass(frozen=True)
class Norm:
    """An RMSNorm."""

    weights: nn.Parameter  # float32, with the offset that some models add to them
    epsilon: float


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a layer, at positions 0 to P - 1."""

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
        by_head = query.weight.view(self.num_heads, 2, -1, query.in_features)
        query.gate = gate = _as_linear(by_head[:, 1].flatten(0, 1))
        query.weight = nn.Parameter(by_head[:, 0].flatten(0, 1), requires_grad=False)
        query.out_features = gate.out_features
        return gate


@dataclass(frozen=True)
class RecurrentParts:
    projections: list[nn.Linear]
    output: nn.Linear
    layer: CompiledLayer
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
class LayerParts:
    attention: AttentionParts | RecurrentParts
    mlp: MLPParts | ExpertsParts | nn.Module
    """A module is run as it is."""
    input_norm: Norm
    attention_norm: Norm | None
    """Norm of the output of the attention."""
    mlp_input_norm: Norm
    mlp_norm: Norm | None
    """Norm of the output of the MLP."""


@dataclass(frozen=True)
class DecoderParts:
    """A whole model, or one of the stages that divide its layers. Other stages have what is None."""

    embedding: nn.Embedding | VocabParallelEmbedding | None
    layers: list[LayerParts]
    norm: Norm | None
    head: nn.Linear | None
    logit_softcap: float | None


def read_structure(
    model: PreTrainedModel,
    specs: list[LayerSpec],
    num_positions: int,
    recurrent: Mapping[int, CompiledLayer] = MappingProxyType({}),
) -> DecoderParts:
    """Return the parts of a model, or of a stage, with these attention layers and, by index, recurrent layers. Raises
    `NotRecognised`."""
    try:
        return _read_decoder(model, specs, num_positions, recurrent)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # its modules are others than their names say
        raise NotRecognised(f"{type(error).__name__}: {error}") from error


def _read_decoder(
    model: PreTrainedModel, specs: list[LayerSpec], num_positions: int, recurrent: Mapping[int, CompiledLayer]
) -> DecoderParts:
    decoder: Any = model.base_model
    _require(hasattr(model, "lm_head"), "it has no lm_head")
    _require_children(decoder, {"embed_tokens", "layers", "norm", "rotary_emb"}, allowed={"rotary_emb_local"})
    embedding, norm, head = (_of_this_stage(each) for each in (decoder.embed_tokens, decoder.norm, model.lm_head))
    _require(head is None or type(head) is nn.Linear, "its lm_head is no linear layer")
    _require(embedding is None or isinstance(own_part(embedding), nn.Embedding), "its embedding is no nn.Embedding")
    _require_unshared(model, embedding)
    _require_unscaled_queries(model, num_positions)
    own_layers = {i: layer for i, layer in enumerate(decoder.layers) if not isinstance(layer, PPMissingLayer)}
    by_index, tables = {spec.layer_index: spec for spec in specs}, dict[str | None, Rotary]()
    layers = []
    for index, layer in own_layers.items():
        if (spec := by_index.get(index)) is not None:
            layers.append(_read_layer(layer, spec, _rotary_of(model, spec, num_positions, tables)))
        else:
            _require(index in recurrent, "it has layers without attention")
            layers.append(_read_recurrent_layer(layer, recurrent[index]))
    return DecoderParts(
        embedding=embedding,
        layers=layers,
        norm=_read_norm(norm) if norm is not None else None,
        head=head,
        logit_softcap=getattr(model.config, "final_logit_softcapping", None),
    )


def _of_this_stage(module: Any) -> Any:
    return None if isinstance(module, nn.Identity) else module


def own_part(module: Any) -> Any:
    """Return this rank's part of a divided linear layer or embedding; another module as it is."""
    return module.own if isinstance(module, RowParallelLinear | VocabParallelEmbedding) else module


def _read_divided(module: Any) -> RowParallelLinear | None:
    if not isinstance(module, RowParallelLinear):
        return None
    _require(module.input_is_parallel, "a divided layer of it has whole inputs")
    return module


def _read_layer(layer: Any, spec: LayerSpec, rotary: Rotary) -> LayerParts:
    has_output_norms = hasattr(layer, "pre_feedforward_layernorm")
    _require_children(layer, _LAYER_CHILDREN if has_output_norms else _LAYER_CHILDREN - _OUTPUT_NORMS)
    return LayerParts(
        attention=_read_attention(layer.self_attn, spec, rotary),
        mlp=_read_mlp(layer.mlp),
        input_norm=_read_norm(layer.input_layernorm),
        attention_norm=_read_norm(layer.post_attention_layernorm) if has_output_norms else None,
        mlp_input_norm=_read_norm(
            layer.pre_feedforward_layernorm if has_output_norms else layer.post_attention_layernorm
        ),
        mlp_norm=_read_norm(layer.post_feedforward_layernorm) if has_output_norms else None,
    )


def _read_recurrent_layer(layer: Any, recurrent: CompiledLayer) -> LayerParts:
    _require_children(layer, _LAYER_CHILDREN - _OUTPUT_NORMS - {"self_attn"} | {"linear_attn"})
    return LayerParts(
        attention=RecurrentParts([recurrent.projection], recurrent.output, recurrent),
        mlp=_read_mlp(layer.mlp),
        input_norm=_read_norm(layer.input_layernorm),
        attention_norm=None,
        mlp_input_norm=_read_norm(layer.post_attention_layernorm),
        mlp_norm=None,
    )


def _read_attention(attention: Any, spec: LayerSpec, rotary: Rotary) -> AttentionParts:
    names = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    _require_children(attention, {"o_proj", *names}, allowed=_ATTENTION_CHILDREN)
    _require(bool(getattr(attention, "use_rope", True)), "it has layers without a rotary embedding")
    _require_pairs_of_halves(sys.modules[type(attention).__module__])
    projections, output = [getattr(attention, name) for name in names], own_part(attention.o_proj)
    _require_linear(*projections, output)
    _require(spec.key_dim == spec.value_dim, "its keys and values differ in size")
    num_heads = output.weight.shape[1] // spec.value_dim
    num_outputs = (num_heads + 2 * spec.num_kv_heads) * spec.key_dim
    num_queries, has_gates = num_heads * spec.key_dim, False
    if len(projections) == 3 and projections[0].weight.shape[0] == 2 * num_queries:
        _require(projections[0].bias is None, "its queries and gates have biases")
        num_outputs, has_gates = num_outputs + num_queries, True
    _require(sum(each.weight.shape[0] for each in projections) == num_outputs, "its projections have other sizes")
    _require(2 * rotary.cosines.shape[1] <= spec.key_dim, "its rotary embedding is larger than its heads")
    norms = [_read_norm(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    _require(all(norm.weights.shape == (spec.key_dim,) for norm in norms), "it norms whole queries")
    _require(len({norm.epsilon for norm in norms}) <= 1 and len(norms) in (0, 2), "it norms queries or keys alone")
    own = {name for name, _ in attention.named_parameters(recurse=False)}
    _require(own <= {"sinks"}, f"{type(attention).__name__} has {', '.join(sorted(own - {'sinks'}))}")
    sinks = getattr(attention, "sinks", None)
    _require(sinks is None or sinks.shape == (num_heads,), "its attention sinks are not one of each head")
    return AttentionParts(
        projections=projections,
        output=output,
        divided=_read_divided(attention.o_proj),
        num_heads=num_heads,
        head_norms=(norms[0], norms[1]) if norms else None,
        rotary=rotary,
        scaling=attention.scaling,
        softcap=getattr(attention, "attn_logit_softcapping", None),
        sinks=sinks,
        has_gates=has_gates,
        spec=spec,
    )


def _require_pairs_of_halves(code: ModuleType) -> None:
    """The functions of a model pair the same entries as `_rotate_half`."""
    pairs = torch.arange(4.0, dtype=torch.float32, device="cpu")
    rotate = getattr(code, "rotate_half", None)
    if rotate is None and hasattr(code, "_apply_rotary_emb"):  # of gpt-oss: by a quarter of a turn it does the same
        cosines, sines = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float32, device="cpu")
        rotate = partial(code._apply_rotary_emb, cos=cosines, sin=sines)
    rotate = rotate or _rotate_half
    _require(torch.equal(rotate(pairs), _rotate_half(pairs)), "its rotary embedding pairs other entries")


def _rotate_half(values: Tensor) -> Tensor:
    """Return [a, b] as [-b, a]: the rotation of a head pairs an entry with that which is half a head behind it."""
    first, second = values.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _read_mlp(mlp: Any) -> MLPParts | ExpertsParts | nn.Module:
    is_merged = hasattr(mlp, "gate_up_proj")
    output = own_part(getattr(mlp, "down_proj", None))
    if not isinstance(output, nn.Linear) or not (is_merged or hasattr(mlp, "gate_proj")):
        assert isinstance(mlp, nn.Module)
        return _read_experts(mlp) or mlp
    projections = [mlp.gate_up_proj] if is_merged else [mlp.gate_proj, mlp.up_proj]
    _require_linear(*projections, output)
    function = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    activation = _activation_name(function)
    if activation is None:
        raise NotRecognised(f"its activation is {type(function).__name__}")
    return MLPParts(projections, output, activation, _read_divided(mlp.down_proj))


def _read_experts(block: Any) -> ExpertsParts | None:
    """Read a router and stacked experts. None for a module with other parameters."""
    if {name for name, _ in block.named_parameters()} != {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}:
        return None
    router, experts = block.gate, block.experts
    activation, num_chosen = _activation_name(getattr(experts, "act_fn", None)), getattr(router, "top_k", None)
    if activation is None or not isinstance(num_chosen, int):
        return None
    return ExpertsParts(
        router=_as_linear(router.weight),
        experts=[
            MLPParts([_as_linear(gate_up)], _as_linear(down), activation)
            for gate_up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True)
        ],
        num_chosen=num_chosen,
        is_normalized=getattr(router, "norm_topk_prob", True),
        block=block,
        module=experts,
    )


def _as_linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False, dtype=torch.float32, device="cpu")
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _activation_name(function: object) -> str | None:
    return next((ours for name, ours in ACTIVATIONS.items() if type(function) is type(ACT2FN[name])), None)


def _read_norm(module: Any) -> Norm:
    """Read an RMSNorm, and find out whether it adds 1 to its weights."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        "RMSNorm" not in type(module).__name__
        or not isinstance(weight, Tensor)
        or not isinstance(epsilon, float)
        or getattr(module, "bias", None) is not None
    ):
        raise NotRecognised(f"{type(module).__name__} is no RMSNorm")
    ones = torch.ones(1, weight.numel(), dtype=weight.dtype, device=weight.device)
    weights = module(ones)[0].float() * (1 + epsilon) ** 0.5
    plain = weight.detach().float()
    offset = torch.round((weights - plain).mean())  # of a norm of ones only the weights remain
    return Norm(_constant(plain + offset), epsilon)


def _rotary_of(model: PreTrainedModel, spec: LayerSpec, num_positions: int, tables: dict[str | None, Rotary]) -> Rotary:
    """Return the rotary embedding of a layer. Layers of one type share it."""
    module: Any = model.base_model.rotary_emb
    layer_type: str | None = model.config.layer_types[spec.layer_index] if isinstance(module.rope_type, dict) else None
    if layer_type not in tables:
        positions = torch.arange(num_positions, device=model.device).unsqueeze(0)
        options = (layer_type,) if layer_type else ()
        found = module(torch.zeros(1, dtype=torch.float32, device=model.device), positions, *options)
        _require(isinstance(found, tuple), "its rotary embedding is not of cosines and sines")
        cosines, sines = (each[0].float() for each in found)
        half = cosines.shape[1] // 2
        is_doubled = torch.equal(cosines[:, :half], cosines[:, half:])
        if not is_doubled and 2 * cosines.shape[1] == spec.key_dim:  # gpt-oss has each number once
            half = cosines.shape[1]
        else:
            _require(
                is_doubled and cosines.shape == (num_positions, 2 * half), "its rotary embedding pairs other entries"
            )
        tables[layer_type] = Rotary(*(_constant(each[:, :half].contiguous()) for each in (cosines, sines)))
    return tables[layer_type]


def _constant(values: Tensor) -> nn.Parameter:
    """Return a tensor that a module can own, and that moves in place."""
    return nn.Parameter(values, requires_grad=False)


def _require_linear(*modules: Any) -> None:
    for module in modules:
        has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
        _require(type(module) is nn.Linear and not has_hooks, f"{type(module).__name__} is no plain linear layer")


def _require_children(module: nn.Module, required: set[str], allowed: set[str] | None = None) -> None:
    """Children with weights have to be known; others, such as a dropout, do nothing here."""
    children = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    name = type(module).__name__
    missing = {each for each in required if not hasattr(module, each)}
    _require(not missing, f"{name} has no {', '.join(sorted(missing))}")
    unknown = children - required - (allowed or set())
    _require(not unknown, f"{name} has {', '.join(sorted(unknown))}")


def _require_unshared(model: PreTrainedModel, embedding: Any) -> None:
    """No weight has two modules, except those of an embedding that is the head too."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    if embedding is not None:
        uses.pop(id(own_part(embedding).weight))
    _require(max(uses.values()) == 1, "its layers share weights")


def _require_unscaled_queries(model: PreTrainedModel, num_positions: int) -> None:
    """No query is scaled by its position. Ministral 3 does that from `original_max_position_embeddings` on; before, the
    scale is exactly 1."""
    rope: dict[str, Any] = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("llama_4_scaling_beta"):
        original = rope["original_max_position_embeddings"]
        _require(num_positions <= original, f"it scales the queries of positions from {original} on")


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise NotRecognised(reason)
