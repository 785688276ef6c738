"""Tensor parallel: divides tensors among the ranks of a stage, by transformers' own plan for the model.

The plan names a style for each module. `colwise` divides the outputs of a linear layer, such as the heads of attention
or the inner width of an MLP; `rowwise` divides the inputs of the next linear layer. Embedding and head are always
divided by vocabulary, so each rank has the logits of its own ids (see `millrace.worker.parallel.sampler`).

The experts of a mixture are stacked tensors in one module. Each rank has a part of the inner width of every expert, so
all ranks do the same work for any choice of the router. E experts, I inner width, H hidden size; gate and up are packed
in one tensor:

    gate_up_proj [E, 2 I, H]    gate 0 .. I | up 0 .. I, of each half the rank's part    "packed_colwise"
    down_proj [E, H, I]         the rank's part of the inputs                            "rowwise"
    the module's output         summed over the ranks                                    "moe_tp_experts"
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.worker.errors import ModelError
from millrace.worker.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelExperts,
    VocabParallelEmbedding,
)
from millrace.worker.parallel.peers import Peers
from millrace.worker.parallel.topology import Topology

NUMBERS = re.compile(r"\.\d+(?=\.|$)")
HEADS = {"num_attention_heads": "attention heads", "num_key_value_heads": "key and value heads"}
"""What the fields of the configuration count."""


@dataclass(frozen=True)
class Style:
    """One way to divide a module. A dimension of None: every rank holds the whole tensor."""

    weight_dim: int | None = None
    bias_dim: int | None = None
    joined: Callable[..., nn.Module] | None = None
    """What replaces the module after loading. None: the module stays."""
    may_be_uneven: bool = False
    num_packed: int = 1
    """Matrices that are packed in the divided dimension. The rank has its part of each."""
    num_dims: int = 3
    """Of tensors with this style: stacked experts have three."""


MODULE_STYLES = {
    "colwise": Style(0, 0),
    "colwise_gather_output": Style(0, 0, ColumnParallelLinear),
    "rowwise": Style(1, None, RowParallelLinear),
    "rowwise_split_input": Style(1, None, partial(RowParallelLinear, input_is_parallel=False)),
    "replicate": Style(),
    "replicated_with_grad_allreduce": Style(),
    "moe_tp_experts": Style(joined=TensorParallelExperts),
    "local_params": Style(),  # its parameters are named by the plan too
}
"""The supported styles of transformers for modules."""

TENSOR_STYLES = {
    "colwise": Style(-1, num_dims=1),  # attention sinks, one of each head
    "packed_colwise": Style(-2, num_packed=2),
    "rowwise": Style(-1),
    "replicate": Style(),
    "replicated_with_grad_allreduce": Style(),
}
"""The supported styles for tensors that the plan names: the stacked experts, [E, outputs, inputs], and attention sinks."""

EMBEDDING = Style(0, None, VocabParallelEmbedding, may_be_uneven=True)
HEAD = Style(0, 0, may_be_uneven=True)


@dataclass(frozen=True)
class Slice:
    """A rank's part of a stored tensor: [begin, end) of one dimension, of each matrix that is packed in it."""

    dim: int
    begin: int
    end: int
    whole_size: int
    num_packed: int = 1

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of a tensor."""
        each = self.whole_size // self.num_packed
        parts = [whole[self._index(packed * each)] for packed in range(self.num_packed)]
        return parts[0] if self.num_packed == 1 else torch.cat(parts, self.dim)

    def _index(self, offset: int) -> tuple[slice, ...]:
        return (slice(None),) * self.dim + (slice(offset + self.begin, offset + self.end),)

    def whole_shape(self, shape: torch.Size) -> torch.Size:
        return torch.Size((*shape[: self.dim], self.whole_size, *shape[self.dim + 1 :]))


class TensorPlan:
    """Knows how each module of one model is divided. The constructor raises `ModelError` if it cannot be."""

    def __init__(self, model: PreTrainedModel, topology: Topology) -> None:
        self._topology = topology
        vocabulary = {model.get_input_embeddings(), model.get_output_embeddings()}
        modules = {name: module for name, module in model.named_modules() if module not in vocabulary}
        self._styles = _read_plan(model, modules, MODULE_STYLES, lambda module, _: isinstance(module, nn.Linear))
        if not self._styles:
            raise ModelError(
                "tensor_parallel_size: must be 1, since transformers has no tensor parallel plan for "
                f"{model.config.model_type}, got {topology.tp_size}; {_remedy(model)}"
            )
        self._styles |= _vocabulary(model)
        tensors = dict(model.named_parameters())
        self._tensor_styles = _read_plan(
            model, tensors, TENSOR_STYLES, lambda each, style: each.dim() == style.num_dims
        )
        self._check_experts(model)
        self._check_sizes(model)

    def cut(self, model: PreTrainedModel) -> dict[str, Slice]:
        """Shrink the tensors of a meta model to this rank's part. Return the slices by tensor name."""
        slices: dict[str, Slice] = {}
        for name, style in self._styles.items():
            module = model.get_submodule(name)
            for leaf, dim in (("weight", style.weight_dim), ("bias", style.bias_dim)):
                if dim is not None and getattr(module, leaf, None) is not None:
                    slices[f"{name}.{leaf}"] = self._narrow(module, leaf, dim)
        for name, style in self._tensor_styles.items():
            if style.weight_dim is not None:
                module, leaf = model.get_submodule(_parent(name)), name.rpartition(".")[2]
                dim = model.get_parameter(name).dim() + style.weight_dim
                slices[name] = self._narrow(module, leaf, dim, style.num_packed)
        return slices

    def join(self, model: PreTrainedModel, peers: Peers) -> None:
        """Replace loaded modules by ones that communicate with the other ranks."""
        for name, style in self._styles.items():
            if style.joined is not None:
                model.set_submodule(name, style.joined(model.get_submodule(name), peers))

    def _narrow(self, module: nn.Module, leaf: str, dim: int, num_packed: int = 1) -> Slice:
        whole = getattr(module, leaf).detach()
        share = self._topology.share(whole.shape[dim] // num_packed)
        part = Slice(dim, share.start, share.stop, whole.shape[dim], num_packed)
        setattr(module, leaf, nn.Parameter(torch.empty_like(part.of(whole)), requires_grad=False))
        return part

    def _check_experts(self, model: PreTrainedModel) -> None:
        """Refuse experts with an undivided tensor: the sum over the ranks would count a bias several times."""
        for name in self._named("moe_tp_experts"):
            whole = {f"{name}.{leaf}" for leaf, _ in model.get_submodule(name).named_parameters()} - {
                tensor for tensor, style in self._tensor_styles.items() if style.weight_dim is not None
            }
            if whole:
                raise ModelError(
                    f"tensor_parallel_size: transformers' plan does not divide {min(whole)} of "
                    f"{model.config.model_type}, which is not supported; {_remedy(model)}"
                )

    def _check_sizes(self, model: PreTrainedModel) -> None:
        sizes = list(self._divided_sizes(model))
        tp_size = self._topology.tp_size
        uneven = next((f"{size} {what}" for what, size in sizes if size % tp_size), None)
        if uneven:
            common = math.gcd(*(size for _, size in sizes))
            works = [str(size) for size in range(1, common + 1) if common % size == 0]
            raise ModelError(
                f"tensor_parallel_size {tp_size} does not divide the {uneven} of {model.config.model_type}: "
                f"use {' or '.join(works)}, or pipeline_parallel_size"
            )

    def _divided_sizes(self, model: PreTrainedModel) -> Iterator[tuple[str, int]]:
        """Yield (name, size) of all that must be divisible."""
        if any(hasattr(model.get_submodule(_parent(name)), "layer_idx") for name in self._named("colwise")):
            for option, what in HEADS.items():
                if count := getattr(model.config, option, None):
                    yield what, count
        for name, style in self._styles.items():
            if style.weight_dim is not None and not style.may_be_uneven:
                yield f"features of {name}", model.get_parameter(f"{name}.weight").shape[style.weight_dim]
        for name, style in self._tensor_styles.items():
            if style.weight_dim is not None:
                yield f"features of {name}", model.get_parameter(name).shape[style.weight_dim] // style.num_packed

    def _named(self, style_name: str) -> list[str]:
        return [name for name, style in self._styles.items() if style is MODULE_STYLES[style_name]]


def _read_plan(
    model: PreTrainedModel,
    parts: dict[str, Any],
    supported: dict[str, Style],
    is_divisible: Callable[[Any, Style], bool],
) -> dict[str, Style]:
    """Return the style of each of `parts`, modules or tensors by name, that transformers' plan names."""
    patterns: dict[str, str] = model.tp_plan or {}
    styles: dict[str, Style] = {}
    for name, part in parts.items():
        if (style_name := patterns.get(NUMBERS.sub(".*", name))) is None:
            continue
        style = supported.get(style_name)
        if style is None or (style.weight_dim is not None and not is_divisible(part, style)):
            raise ModelError(
                f"tensor_parallel_size: transformers divides {name} of {model.config.model_type} as "
                f'"{style_name}", which is not supported; {_remedy(model)}'
            )
        styles[name] = style
    return styles


def _remedy(model: PreTrainedModel) -> str:
    has_stages = bool(getattr(model.config, "base_model_pp_plan", None))
    return "use pipeline_parallel_size instead" if has_stages else "run it on one rank"


def _vocabulary(model: PreTrainedModel) -> dict[str, Style]:
    """Return the styles of embedding and head, if this stage has them."""
    styles = {id(model.get_input_embeddings()): EMBEDDING, id(model.get_output_embeddings()): HEAD}
    return {
        name: styles[id(module)]
        for name, module in model.named_modules()
        if id(module) in styles and isinstance(module, nn.Embedding | nn.Linear)
    }


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
