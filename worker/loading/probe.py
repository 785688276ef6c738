"""What a loaded model's attention is like, learned by running it once.

Each layer's attention call is recorded instead of computed. This finds the shapes for the KV pool without knowing any
architecture, and refuses a model whose attention asks for something that would be left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.worker.attention.interface import STEP_KEYWORD
from millrace.worker.errors import ModelError
from millrace.worker.kv_pool import LayerSpec
from millrace.worker.parallel.stages import find_stage_input
from millrace.worker.rope import unchanged_frequencies

PROBE_TOKENS = 2

UNDERSTOOD_OPTIONS = frozenset({"scaling", "sliding_window", "softcap"})
HARMLESS_OPTIONS = frozenset({"dropout", "position_ids", "position_embeddings", "is_causal"})
"""Given to the attention by some models, and of no effect on causal attention in inference."""


class ProbeStep:
    """Stands where a `ForwardStep` will: records each layer once and answers with zeros."""

    def __init__(self) -> None:
        self.specs: dict[int, LayerSpec] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        name = type(module).__name__
        layer_index = getattr(module, "layer_idx", None)
        if not isinstance(layer_index, int) or layer_index in self.specs:
            raise ModelError(f"{name} calls its attention in an unknown way (layer {layer_index}): not supported")
        if attention_mask is not None:
            raise ModelError(f"{name} makes an attention mask of its own, which is not supported")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise ModelError(f"{name} looks at later tokens, which is not supported")
        _check_options(name, options)
        self.specs[layer_index] = LayerSpec(
            layer_index=layer_index,
            num_kv_heads=key.shape[0],
            key_dim=key.shape[-1],
            value_dim=value.shape[-1],
            sliding_window=options.get("sliding_window"),
        )
        return value.new_zeros(query.shape[1], query.shape[0], value.shape[-1])


def probe_layers(model: PreTrainedModel, layers: range | None = None) -> list[LayerSpec]:
    """The attention layers, in order: those of `layers`, or of the whole model. Raises `ModelError` when they cannot be
    served correctly. Works on the meta device too, since nothing but shapes is looked at."""
    probe = ProbeStep()
    positions = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0)
    try:
        with torch.inference_mode(), _shapes_only(model):
            model(
                **_inputs(model),
                position_ids=positions,
                use_cache=False,
                logits_to_keep=1,
                **{STEP_KEYWORD: probe},
            )
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model's code meets first when it is run
        raise ModelError(f"{type(model).__name__} cannot be run with this config.json: {error}") from error
    expected = range(model.config.num_hidden_layers) if layers is None else layers
    specs = [probe.specs[index] for index in sorted(probe.specs)]
    if [spec.layer_index for spec in specs] != list(expected):
        raise ModelError(
            f"{len(specs)} of the {len(expected)} layers of {type(model).__name__} use transformers' attention interface: "
            "all have to"
        )
    _check_windows(model.config, specs)
    return specs


@contextlib.contextmanager
def _shapes_only(model: PreTrainedModel) -> Iterator[None]:
    """On the meta device, avoid what needs values: positions that are looked at, and the grouped product of experts, which
    are multiplied one by one meanwhile."""
    if model.device.type != "meta":
        yield
        return
    chosen, model.config._experts_implementation = model.config._experts_implementation, "batched_mm"
    try:
        with unchanged_frequencies(model):
            yield
    finally:
        model.config._experts_implementation = chosen


def _inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    inlet = find_stage_input(model)
    if inlet is None:
        return {"input_ids": torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device=model.device)}
    shape = (1, PROBE_TOKENS, model.config.hidden_size)
    inlet.received = torch.zeros(shape, dtype=model.dtype, device=model.device)
    return {"inputs_embeds": inlet.received}


def _check_options(name: str, options: dict[str, Any]) -> None:
    given = {option for option, value in options.items() if value is not None and value is not False}
    asked = given - HARMLESS_OPTIONS - UNDERSTOOD_OPTIONS
    if asked:
        raise ModelError(f"the attention of {name} uses {', '.join(sorted(asked))}, which is not supported")


def _check_windows(config: Any, specs: list[LayerSpec]) -> None:
    """A window in the configuration has to show in the calls: some models only put it into their masks."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    for spec in specs:
        has_window = layer_types[spec.layer_index] == "sliding_attention" if layer_types else window is not None
        if has_window and spec.sliding_window is None:
            raise ModelError(f"layer {spec.layer_index} of {config.model_type} hides its sliding window: not supported")
