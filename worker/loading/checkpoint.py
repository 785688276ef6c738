"""The weight files of a model directory: which they are, what each holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from millrace.worker.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float32}


def find_weights(directory: Path) -> dict[str, Path]:
    """The file of each stored tensor, by tensor name. Raises `ModelError` when files are missing or damaged."""
    tensor_files: dict[str, Path] = {}
    for path in _weight_files(directory):
        with open_weights(path) as file:
            tensor_files.update(dict.fromkeys(file.keys(), path))
    return tensor_files


def checkpoint_dtype(config: PretrainedConfig, tensor_files: dict[str, Path]) -> torch.dtype:
    """The number format that config.json declares, or else that of the stored weights."""
    declared = config.dtype
    if isinstance(declared, torch.dtype) and declared in STORED_DTYPES.values():
        return declared
    return stored_dtype(tensor_files)


def stored_dtype(tensor_files: dict[str, Path]) -> torch.dtype:
    """The number format of the first weight matrix."""
    for name, path in sorted(tensor_files.items()):
        with open_weights(path) as file:
            tensor = file.get_slice(name)
            if len(tensor.get_shape()) > 1:
                if tensor.get_dtype() in STORED_DTYPES:
                    return STORED_DTYPES[tensor.get_dtype()]
                kind = tensor.get_dtype()
                raise ModelError(f"{name} in {path} is stored as {kind}: use a checkpoint in 16 or 32 bits")
    raise ModelError("the safetensors files hold no weight matrix: copy the model again")


def open_weights(path: Path) -> Any:
    """The file opened for reading tensors, by safetensors. Its context manager's errors are not ours."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelError(f"{path} is missing, though the index names it: copy the model again") from None
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is truncated or damaged ({error}): copy the model again") from error


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if index.exists():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
            return sorted(directory / name for name in names)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is damaged ({error!r}): copy the model again") from error
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    found = sorted(directory.glob("*.safetensors"))
    if found:
        return found
    if any(directory.glob("*.bin")):
        raise ModelError(f"{directory} has its weights in .bin files, which can run code: convert them to safetensors")
    raise ModelError(f"{directory} has no safetensors files: download the model's weights")
