"""Rotary frequencies that depend on the model and its longest sequence, and on nothing that else is in a step.

transformers chooses those of "dynamic" and "longrope" anew in every forward pass, by the longest sequence that it sees. In
a batch of many sequences that would let the tokens of one depend on the others, and would turn keys that are in the KV pool
already by other angles than those that come. Here they are chosen once:

    dynamic     grow beyond max_position_embeddings only, which no sequence passes: the frequencies of the start
    longrope    the long set where sequences may pass original_max_position_embeddings, else the short one
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_UNCHANGED = "default"
"""A type whose frequencies transformers leaves as they are."""


def fix_frequencies(model: PreTrainedModel, max_model_len: int) -> None:
    """Choose them for a loaded model."""
    for module in _rotary_modules(model):
        for layer_type, rope_type in _types(module).items():
            if rope_type == "longrope":
                prefix, options = (f"{layer_type}_", {"layer_type": layer_type}) if layer_type else ("", {})
                held = getattr(module, f"{prefix}inv_freq")
                chosen, _ = ROPE_INIT_FUNCTIONS[rope_type](module.config, held.device, max_model_len, **options)
                held.copy_(chosen)
        module.rope_type = _all_unchanged(module.rope_type)


@contextlib.contextmanager
def unchanged_frequencies(model: PreTrainedModel) -> Iterator[None]:
    """Meanwhile the forward pass does not look at positions, which the meta device does not have."""
    types = [(module, module.rope_type) for module in _rotary_modules(model)]
    for module, rope_type in types:
        module.rope_type = _all_unchanged(rope_type)
    try:
        yield
    finally:
        for module, rope_type in types:
            module.rope_type = rope_type


def _rotary_modules(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "rope_type")]


def _types(module: Any) -> dict[str | None, str]:
    """By the kind of layer, where there are several."""
    return module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}


def _all_unchanged(rope_type: Any) -> Any:
    return dict.fromkeys(rope_type, _UNCHANGED) if isinstance(rope_type, dict) else _UNCHANGED
