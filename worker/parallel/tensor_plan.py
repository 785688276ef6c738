"""Tensor parallel: which tensors the ranks of a stage divide, as transformers' own plan for the model has it.

The plan names a kind for each module. `colwise` divides a linear layer's outputs, such as the heads of attention or the
inner width of an MLP, `rowwise` the inputs of the layer that takes those in. Embedding and head are divided by
vocabulary whatever the plan says: each rank then has the logits of its own ids (see `millrace.worker.parallel.vocabulary`).

The experts of a mixture are no linear layers but stacked tensors in one module. Each rank has a part of the inner width of
every expert, so that all do the same work whatever the router chooses; gate and up lie packed behind each other:

    gate_up_proj [E, 2 I, H]    gate 0 .. I | up 0 .. I, of each half the rank's part    "packed_colwise"
    down_proj [E, H, I]         the rank's part of the inputs                            "rowwise"
    the module's output         a part of every sum                                      "moe_tp_experts"
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
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
"""By the name of their number in the configuration."""


@dataclass(frozen=True)
class Kind:
    """One way to divide a module. A dimension of None: every rank holds the whole tensor."""

    weight_dim: int | None = None
    bias_dim: int | None = None
    joined: Callable[..., nn.Module] | None = None
    """What stands in the module's place once it is loaded. None: the module itself."""
    may_be_uneven: bool = False
    num_packed: int = 1
    """Matrices that lie behind each other in the divided dimension; of each the rank has its part."""


KINDS = {
    "colwise": Kind(0, 0),
    "colwise_gather_output": Kind(0, 0, ColumnParallelLinear),
    "colwise_rep": Kind(0, 0, ColumnParallelLinear),
    "rowwise": Kind(1, None, RowParallelLinear),
    "rowwise_split_input": Kind(1, None, partial(RowParallelLinear, input_is_parallel=False)),
    "rowwise_rep": Kind(1, None, partial(RowParallelLinear, input_is_parallel=False)),
    "replicate": Kind(),
    "replicated_with_grad_allreduce": Kind(),
    "moe_tp_experts": Kind(joined=TensorParallelExperts),
}
"""Those of transformers that are understood; some have two names."""

TENSOR_KINDS = {
    "packed_colwise": Kind(-2, num_packed=2),
    "rowwise": Kind(-1),
    "replicate": Kind(),
    "replicated_with_grad_allreduce": Kind(),
}
"""The same for what the plan names that is a tensor and no module: the stacked experts, [E, outputs, inputs]."""

EXPERTS_DIM = 3

EMBEDDING = Kind(0, None, VocabParallelEmbedding, may_be_uneven=True)
HEAD = Kind(0, 0, may_be_uneven=True)


@dataclass(frozen=True)
class Slice:
    """Which part of a stored tensor a rank holds: [begin, end) of one dimension, of each matrix that is packed in it."""

    dim: int
    begin: int
    end: int
    whole_size: int
    num_packed: int = 1

    def of(self, whole: Any) -> Tensor:
        """The part of a tensor, or of one that is still in its file."""
        each = self.whole_size // self.num_packed
        parts = [whole[self._index(packed * each)] for packed in range(self.num_packed)]
        return parts[0] if self.num_packed == 1 else torch.cat(parts, self.dim)

    def _index(self, offset: int) -> tuple[slice, ...]:
        return (slice(None),) * self.dim + (slice(offset + self.begin, offset + self.end),)

    def whole_shape(self, shape: torch.Size) -> torch.Size:
        return torch.Size((*shape[: self.dim], self.whole_size, *shape[self.dim + 1 :]))


