"""Finds the weights of a model directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from millrace.worker.errors import ModelError
from millrace.worker.loading.adapter import ADAPTER_FILE, with_adapter
from millrace.worker.loading.quantized import find_quantized, quantization_settings
from millrace.worker.loading.tensor_files import (
    MAPPED_DTYPES,
    Source,
    StoredTensor,
    find_stored,
    name_in_language_model,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def find_weights(directory: Path, declared: torch.dtype | None = None, model: Path | None = None) -> dict[str, Source]:
    """Return the tensors of the checkpoint in a directory, by name. `declared`: the dtype of its weights in config.json, to
    which quantized ones are rounded. If there is an adapter instead, they are those of `model` with it. Raises `ModelError`
    when files are missing or damaged, or cannot be read."""
    is_whole = any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE))
    if model is not None and (directory / ADAPTER_FILE).exists() and not is_whole:  # config.json may be beside it
        return with_adapter(find_weights(model, declared), directory)
    stored = {name: tensor for path in _weight_files(directory) for name, tensor in find_stored(path).items()}
    weights: dict[str, Source] = dict(stored)
    if settings := quantization_settings(directory):
        matrices = (tensor.dtype for _, tensor in sorted(stored.items()) if len(tensor.shape) > 1)
        of_matrices = next((dtype for dtype in matrices if dtype in MAPPED_DTYPES), "F32")
        dtype = next((name for name, each in MAPPED_DTYPES.items() if each == declared), of_matrices)
        weights = find_quantized(stored, settings, dtype)
    weights = _of_language_model(weights)
    for tensor in weights.values():
        _check_dtype(tensor)
    return weights


def _of_language_model(weights: dict[str, Source]) -> dict[str, Source]:
    """Return the tensors of the language model, by its own names, where a checkpoint has an encoder too."""
    names = {name: name_in_language_model(name) for name in weights}
    if all(name == own for name, own in names.items()):
        return weights
    return {own: weights[name] for name, own in names.items() if own != name or name.startswith("lm_head.")}


def _check_dtype(tensor: Source) -> None:
    """Refuse quantized weights that would be taken for numbers. Buffers may be integers."""
    if not isinstance(tensor, StoredTensor) or tensor.dtype in MAPPED_DTYPES:
        return
    if tensor.dtype.startswith("F8") or tensor.name.endswith(".weight"):
        raise ModelError(
            f"{tensor.name} in {tensor.path} is stored as {tensor.dtype}: use a checkpoint in 16 or 32 bits"
        )


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if index.exists():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
            return sorted(directory / name for name in names)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ModelError(f"{index} is damaged ({error!r}): copy the model again") from error
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    if (directory / ADAPTER_FILE).exists():
        raise ModelError(f"{directory} is a LoRA adapter ({ADAPTER_FILE}): name its base model, and it as adapter")
    found = sorted(directory.glob("*.safetensors"))
    if found:
        return found
    if any(directory.glob("*.bin")):
        raise ModelError(f"{directory} has its weights in .bin files, which can run code: convert them to safetensors")
    if any(directory.glob("*.gguf")):
        raise ModelError(f"{directory} has its weights in GGUF, which is not supported: use the safetensors checkpoint")
    raise ModelError(f"{directory} has no safetensors files: download the model's weights")
