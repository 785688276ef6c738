"""The weight files of a model directory, and the tensors that each holds."""

from __future__ import annotations

import errno
import json
import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace.worker.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_config.json"
MAPPED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By their names in safetensors."""


def find_weights(directory: Path) -> dict[str, Path]:
    """Return the file of each stored tensor, by tensor name. Raises `ModelError` when files are missing or damaged."""
    tensor_files: dict[str, Path] = {}
    for path in _weight_files(directory):
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                _check_dtype(path, name, file.get_slice(name).get_dtype())
                tensor_files[name] = path
    return tensor_files


def _check_dtype(path: Path, name: str, dtype: str) -> None:
    """Refuse quantized weights, which would be taken for numbers. Buffers may be integers."""
    if dtype not in MAPPED_DTYPES and (dtype.startswith("F8") or name.endswith(".weight")):
        raise ModelError(f"{name} in {path} is stored as {dtype}: use a checkpoint in 16 or 32 bits")


def open_weights(path: Path) -> Any:
    """Open a file with safetensors. Raises `ModelError`. The returned object raises safetensors' own errors."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelError(f"{path} is missing, but the index names it: copy the model again") from None
    except (OSError, SafetensorError) as error:
        if _begin_of(path).startswith(b"version https://git-lfs"):
            raise ModelError(f"{path} is a pointer of Git LFS instead of weights: run git lfs pull") from error
        raise ModelError(f"{path} is truncated or damaged ({error}): copy the model again") from error


def _begin_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError:
        return b""


class WeightFile:
    """Maps a safetensors file into memory. The mapping ends with the last of its tensors."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError`."""
        self._file = open_weights(path)  # checks the header
        try:
            with path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise
            raise ModelError(f"{path} cannot be read ({error}): copy the model again") from error
        header_bytes = int.from_bytes(self._memory[:8], "little")
        self._header = json.loads(self._memory[8 : 8 + header_bytes])
        self._begin = 8 + header_bytes

    def tensor(self, name: str) -> Tensor:
        """Return a stored tensor. It is read from the file whenever its memory is: if that fails, the process ends."""
        entry = self._header[name]
        begin, end = (self._begin + offset for offset in entry["data_offsets"])
        dtype = MAPPED_DTYPES.get(entry["dtype"])
        if dtype is None or begin == end:
            tensor: Tensor = self._file.get_tensor(name)
            return tensor
        flat = torch.frombuffer(self._memory, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=begin)
        return flat.view(entry["shape"])

    def unmapping(self, name: str) -> Callable[[], None]:
        """Return a function that takes the pages of a tensor out of this process's memory. Later reads map them again."""
        begin, end = (self._begin + offset for offset in self._header[name]["data_offsets"])
        first, last = (
            -(-begin // mmap.PAGESIZE),
            end // mmap.PAGESIZE,
        )  # not the pages that it shares with its neighbours
        if first >= last:
            return lambda: None
        return partial(self._memory.madvise, mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


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
        raise ModelError(f"{directory} is a LoRA adapter ({ADAPTER_FILE}): merge it into its base model, and use that")
    found = sorted(directory.glob("*.safetensors"))
    if found:
        return found
    if any(directory.glob("*.bin")):
        raise ModelError(f"{directory} has its weights in .bin files, which can run code: convert them to safetensors")
    if any(directory.glob("*.gguf")):
        raise ModelError(f"{directory} has its weights in GGUF, which is not supported: use the safetensors checkpoint")
    raise ModelError(f"{directory} has no safetensors files: download the model's weights")