class TensorPlan:
    """Knows how each module of one model is divided. Judges it when made, before any weight is read."""

    def __init__(self, model: PreTrainedModel, topology: Topology) -> None:
        self._topology = topology
        self._kinds = _read_plan(model) | _vocabulary(model)
        self._tensor_kinds = _read_tensor_plan(model)
        self._check_experts(model)
        self._check_sizes(model)

    def cut(self, model: PreTrainedModel) -> dict[str, Slice]:
        """Shrink the tensors of a meta model to this rank's part; returns which part that is, by tensor name."""
        slices: dict[str, Slice] = {}
        for name, kind in self._kinds.items():
            module = model.get_submodule(name)
            for leaf, dim in (("weight", kind.weight_dim), ("bias", kind.bias_dim)):
                if dim is not None and getattr(module, leaf, None) is not None:
                    slices[f"{name}.{leaf}"] = self._narrow(module, leaf, dim)
        for name, kind in self._tensor_kinds.items():
            if kind.weight_dim is not None:
                module, leaf = model.get_submodule(_parent(name)), name.rpartition(".")[2]
                dim = model.get_parameter(name).dim() + kind.weight_dim
                slices[name] = self._narrow(module, leaf, dim, kind.num_packed)
        return slices

    def join(self, model: PreTrainedModel, peers: Peers) -> None:
        """Let the loaded parts work together with those of the other ranks."""
        for name, kind in self._kinds.items():
            if kind.joined is not None:
                model.set_submodule(name, kind.joined(model.get_submodule(name), peers))

    def _narrow(self, module: nn.Module, leaf: str, dim: int, num_packed: int = 1) -> Slice:
        whole = getattr(module, leaf).detach()
        share = self._topology.share(whole.shape[dim] // num_packed)
        part = Slice(dim, share.start, share.stop, whole.shape[dim], num_packed)
        setattr(module, leaf, nn.Parameter(torch.empty_like(part.of(whole)), requires_grad=False))
        return part

    def _check_experts(self, model: PreTrainedModel) -> None:
        """What is summed over the ranks has to be divided completely: an undivided bias would count several times."""
        for name in self._named("moe_tp_experts"):
            whole = {f"{name}.{leaf}" for leaf, _ in model.get_submodule(name).named_parameters()} - {
                tensor for tensor, kind in self._tensor_kinds.items() if kind.weight_dim is not None
            }
            if whole:
                raise ModelError(
                    f"{min(whole)} of {model.config.model_type} is not divided by transformers' plan, which is not "
                    f"supported: {_instead(model)}"
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
        """What has to come out even: (name, size)."""
        if any(hasattr(model.get_submodule(_parent(name)), "layer_idx") for name in self._named("colwise")):
            for option, what in HEADS.items():
                if count := getattr(model.config, option, None):
                    yield what, count
        for name, kind in self._kinds.items():
            if kind.weight_dim is not None and not kind.may_be_uneven:
                yield f"features of {name}", model.get_parameter(f"{name}.weight").shape[kind.weight_dim]
        for name, kind in self._tensor_kinds.items():
            if kind.weight_dim is not None:
                yield f"features of {name}", model.get_parameter(name).shape[kind.weight_dim] // kind.num_packed

    def _named(self, kind_name: str) -> list[str]:
        return [name for name, kind in self._kinds.items() if kind is KINDS[kind_name]]


def _read_plan(model: PreTrainedModel) -> dict[str, Kind]:
    """The kind of each module that the plan names, except embedding and head."""
    vocabulary = {model.get_input_embeddings(), model.get_output_embeddings()}
    modules = {name: module for name, module in model.named_modules() if module not in vocabulary}
    kinds: dict[str, Kind] = {}
    for name, kind_name in _planned(model, modules):
        kind = KINDS.get(kind_name)
        if kind is None or (kind.weight_dim is not None and not isinstance(modules[name], nn.Linear)):
            raise _not_understood(model, name, kind_name)
        kinds[name] = kind
    if not kinds:
        name = model.config.model_type
        raise ModelError(f"transformers has no tensor parallel plan for {name}: {_instead(model)}")
    return kinds


def _read_tensor_plan(model: PreTrainedModel) -> dict[str, Kind]:
    """The kind of each tensor that the plan names itself."""
    tensors = dict(model.named_parameters())
    kinds: dict[str, Kind] = {}
    for name, kind_name in _planned(model, tensors):
        kind = TENSOR_KINDS.get(kind_name)
        if kind is None or (kind.weight_dim is not None and tensors[name].dim() != EXPERTS_DIM):
            raise _not_understood(model, name, kind_name)
        kinds[name] = kind
    return kinds


def _planned(model: PreTrainedModel, names: Iterable[str]) -> list[tuple[str, str]]:
    """(name, name of the kind) of those that the plan knows."""
    patterns: dict[str, str] = model.tp_plan or {}
    found = ((name, patterns.get(NUMBERS.sub(".*", name))) for name in names)
    return [(name, kind_name) for name, kind_name in found if kind_name is not None]


def _not_understood(model: PreTrainedModel, name: str, kind_name: str) -> ModelError:
    return ModelError(
        f'{name} of {model.config.model_type} is to be divided as "{kind_name}", which is not supported: '
        f"{_instead(model)}"
    )


def _instead(model: PreTrainedModel) -> str:
    has_stages = bool(getattr(model.config, "base_model_pp_plan", None))
    return "use pipeline_parallel_size instead" if has_stages else "run it on one rank"


def _vocabulary(model: PreTrainedModel) -> dict[str, Kind]:
    """Embedding and head, as far as this stage has them."""
    kinds = {id(model.get_input_embeddings()): EMBEDDING, id(model.get_output_embeddings()): HEAD}
    return {
        name: kinds[id(module)]
        for name, module in model.named_modules()
        if id(module) in kinds and isinstance(module, nn.Embedding | nn.Linear)
    }


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
