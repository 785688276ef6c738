"""Reads the parts of a decoder from transformers' modules.

The modules are recognised by what they have: the names and kinds of their children. What they compute with it may still
differ from what is assumed here, so a recognised model is compared with transformers' forward pass before it is used.

Shapes: H hidden size, D size of a head, R rotary size, P positions.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from millrace.worker.fusion.parts import (
    AttentionParts,
    DecoderParts,
    ExpertsParts,
    LayerParts,
    MLPParts,
    Norm,
    RecurrentParts,
    Rotary,
    SumParts,
    as_linear,
    own_part,
)
from millrace.worker.kv_pool import LayerSpec
from millrace.worker.parallel.layers import RowParallelLinear
from millrace.worker.parallel.stages import PPMissingLayer
from millrace.worker.recurrent.layer import MixerLayer

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Our name of an activation by its name in transformers."""

_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "norm": ("embedding_norm",),
    "rotary_emb": ("pos_emb",),
    "linear_attn": ("conv", "mamba"),
    "mlp": ("feed_forward", "shared_mlp", "block_sparse_moe"),
    "input_layernorm": ("operator_norm",),
    "post_attention_layernorm": ("ffn_norm",),
    "o_proj": ("out_proj",),
    "q_norm": ("q_layernorm",),
    "k_norm": ("k_layernorm",),
    "gate_up_proj": ("input_linear",),
    "gate_proj": ("w1",),
    "up_proj": ("w3",),
    "down_proj": ("w2", "output_linear"),
    "act_fn": ("activation_fn", "activation"),
    "gate": ("router",),
}
"""Those of some families, such as LFM2 and Granite, by the name that most have."""
_ATTENTION_CHILDREN = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
_OUTPUT_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_LAYER_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm", *_OUTPUT_NORMS}


class NotRecognised(Exception):
    """Raised when a model has a structure that is not known here. Its text is the reason."""


def read_structure(
    model: PreTrainedModel,
    specs: list[LayerSpec],
    num_positions: int,
    recurrent: Mapping[int, MixerLayer] = MappingProxyType({}),
) -> DecoderParts:
    """Return the parts of a model, or of a stage, with these attention layers and, by index, recurrent layers. Raises
    `NotRecognised`."""
    try:
        return _read_decoder(model, specs, num_positions, recurrent)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # its modules are others than their names say
        raise NotRecognised(f"{type(error).__name__}: {error}") from error


def _read_decoder(
    model: PreTrainedModel, specs: list[LayerSpec], num_positions: int, recurrent: Mapping[int, MixerLayer]
) -> DecoderParts:
    decoder: Any = model.base_model
    _require(hasattr(model, "lm_head"), "it has no lm_head")
    _require_children(decoder, {"embed_tokens", "layers", "norm", "rotary_emb"}, allowed={"rotary_emb_local"})
    modules = decoder.embed_tokens, _find(decoder, "norm"), model.lm_head
    embedding, norm, head = (_of_this_stage(each) for each in modules)
    _require(head is None or type(head) is nn.Linear, "its lm_head is no linear layer")
    _require(embedding is None or isinstance(own_part(embedding), nn.Embedding), "its embedding is no nn.Embedding")
    _require_unshared(model, embedding)
    _require_unscaled_queries(model, num_positions)
    own_layers = {i: layer for i, layer in enumerate(decoder.layers) if not isinstance(layer, PPMissingLayer)}
    by_index, tables = {spec.layer_index: spec for spec in specs}, dict[str | None, Rotary]()
    layers = []
    for index, layer in own_layers.items():
        if (spec := by_index.get(index)) is not None:
            rotary = _rotary_of(model, spec, num_positions, tables)
            layers.append(_read_layer(layer, "self_attn", partial(_read_attention, spec=spec, rotary=rotary)))
        else:
            _require(index in recurrent, "it has layers without attention")
            layers.append(_read_layer(layer, "linear_attn", partial(_recurrent_parts, recurrent[index])))
    return DecoderParts(
        embedding=embedding,
        layers=layers,
        norm=_read_norm(norm) if norm is not None else None,
        head=head,
        logit_softcap=getattr(model.config, "final_logit_softcapping", None),
        embedding_multiplier=getattr(decoder, "embedding_multiplier", 1.0),
        logit_divisor=getattr(model.config, "logits_scaling", 1.0),
    )


def _of_this_stage(module: Any) -> Any:
    return None if isinstance(module, nn.Identity) else module


def _read_divided(module: Any) -> RowParallelLinear | None:
    if not isinstance(module, RowParallelLinear):
        return None
    _require(module.input_is_parallel, "a divided layer of it has whole inputs")
    return module


def _read_layer(layer: Any, mixer: str, read: Callable[[Any], AttentionParts | RecurrentParts]) -> LayerParts:
    """`read` reads the child with the name `mixer`."""
    has_output_norms = hasattr(layer, "pre_feedforward_layernorm")
    children = _LAYER_CHILDREN - {"self_attn"} | {mixer}
    _require_children(layer, children if has_output_norms else children - _OUTPUT_NORMS)
    multiplier = getattr(layer, "residual_multiplier", 1.0)
    _require(multiplier == 1 or not has_output_norms, "it multiplies normed outputs")
    second_norm = _read_norm(_find(layer, "post_attention_layernorm"))
    return LayerParts(
        attention=read(_find(layer, mixer)),
        mlp=_read_mlps(layer),
        input_norm=_read_norm(_find(layer, "input_layernorm")),
        attention_norm=second_norm if has_output_norms else None,
        mlp_input_norm=_read_norm(layer.pre_feedforward_layernorm) if has_output_norms else second_norm,
        mlp_norm=_read_norm(layer.post_feedforward_layernorm) if has_output_norms else None,
        multiplier=multiplier,
    )


