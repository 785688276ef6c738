"""Merges a LoRA adapter, as peft saves it, into the weights of its base model while these are loaded.

    weight + scale * B @ A        scale: alpha / rank, or alpha / sqrt(rank) with rsLoRA

With DoRA each output of the sum gets the length that the adapter stores. Sources: arXiv 2106.09685 (LoRA), 2312.03732
(rsLoRA), 2402.09353 (DoRA); names and settings as in peft 0.21.
"""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from millrace.worker.errors import ModelError
from millrace.worker.loading.tensor_files import (
    DerivedTensor,
    Source,
    StoredTensor,
    find_stored,
    name_in_language_model,
)

logger = logging.getLogger("millrace.worker")

ADAPTER_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = re.compile(r"^(base_model\.model\.)+")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte)\.weight$")
_PART = re.compile(r"(?P<layer>.+)\.(?P<part>lora_(embedding_)?[AB]|lora_magnitude_vector)(\.default)?(\.weight)?")
_UNSUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
"""Settings that change what the tensors mean."""
_OWN_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Kinds of `init_lora_weights` that also change the base model."""
_HEAD = "lm_head.weight"
_RULE = "merge the adapter with merge_and_unload() of peft, and serve the result"


def with_adapter(weights: dict[str, Source], directory: Path) -> dict[str, Source]:
    """Return the weights of a base model with an adapter: layers are computed, and other tensors that it stores take the
    place of the base model's. Raises `ModelError`."""
    settings = _Settings.read(directory)
    if not (directory / WEIGHTS_FILE).exists():
        raise ModelError(f"{directory} has no {WEIGHTS_FILE}: copy the adapter again, or save it as safetensors")
    merged = dict(weights)
    layers: dict[str, dict[str, StoredTensor]] = {}
    for stored_name, tensor in find_stored(directory / WEIGHTS_FILE).items():
        name = name_in_language_model(_PREFIX.sub("", stored_name))
        if found := _PART.fullmatch(name):
            layers.setdefault(found["layer"], {})[found["part"]] = tensor
        else:
            _replace(merged, name.replace(".base_layer.", "."), tensor, directory)
    if not layers:
        raise ModelError(f"{directory / WEIGHTS_FILE} holds no LoRA weights: copy the adapter again")
    for layer, parts in layers.items():
        target = _name_in(merged, f"{layer}.weight")
        if target is None:
            raise ModelError(f"the adapter in {directory} is for {layer}, which the model does not have: {_RULE}")
        merged[target] = _with_factors(merged[target], parts, layer, settings, directory)
    if _HEAD not in merged:  # it is tied to the embedding, of which the adapter changes the input only
        for name, base in weights.items():
            if _EMBEDDING.search(name) and merged[name] is not base:
                merged[_HEAD] = base
    logger.info("merging the LoRA adapter in %s, for %s, into %d layers", directory, settings.base_model, len(layers))
    return merged


def _replace(merged: dict[str, Source], name: str, tensor: StoredTensor, directory: Path) -> None:
    """Put a whole tensor of the adapter, often in float32, in the place of the base model's, in the dtype of that."""
    target = _name_in(merged, name)
    if target is None and name != _HEAD:  # a tied base model does not store its head
        raise ModelError(f"the adapter in {directory} holds {name}, which the model does not have: {_RULE}")
    base = merged.get(target or _HEAD)
    _check_shape(base, tensor.shape, name, directory)
    merged[target or _HEAD] = DerivedTensor({"whole": tensor}, _whole, tensor.dtype if base is None else base.dtype)


