"""Tensor parallel: which tensors the ranks of a stage divide, as transformers' own plan for the model has it.

The plan names a kind for each module. `colwise` divides a linear layer's outputs, such as the heads of attention or the
inner width of an MLP, `rowwise` the inputs of the layer that takes those in. Embedding and head are divided by
vocabulary whatever the plan says: each rank then has the logits of its own ids (see `worker.parallel.vocabulary`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from worker.errors import ModelError
from worker.parallel.layers import GatheredLinear, SharedEmbedding, SplitLinear, SummedLinear
from worker.parallel.peers import Peers
from worker.parallel.topology import Topology

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


KINDS = {
    "colwise": Kind(0, 0),
    "colwise_gather_output": Kind(0, 0, GatheredLinear),
    "colwise_rep": Kind(0, 0, GatheredLinear),
    "rowwise": Kind(1, None, SummedLinear),
    "rowwise_split_input": Kind(1, None, SplitLinear),
    "rowwise_rep": Kind(1, None, SplitLinear),
    "replicate": Kind(),
    "replicated_with_grad_allreduce": Kind(),
}
"""Those of transformers that are understood; some have two names."""

EMBEDDING = Kind(0, None, SharedEmbedding, may_be_uneven=True)
HEAD = Kind(0, 0, may_be_uneven=True)


@dataclass(frozen=True)
class Slice:
    """Which part of a stored tensor a rank holds: [begin, end) of one dimension."""

    dim: int
    begin: int
    end: int
    whole_size: int

    @property
    def index(self) -> tuple[slice, ...]:
        return (slice(None),) * self.dim + (slice(self.begin, self.end),)

    def whole_shape(self, shape: torch.Size) -> torch.Size:
        return torch.Size((*shape[: self.dim], self.whole_size, *shape[self.dim + 1 :]))


class TensorPlan:
    """Knows how each module of one model is divided. Judges it when made, before any weight is read."""

    def __init__(self, model: PreTrainedModel, topology: Topology) -> None:
        self._topology = topology
        self._kinds = _read_plan(model) | _vocabulary(model)
        self._check_sizes(model)

    def cut(self, model: PreTrainedModel) -> dict[str, Slice]:
        """Shrink the tensors of a meta model to this rank's part; returns which part that is, by tensor name."""
        slices: dict[str, Slice] = {}
        for name, kind in self._kinds.items():
            module = model.get_submodule(name)
            for leaf, dim in (("weight", kind.weight_dim), ("bias", kind.bias_dim)):
                if dim is not None and getattr(module, leaf, None) is not None:
                    slices[f"{name}.{leaf}"] = self._narrow(module, leaf, dim)
        return slices

    def join(self, model: PreTrainedModel, peers: Peers) -> None:
        """Let the loaded parts work together with those of the other ranks."""
        for name, kind in self._kinds.items():
            if kind.joined is not None:
                model.set_submodule(name, kind.joined(model.get_submodule(name), self._topology, peers))

    def _narrow(self, module: nn.Module, leaf: str, dim: int) -> Slice:
        whole = getattr(module, leaf)
        share = self._topology.share(whole.shape[dim])
        part = whole.detach().narrow(dim, share.start, len(share))
        setattr(module, leaf, nn.Parameter(torch.empty_like(part), requires_grad=False))
        return Slice(dim, share.start, share.stop, whole.shape[dim])

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

    def _named(self, kind_name: str) -> list[str]:
        return [name for name, kind in self._kinds.items() if kind is KINDS[kind_name]]


def _read_plan(model: PreTrainedModel) -> dict[str, Kind]:
    """The kind of each module that the plan names, except embedding and head."""
    patterns: dict[str, str] = model.tp_plan or {}
    vocabulary = {model.get_input_embeddings(), model.get_output_embeddings()}
    modules = {name: module for name, module in model.named_modules() if module not in vocabulary}
    tensors = dict(model.named_parameters())
    kinds: dict[str, Kind] = {}
    for name in (*modules, *tensors):
        kind_name = patterns.get(NUMBERS.sub(".*", name))
        if kind_name is not None:
            kinds[name] = _understood(model, name, kind_name, is_linear=isinstance(modules.get(name), nn.Linear))
    if not kinds:
        name = model.config.model_type
        raise ModelError(f"transformers has no tensor parallel plan for {name}: {_instead(model)}")
    return kinds


def _understood(model: PreTrainedModel, name: str, kind_name: str, *, is_linear: bool) -> Kind:
    kind = KINDS.get(kind_name)
    if kind is None or (kind.weight_dim is not None and not is_linear):
        raise ModelError(
            f'{name} of {model.config.model_type} is to be divided as "{kind_name}", which is not supported: '
            f"{_instead(model)}"
        )
    return kind


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
