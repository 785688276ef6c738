"""Checksums that tell whether weights are the same, from a sample of each tensor."""

from __future__ import annotations

import zlib
from itertools import chain

import torch
from torch import Tensor, nn

from millrace.worker.errors import WeightsChanged

SAMPLES = 256
"""Entries of each tensor that a checksum covers, evenly spaced."""


def checksums(model: nn.Module) -> dict[str, int]:
    """Return the checksum of each parameter and buffer, by name."""
    return {name: _checksum(tensor) for name, tensor in chain(model.named_parameters(), model.named_buffers())}


def check_unchanged(model: nn.Module, before: dict[str, int]) -> None:
    """Raise `WeightsChanged` unless the model's tensors have the checksums `before`."""
    now = checksums(model)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        raise WeightsChanged(
            f"{len(changed)} of {len(before)} tensors are not what they were before the sleep, first of all {changed[0]}: "
            "restart the engine, with the model's files as they were when it started"
        )


def weights_checksum(model: nn.Module) -> int:
    """Return one checksum of what was read from the model's files. Hosts may round computed buffers differently."""
    numbers = {name: _checksum(tensor) for name, tensor in model.state_dict().items()}
    return zlib.crc32(repr(sorted(numbers.items())).encode())


@torch.inference_mode()
def _checksum(tensor: Tensor) -> int:
    flat = (tensor.to_dense() if tensor.is_mkldnn else tensor).detach().reshape(-1)
    step = max(1, flat.numel() // SAMPLES)
    sample = flat[::step][:SAMPLES].contiguous().cpu()
    return zlib.crc32(bytes(sample.view(torch.uint8).tolist()))
