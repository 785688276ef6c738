"""Pipeline parallel: a stage keeps its own layers and drops the rest of the model.

The list of layers keeps its length, so that each layer finds its index, type and rotary frequencies. A `PPMissingLayer`
without weights replaces each layer of another stage. For 5 layers on 2 stages:

    stage 0    embedding   0    1    2    -    -    (identity)  (identity)      - PPMissingLayer     < StageInput
    stage 1    (identity)  -    -    <    3    4    norm        head

A later stage passes the received activations as `inputs_embeds`. Some models scale or normalise these before the first
layer, so the `StageInput` before the stage's first own layer returns the received activations again, unchanged.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.worker.errors import ModelError
from millrace.worker.parallel.topology import Topology


class PPMissingLayer(nn.Module):
    """Replaces a layer of another stage: returns its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():  # such as `attention_type`, which some models read from their layers
            if isinstance(value, int | str) and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # [1, T, H]
        return hidden_states


class StageInput(PPMissingLayer):
    """Replaces the last layer of the previous stage: returns the activations that this stage received from it."""

    received: Tensor | None = None  # [1, T, H]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self.received is not None
        return self.received


def cut_stages(model: PreTrainedModel, topology: Topology) -> None:
    """Drop the modules of other stages from a meta model. Raises `ModelError` if it cannot be divided so."""
    parts = list(model.config.base_model_pp_plan or {})
    name = model.config.model_type
    layers = getattr(model.base_model, "layers", None)
    if "layers" not in parts or not isinstance(layers, nn.ModuleList):
        instead = "use tensor_parallel_size instead" if model.tp_plan else "run it on one rank"
        raise ModelError(
            f"pipeline_parallel_size: must be 1, since transformers has no pipeline parallel plan for {name}, "
            f"got {topology.pp_size}; {instead}"
        )
    if len(layers) < topology.pp_size:
        raise ModelError(
            f"{name} has {len(layers)} layers, too few for {topology.pp_size} stages: "
            f"use a pipeline_parallel_size of at most {len(layers)}"
        )
    own = topology.layers(len(layers))
    for index, layer in enumerate(layers):
        if index not in own:
            layers[index] = StageInput(layer) if index == own.start - 1 else PPMissingLayer(layer)
    middle = parts.index("layers")
    if not topology.is_first_stage:
        _drop(model.base_model, parts[:middle])
    if not topology.is_last_stage:
        _drop(model.base_model, parts[middle + 1 :])
        _drop(model, [name for name, module in model.named_children() if module is model.get_output_embeddings()])


def find_stage_input(model: PreTrainedModel) -> StageInput | None:
    """Return the `StageInput` of a later stage. None on the first stage, and for a whole model."""
    return next((module for module in model.modules() if isinstance(module, StageInput)), None)


def _drop(parent: nn.Module, names: list[str]) -> None:
    for name in names:
        setattr(parent, name, nn.Identity())