def _with_factors(
    base: Source, parts: dict[str, StoredTensor], layer: str, settings: _Settings, directory: Path
) -> DerivedTensor:
    """Return the weight of a layer. `parts`: by their names in peft."""
    is_embedding = "lora_embedding_A" in parts
    if is_embedding and "lora_magnitude_vector" in parts:
        raise ModelError(f"the adapter in {directory} uses DoRA for {layer}, which is not supported: {_RULE}")
    names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    shapes = [parts[name].shape for name in names if name in parts]
    if [len(shape) for shape in shapes] != [2, 2] or 0 in shapes[0]:
        raise ModelError(f"a part of {layer} is missing in {directory / WEIGHTS_FILE}: copy the adapter again")
    a, b = shapes
    is_transposed = is_embedding or settings.is_transposed
    _check_shape(base, (a[1], b[0]) if is_transposed else (b[0], a[1]), layer, directory)
    scale = settings.alpha_of(layer) / (math.sqrt(a[0]) if settings.is_stabilized else a[0])
    return DerivedTensor({"base": base, **parts}, partial(_merge, scale, names, is_transposed), base.dtype)


@dataclass(frozen=True)
class _Settings:
    """What adapter_config.json says."""

    alpha: float
    alphas: dict[re.Pattern[str], float]
    """By pattern of the names of layers."""
    is_stabilized: bool
    is_transposed: bool
    base_model: str

    @classmethod
    def read(cls, directory: Path) -> _Settings:
        """Raises `ModelError`."""
        path = directory / ADAPTER_FILE
        try:
            raw = json.loads(path.read_bytes())
            kind, start = raw["peft_type"], str(raw.get("init_lora_weights"))
            patterns = raw.get("alpha_pattern") or {}
            settings = cls(
                float(raw.get("lora_alpha", 8)),
                {re.compile(rf"(.*\.)?({pattern})"): float(alpha) for pattern, alpha in patterns.items()},
                bool(raw.get("use_rslora")),
                bool(raw.get("fan_in_fan_out")),
                str(raw.get("base_model_name_or_path") or "a model without a name"),
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, re.error) as error:
            raise ModelError(f"{path} cannot be read ({error!r}): copy the adapter again") from error
        if kind != "LORA":
            raise ModelError(f"{directory} is an adapter of kind {kind}, and only LORA is supported: {_RULE}")
        used = [name for name in _UNSUPPORTED if raw.get(name)]
        used += [f"init_lora_weights={start}"] * start.lower().startswith(_OWN_BASE)
        if used:
            raise ModelError(f"the adapter in {directory} uses {', '.join(used)}, which is not supported: {_RULE}")
        return settings

    def alpha_of(self, layer: str) -> float:
        return next((alpha for pattern, alpha in self.alphas.items() if pattern.fullmatch(layer)), self.alpha)


def _name_in(weights: dict[str, Source], name: str) -> str | None:
    """Return how the base checkpoint calls a tensor: the name in the model, perhaps without that of its decoder."""
    return next((each for each in (name, name.partition(".")[2]) if each in weights), None)


def _check_shape(base: Source | None, shape: tuple[int, ...], name: str, directory: Path) -> None:
    """Refuse an adapter of another model, or of this one with added tokens."""
    if isinstance(base, StoredTensor) and base.shape != shape:
        raise ModelError(
            f"the adapter in {directory} is for {name} as {list(shape)}, but the model has {list(base.shape)}: name the "
            f"model that it was trained with (base_model_name_or_path), or {_RULE}"
        )


def _whole(parts: dict[str, Tensor]) -> Tensor:
    return parts["whole"].float()


def _merge(scale: float, names: tuple[str, str], is_transposed: bool, parts: dict[str, Tensor]) -> Tensor:
    """Return the weight in float32. `names`: of A and B. `is_transposed`: whether the base has [inputs, outputs]."""
    base, a, b = (parts[name].float() for name in ("base", *names))
    weight = torch.addmm(base.T if is_transposed else base, b, a, alpha=scale)
    if "lora_magnitude_vector" in parts:
        weight *= (parts["lora_magnitude_vector"].float().flatten() / weight.norm(dim=1)).unsqueeze(1)
    return weight.T if is_transposed else weight