def _recurrent_parts(layer: MixerLayer, _: nn.Module) -> RecurrentParts:
    return RecurrentParts([layer.projection], layer.output, layer)


def _read_attention(attention: Any, spec: LayerSpec, rotary: Rotary) -> AttentionParts:
    names = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    _require_children(attention, {"o_proj", *names}, allowed=_ATTENTION_CHILDREN)
    _require(bool(getattr(attention, "use_rope", True)), "it has layers without a rotary embedding")
    _require_pairs_of_halves(sys.modules[type(attention).__module__])
    joined = _find(attention, "o_proj")
    projections, output = [getattr(attention, name) for name in names], own_part(joined)
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
    found = (_find(attention, name) for name in ("q_norm", "k_norm"))
    norms = [_read_norm(each) for each in found if each is not None]
    _require(all(norm.weights.shape == (spec.key_dim,) for norm in norms), "it norms whole queries")
    _require(len({norm.epsilon for norm in norms}) <= 1 and len(norms) in (0, 2), "it norms queries or keys alone")
    own = {name for name, _ in attention.named_parameters(recurse=False)}
    _require(own <= {"sinks"}, f"{type(attention).__name__} has {', '.join(sorted(own - {'sinks'}))}")
    sinks = getattr(attention, "sinks", None)
    _require(sinks is None or sinks.shape == (num_heads,), "its attention sinks are not one of each head")
    return AttentionParts(
        projections=projections,
        output=output,
        divided=_read_divided(joined),
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


def _read_mlps(layer: Any) -> MLPParts | ExpertsParts | SumParts | nn.Module:
    mlps = [_read_mlp(each) for each in _find_all(layer, "mlp")]
    if len(mlps) == 1:
        return mlps[0]
    _require(all(getattr(each, "divided", None) is None for each in mlps), "its shared experts are divided")
    return SumParts(mlps)


def _read_mlp(mlp: Any) -> MLPParts | ExpertsParts | nn.Module:
    merged, joined = _find(mlp, "gate_up_proj"), _find(mlp, "down_proj")
    projections = [merged] if merged is not None else [_find(mlp, "gate_proj"), _find(mlp, "up_proj")]
    output = own_part(joined)
    if not isinstance(output, nn.Linear) or projections[0] is None:
        assert isinstance(mlp, nn.Module)
        return _read_experts(mlp) or mlp
    _require_linear(*projections, output)
    function = _find(mlp, "act_fn")
    activation = "silu" if function is None else _activation_name(function)  # LFM2 names none
    if activation is None:
        raise NotRecognised(f"its activation is {type(function).__name__}")
    return MLPParts(projections, output, activation, _read_divided(joined))


def _read_experts(block: Any) -> ExpertsParts | None:
    """Read a router and stacked experts. None for a module with other parameters."""
    stacked = {"experts.gate_up_proj", "experts.down_proj"}
    names = {name for name, _ in block.named_parameters()}
    if names not in ({"gate.weight", *stacked}, {"router.weight", *stacked}):
        return None
    router, experts = _find(block, "gate"), block.experts
    activation, num_chosen = _activation_name(getattr(experts, "act_fn", None)), getattr(router, "top_k", None)
    if activation is None or not isinstance(num_chosen, int):
        return None
    return ExpertsParts(
        router=as_linear(router.weight),
        experts=[
            MLPParts([as_linear(gate_up)], as_linear(down), activation)
            for gate_up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True)
        ],
        num_chosen=num_chosen,
        is_normalized=getattr(router, "norm_topk_prob", True),
        block=block,
        module=experts,
    )


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
    module = _find(model.base_model, "rotary_emb")
    if module is None:
        nothing = torch.empty(num_positions, 0, dtype=torch.float32, device=model.device)
        return Rotary(_constant(nothing), _constant(nothing))
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


def _names(name: str) -> tuple[str, ...]:
    return name, *_OTHER_NAMES.get(name, ())


def _find_all(module: Any, name: str) -> list[Any]:
    """Return the parts with any of the names for `name`."""
    found = (getattr(module, each, None) for each in _names(name))
    return [each for each in found if each is not None]


def _find(module: Any, name: str) -> Any:
    """Return the first of these parts. None: there is none."""
    return next(iter(_find_all(module, name)), None)


def _require_children(module: nn.Module, required: set[str], allowed: set[str] | None = None) -> None:
    """Children with weights have to be known; others, such as a dropout, do nothing here."""
    children = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    name = type(module).__name__
    missing = {each for each in required if not any(hasattr(module, alias) for alias in _names(each))}
    _require(not missing, f"{name} has no {', '.join(sorted(missing))}")
    unknown = children - {alias for each in required | (allowed or set()) for alias in _names(each)}
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
