"""Chooses the attention implementation of a rank."""

from __future__ import annotations

import torch

from millrace.worker.attention.compiled import CompiledAttention
from millrace.worker.attention.cpu import CPUAttention
from millrace.worker.attention.interface import Attention
from millrace.worker.attention.reference import ReferenceAttention
from millrace.worker.errors import ConfigError
from millrace.worker.kernels.library import find_kernels
from millrace.worker.triton_support import find_triton


def choose_attention(name: str, device: torch.device) -> Attention:
    """Return the implementation `name`; "auto" is the fastest one for the device. Raises `ConfigError`."""
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "triton" if find_triton() else "reference"
    if name == "reference":
        return ReferenceAttention()
    if name == "cpu" and device.type == "cpu":
        kernels = find_kernels()
        return CPUAttention() if kernels is None else CompiledAttention(kernels)
    if name == "triton" and device.type != "cpu" and find_triton():
        from millrace.worker.attention.triton import TritonAttention

        return TritonAttention()
    if name == "triton":
        raise ConfigError(f'attention "triton" does not run on {device}: use "auto" or "reference"')
    if name == "cpu":
        raise ConfigError(f'attention "cpu" does not run on {device}: use "auto" or "reference"')
    raise ConfigError(f'unknown attention "{name}": use "auto", "reference", "cpu" or "triton"')
