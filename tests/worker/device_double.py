"""A double for a GPU: computes on the CPU, and refuses what would wait for the device.

Its tensors claim to be on the device "meta", and hold their values on the host. What a GPU would wait for raises `Waited`:
values that the host reads, shapes that depend on values, and copies from or to memory that is not pinned. A copy to the
host has wrong values until an event is synchronized that was recorded after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from millrace.worker import host_tier, runner, transfer
from millrace.worker.grammars import Grammars

DEVICE = torch.device("meta")
READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"}
SHAPES = {"nonzero", "nonzero_numpy", "argwhere", "masked_select", "unique", "_unique2", "unique_dim", "bincount"}
COPIES = {"to", "_to_copy", "copy_"}
WRONG_VALUE = 77


class Waited(Exception):
    """The host would wait for the device."""


class DeviceTensor(Tensor):
    """A tensor of the double, with its values on the host."""

    on_host: Tensor

    @staticmethod
    def __new__(cls: type[DeviceTensor], values: Tensor) -> DeviceTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        tensor.on_host = values
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} outside of the device double")


class DeviceEvent:
    """An event. It has happened when it was synchronized, or when the third one after it is recorded."""

    def __init__(self, device: DeviceDouble) -> None:
        self._copies, device.copies = device.copies, []
        device.events.append(self)
        self._device = device

    def query(self) -> bool:
        if len(self._device.events) - self._device.events.index(self) > 3:
            self.synchronize()
        return not self._copies

    def synchronize(self) -> None:
        copies, self._copies = self._copies, []
        with torch.inference_mode():
            for target, values in copies:
                target.copy_(values)

    def elapsed_time(self, other: DeviceEvent) -> float:
        return 0.0


class DeviceStream:
    """A stream for copies. They are made as late as possible: when the steps wait for them."""

    def __init__(self, device: DeviceDouble) -> None:
        self._device = device
        self._copies: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def copying(self, after: DeviceEvent) -> Iterator[None]:
        assert after in self._device.events
        self._device.queued = self._copies
        yield
        self._device.queued = None

    def finish(self) -> None:
        for target, source in self._copies:
            target.copy_(source)
        self._copies.clear()


class DeviceDouble(TorchDispatchMode):
    """Owns the pinned memory, the events, and the copies to the host behind the last event."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.events: list[DeviceEvent] = []
        self.queued: list[tuple[Tensor, Tensor]] | None = None
        """The copies of the stream that is the current one, unless that is the steps'."""
        self.num_uploads = 0
        self._pinned: dict[int, Tensor] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give the worker's code the pinned memory and the events of this double."""

        def record_event(device: torch.device, *, enable_timing: bool = False) -> DeviceEvent | None:
            return None if device.type == "cpu" else DeviceEvent(self)

        def masks(grammars: Grammars, *arguments: Any) -> Tensor:
            return self.pin(compute_masks(grammars, *arguments))  # they are pinned if torch has a GPU

        compute_masks = Grammars._masks
        monkeypatch.setattr(Grammars, "_masks", masks)
        monkeypatch.setattr(transfer, "pinned", lambda shape, dtype: self.pin(torch.empty(shape, dtype=dtype)))
        monkeypatch.setattr(host_tier, "CopyStream", lambda _: DeviceStream(self))
        for module in (transfer, runner, host_tier):
            monkeypatch.setattr(module, "record_event", record_event)

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        target = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        if any(type(tensor) is Tensor and tensor.is_meta for tensor in tensors):
            raise Waited("a tensor was made on the device from values of the host: use transfer.to_device")
        is_on_device = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        if not is_on_device and target != DEVICE:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in COPIES and self._is_transfer(args[0], args[1:], target):
            return self._copy(name, args, kwargs)
        self._check(name, args, kwargs, tensors)
        arguments = {**kwargs, **({"device": torch.device("cpu")} if "device" in kwargs else {})}
        result = func(*tree_map(_values, args), **tree_map(_values, arguments))
        return tree_map(lambda each: DeviceTensor(each) if isinstance(each, Tensor) else each, result)

    def _is_transfer(self, first: Tensor, others: tuple[Any, ...], target: torch.device | None) -> bool:
        other = others[0].device if others and isinstance(others[0], Tensor) else target
        return other is not None and other != first.device

    def _copy(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        source, destination = (args[1], args[0]) if name == "copy_" else (args[0], None)
        if not (kwargs.get("non_blocking") or any(each is True for each in args)):
            raise Waited("a copy waits for the device: use transfer.to_device or transfer.HostCopy")
        host = destination if isinstance(source, DeviceTensor) else source
        if host is None or not self.is_pinned(host):
            raise Waited("a copy from or to memory that is not pinned: use transfer.to_device or transfer.HostCopy")
        if self.queued is not None:
            assert destination is not None
            self.queued.append(tuple(each if each is host else each.on_host for each in (destination, source)))
            return destination
        if host is source:
            self.num_uploads += 1
            if destination is None:
                return DeviceTensor(source.clone())
            destination.on_host.copy_(source)
            return destination
        self.copies.append((host, source.on_host.clone()))
        return host.fill_(WRONG_VALUE)

    def _check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        if name in READS | SHAPES:
            raise Waited(f"{name} of a tensor on the device")
        if name == "scalar_tensor":
            raise Waited("a number is assigned by indices: torch copies it from memory that is not pinned")
        if name in ("index", "index_put", "index_put_") and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1]
        ):
            raise Waited("the shape of what a mask selects depends on values")
        if name == "repeat_interleave" and kwargs.get("output_size") is None and len(tensors) > 1:
            raise Waited("repeat_interleave without output_size")
        if any(tensor.dim() and not isinstance(tensor, DeviceTensor) for tensor in tensors):
            raise Waited(f"{name} of tensors on the host and on the device")


def _values(leaf: Any) -> Any:
    return leaf.on_host if isinstance(leaf, DeviceTensor) else leaf
