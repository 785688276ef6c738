"""Copies between host and device that do not wait for the device. On a CPU they return the tensors themselves.

torch's allocator of pinned memory is the ring of buffers: it reuses one after the copies that were queued with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16
_RESERVED, _LARGEST_RESERVED = 6, 1 << 21
"""Blocks of pinned memory of each size that are made at first, and their largest size in bytes: 24 MiB in all."""


def to_device(device: torch.device, tensors: Collection[Tensor]) -> list[Tensor]:
    """Return tensors of the host on the device. They are packed into pinned memory and moved by one copy."""
    if device.type == "cpu":
        return list(tensors)
    starts = _starts(tensors)
    packed = pinned((starts[-1],), torch.uint8)
    for start, tensor in zip(starts, tensors, strict=False):
        _view(packed, start, tensor).copy_(tensor)
    packed = packed.to(device, non_blocking=True)
    return [_view(packed, start, tensor) for start, tensor in zip(starts, tensors, strict=False)]


class FixedBuffer:
    """Owns tensors on the device with fixed addresses. One copy fills all of them."""

    def __init__(self, device: torch.device, shapes: Collection[tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._like = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
        *self._starts, num_bytes = _starts(self._like)
        self._packed = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.tensors = self._views(self._packed)

    @contextmanager
    def filling(self) -> Iterator[list[Tensor]]:
        """Yield tensors of zeros on the host. The block fills them; at its end they are copied to the device."""
        on_host = staging(self._packed.device, self._packed.shape, torch.uint8)
        ctypes.memset(on_host.data_ptr(), 0, on_host.nbytes)  # torch would wake up all its threads, which takes 0.5 ms
        yield self._views(on_host)
        self._packed.copy_(on_host, non_blocking=True)

    def _views(self, packed: Tensor) -> list[Tensor]:
        return [_view(packed, start, each) for start, each in zip(self._starts, self._like, strict=True)]


def to_host(tensor: Tensor) -> Tensor:
    """Start the copy of a tensor to pinned memory. It is complete when an event that is recorded later has happened."""
    if tensor.device.type == "cpu":
        return tensor
    return pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


def record_event(device: torch.device, *, enable_timing: bool = False) -> torch.cuda.Event | None:
    """Record an event behind the work that is queued on the device so far. None on a CPU."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event(enable_timing=enable_timing)
    event.record()
    return event


class HostCopy:
    """A copy of a tensor to the host, which begins now."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied = to_host(tensor)
        self._done = record_event(tensor.device)

    def is_ready(self) -> bool:
        """Whether `tolist` would return at once."""
        return self._done is None or self._done.query()

    def tolist(self) -> list[Any]:
        """Wait for the copy, and return the values."""
        if self._done is not None:
            self._done.synchronize()
        values: list[Any] = self._copied.tolist()
        return values


class CopyStream:
    """A queue of the device for copies that run beside the steps. On a CPU copies are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def copying(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """Queue the copies of the block here. They wait for the event and for the copies before them."""
        if self._stream is None:
            yield
            return
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield

    def finish(self) -> None:
        """Let the steps' work that is queued from now on wait for the copies so far. The host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return uninitialized pinned memory of the host."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def reserve_pinned() -> None:
    """Let torch's allocator of pinned memory have blocks for some steps. It makes one when it has none of its size that is
    free, and meanwhile CUDA waits for all steps that are queued."""
    sizes = (1 << bits for bits in range(_LARGEST_RESERVED.bit_length()))
    _blocks = [pinned((size,), torch.uint8) for size in sizes for _ in range(_RESERVED)]


def staging(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return uninitialized memory of the host, for a copy to the device."""
    return torch.empty(shape, dtype=dtype, device="cpu") if device.type == "cpu" else pinned(shape, dtype)


def _starts(tensors: Collection[Tensor]) -> list[int]:
    """Return the places of tensors in packed bytes, and the number of bytes."""
    return list(accumulate((-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in tensors), initial=0))


def _view(packed: Tensor, start: int, tensor: Tensor) -> Tensor:
    """Return the place of a tensor in the packed bytes, with its dtype and shape."""
    return packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
