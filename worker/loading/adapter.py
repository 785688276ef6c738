"""Merges a LoRA adapter, as peft saves it, into the weights of its base model while these are loaded.

    weight + scale * B @ A        scale: alpha / rank, or alpha / sqrt(rank) with rsLoRA

With DoRA each output of the sum gets the length that the adapter stores. Sources: arXiv 2106.09685 (LoRA), 2312.03732
(rsLoRA), 2402.09353 (DoRA); names and settings as in peft 0.21.
"""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millrace.worker.errors import ModelError
from millrace.worker.loading.tensor_files import DerivedTensor, Source, StoredTensor, find_stored

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PART = re.compile(r"(?P<layer>.+)\.(?P<part>lora_(embedding_)?[AB]|lora_magnitude_vector)(\.weight)?")
_UNSUPPORTED = (
    "alora_invocation_tokens",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
"""Settings that change what the tensors mean."""
_OWN_BASE = ("corda", "loftq", "olora", "pissa")
"""Kinds of `init_lora_weights` that also change the base model."""
_RULE = "merge the adapter with merge_and_unload() of peft, and serve the result"


def with_adapter(weights: dict[str, Source], directory: Path) -> dict[str, Source]:
    """Return the weights of a base model with an adapter: layers are computed, and other tensors that it stores take the
    place of the base model's. Raises `ModelError`."""
    settings = _read_settings(directory)
    if not (directory / WEIGHTS_FILE).exists():
        raise ModelError(f"{directory} has no {WEIGHTS_FILE}: copy the adapter again, or save it as safetensors")
    merged = dict(weights)
    layers: dict[str, dict[str, Source]] = {}
    for stored_name, tensor in find_stored(directory / WEIGHTS_FILE).items():
        name = stored_name.removeprefix(_PREFIX)
        if found := _PART.fullmatch(name):
            layers.setdefault(found["layer"], {})[found["part"]] = tensor
        else:
            own = name.replace(".base_layer.", ".")
            merged[_name_in(merged, own) or _new_head(own, directory)] = tensor
    if not layers:
        raise ModelError(f"{directory / WEIGHTS_FILE} holds no LoRA weights: copy the adapter again")
    for layer, parts in layers.items():
        target = _name_in(merged, f"{layer}.weight")
        if target is None:
            raise ModelError(f"the adapter in {directory} is for {layer}, which the model does not have: {_RULE}")
        if "lora_embedding_A" in parts and "lora_magnitude_vector" in parts:
            raise ModelError(f"the adapter in {directory} uses DoRA for {layer}, which is not supported: {_RULE}")
        base = merged[target]
        scale = _alpha(settings, layer) / _rank(parts, bool(settings.get("use_rslora")), directory)
        merge = partial(_merge, scale, bool(settings.get("fan_in_fan_out")))
        merged[target] = DerivedTensor({"base": base, **parts}, merge, base.dtype)
    return merged


def _read_settings(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    try:
        settings = json.loads(path.read_bytes())
        kind = settings["peft_type"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({error!r}): copy the adapter again") from error
    if kind != "LORA":
        raise ModelError(f"{directory} is an adapter of kind {kind}, and only LORA is supported: {_RULE}")
    used = [name for name in _UNSUPPORTED if settings.get(name)]
    start = str(settings.get("init_lora_weights"))
    used += [f"init_lora_weights={start}"] * start.lower().startswith(_OWN_BASE)
    if used:
        raise ModelError(f"the adapter in {directory} uses {', '.join(used)}, which is not supported: {_RULE}")
    return settings


def _name_in(weights: dict[str, Source], name: str) -> str | None:
    """Return how the base checkpoint calls a tensor: the name in the model, perhaps without that of its decoder."""
    return next((each for each in (name, name.partition(".")[2]) if each in weights), None)


def _new_head(name: str, directory: Path) -> str:
    if name != "lm_head.weight":  # a tied base model does not store it
        raise ModelError(f"the adapter in {directory} holds {name}, which the model does not have: {_RULE}")
    return name


def _alpha(settings: dict[str, Any], layer: str) -> float:
    patterns = settings.get("alpha_pattern") or {}
    own = (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer))
    return float(next(own, settings.get("lora_alpha", 8)))


def _rank(parts: dict[str, Source], is_stabilized: bool, directory: Path) -> float:
    """Return what divides alpha."""
    first = parts.get("lora_A") or parts.get("lora_embedding_A")
    if not isinstance(first, StoredTensor) or not first.shape or not first.shape[0]:
        raise ModelError(f"a part of a layer is missing in {directory / WEIGHTS_FILE}: copy the adapter again")
    rank = first.shape[0]
    return math.sqrt(rank) if is_stabilized else rank


def _merge(scale: float, is_transposed: bool, parts: dict[str, Tensor]) -> Tensor:
    """Return the weight in float32. `is_transposed`: whether the base model stores [inputs, outputs]."""
    base = parts["base"].float()
    if "lora_embedding_A" in parts:
        return torch.addmm(base, parts["lora_embedding_A"].float().T, parts["lora_embedding_B"].float().T, alpha=scale)
    weight = base.T if is_transposed else base
    weight = torch.addmm(weight, parts["lora_B"].float(), parts["lora_A"].float(), alpha=scale)
    if "lora_magnitude_vector" in parts:
        weight *= (parts["lora_magnitude_vector"].float().flatten() / weight.norm(dim=1)).unsqueeze(1)
    return weight.T if is_transposed else weight
