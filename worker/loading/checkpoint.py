"""The weight files of a model directory, and which tensors each holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from millrace.worker.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def find_weights(directory: Path) -> dict[str, Path]:
    """Return the file of each stored tensor, by tensor name. Raises `ModelError` when files are missing or damaged."""
    tensor_files: dict[str, Path] = {}
    for path in _weight_files(directory):
        with open_weights(path) as file:
            tensor_files.update(dict.fromkeys(file.keys(), path))
    return tensor_files


def open_weights(path: Path) -> Any:
    """Open a file with safetensors. Raises `ModelError`. The returned object raises safetensors' own errors."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelError(f"{path} is missing, but the index names it: copy the model again") from None
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is truncated or damaged ({error}): copy the model again") from error


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
    found = sorted(directory.glob("*.safetensors"))
    if found:
        return found
    if any(directory.glob("*.bin")):
        raise ModelError(f"{directory} has its weights in .bin files, which can run code: convert them to safetensors")
    raise ModelError(f"{directory} has no safetensors files: download the model's weights")
