"""The tensors of a checkpoint: stored in safetensors files, or computed from several of these."""

from __future__ import annotations

import errno
import json
import mmap
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace.worker.errors import ModelError
from millrace.worker.linear.codes import Codes

MAPPED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By their names in safetensors."""
_LANGUAGE_MODEL = re.compile(r"(^|\.)(language_model|text_model)\.")


def name_in_language_model(name: str) -> str:
    """Return the name that a tensor, or a layer, of a model that takes images or audio too has in its language model."""
    return _LANGUAGE_MODEL.sub(r"\1", name, count=1)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file. `dtype`: as safetensors names it."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class DerivedTensor:
    """A tensor that is computed from others whenever it is read: a quantized weight, or one with an adapter.

    `compute` is given the parts on the device of the model, and returns float32, or codes of it. `dtype`: of the model's
    weights, to which that is rounded, as safetensors names it."""

    parts: Mapping[str, Source]
    compute: Callable[[dict[str, Tensor]], Tensor | Codes]
    dtype: str


Source = StoredTensor | DerivedTensor


def find_stored(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, by name. Raises `ModelError` when the file is missing or damaged."""
    found = {}
    with open_weights(path) as file:
        for name in file.keys():  # noqa: SIM118  # it is no dict
            tensor = file.get_slice(name)
            found[name] = StoredTensor(path, name, tensor.get_dtype(), tuple(tensor.get_shape()))
    return found


class WeightFiles:
    """Reads the tensors of a checkpoint. Opens each file once."""

    def __init__(self) -> None:
        self._files: dict[Path, WeightFile] = {}

    def of(self, tensor: StoredTensor) -> WeightFile:
        """Raises `ModelError`."""
        if tensor.path not in self._files:
            self._files[tensor.path] = WeightFile(tensor.path)
        return self._files[tensor.path]

    def read(self, tensor: Source, device: torch.device) -> Tensor:
        """Return a stored tensor, mapped to its file, or one that is computed on a device. Raises `ModelError`."""
        if isinstance(tensor, StoredTensor):
            return self.of(tensor).tensor(tensor.name)
        computed = self.derive(tensor, device)
        return computed.numbers() if isinstance(computed, Codes) else computed

    def derive(self, tensor: DerivedTensor, device: torch.device) -> Tensor | Codes:
        """Return what is computed on a device. Raises `ModelError`."""
        try:
            return tensor.compute({name: self.read(part, device).to(device) for name, part in tensor.parts.items()})
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (LookupError, TypeError, ValueError, RuntimeError) as error:  # parts are missing, or have other shapes
            names = ", ".join(part.name for part in tensor.parts.values() if isinstance(part, StoredTensor))
            raise ModelError(
                f"no weight can be computed from {names} ({error!r}): copy the model again, or use another"
            ) from error


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
