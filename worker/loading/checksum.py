"""Numbers that tell whether weights are the same, of a sample of them."""

from __future__ import annotations

import zlib
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

SAMPLES = 256
"""Entries of each tensor that a checksum looks at, evenly spaced."""


def checksums(model: PreTrainedModel) -> dict[str, int]:
    """A number for each parameter and buffer."""
    return {name: _checksum(tensor) for name, tensor in chain(model.named_parameters(), model.named_buffers())}


def weights_checksum(model: PreTrainedModel) -> int:
    """One number for all that the model's files have given it. Buffers that were computed are left out: another host may
    round them otherwise."""
    numbers = {name: _checksum(tensor) for name, tensor in model.state_dict().items()}
    return zlib.crc32(repr(sorted(numbers.items())).encode())


@torch.inference_mode()
def _checksum(tensor: Tensor) -> int:
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // SAMPLES)
    sample = flat[::step][:SAMPLES].contiguous().cpu()
    return zlib.crc32(bytes(sample.view(torch.uint8).tolist()))
