"""Rotary frequencies that depend on the model and its longest sequence only.

For "dynamic" and "longrope", transformers computes the frequencies anew in every forward pass, from the longest
sequence in it. In a batch, the tokens of one sequence would then depend on the others, and new keys would be rotated by
other angles than the keys in the KV pool. Here the frequencies are chosen once:

    dynamic     those of the start: they only grow beyond max_position_embeddings, which no sequence exceeds
    longrope    the long set if max_model_len exceeds original_max_position_embeddings, else the short set

PhiMoE's factor of cosines and sines (long_mscale, short_mscale) is chosen like the set. Its frequencies are always those of
the short set in transformers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

logger = logging.getLogger("millrace.worker")

_STATIC = "default"
"""A rope type whose frequencies transformers never recomputes."""


def fix_frequencies(model: PreTrainedModel, max_model_len: int) -> str:
    """Choose the frequencies of a loaded model for sequences of at most `max_model_len` tokens. Return the chosen sets of
    longrope, "long" or "short", one for each layer type that has it, with a space between. Empty: no layer has it."""
    chosen: dict[str | None, str] = {}
    for module in _rotary_modules(model):
        for layer_type, rope_type in _rope_types(module).items():
            if rope_type == "longrope":
                chosen[layer_type] = _choose_set(module, layer_type, max_model_len)
        module.rope_type = _all_static(module.rope_type)
    return " ".join(chosen.values())


def _choose_set(module: Any, layer_type: str | None, max_model_len: int) -> str:
    """Give a module its set of longrope. Return the name of the set."""
    prefix, options = (f"{layer_type}_", {"layer_type": layer_type}) if layer_type else ("", {})
    frequencies = getattr(module, f"{prefix}inv_freq")
    chosen, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, frequencies.device, max_model_len, **options)
    frequencies.copy_(chosen)
    settings = module.config.rope_parameters[layer_type] if layer_type else module.config.rope_parameters
    original = settings["original_max_position_embeddings"]
    name, other, bound = ("long", "short", "at most") if max_model_len > original else ("short", "long", "more than")
    if "long_mscale" in settings:  # PhiMoE reads one of them in each step, by the longest sequence in it
        settings["long_mscale"] = settings["short_mscale"] = settings[f"{name}_mscale"]
    rule = "longrope: all sequences have its %s factors, since max_model_len is %d; %s %d chooses the %s ones"
    logger.info(rule, name, max_model_len, bound, original, other)
    return name


@contextlib.contextmanager
def static_frequencies(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the forward pass does not read positions, which have no values on the meta device."""
    types = [(module, module.rope_type) for module in _rotary_modules(model)]
    for module, rope_type in types:
        module.rope_type = _all_static(rope_type)
    try:
        yield
    finally:
        for module, rope_type in types:
            module.rope_type = rope_type


def _rotary_modules(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "rope_type")]


def _rope_types(module: Any) -> dict[str | None, str]:
    """Return the rope type by layer type; the key is None where all layers share one."""
    return module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}


def _all_static(rope_type: Any) -> Any:
    return dict.fromkeys(rope_type, _STATIC) if isinstance(rope_type, dict) else _STATIC
