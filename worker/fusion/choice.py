"""Chooses the operations of a fused forward pass."""

from __future__ import annotations

import torch

from millrace.worker.attention.compiled import CompiledAttention
from millrace.worker.attention.interface import Attention
from millrace.worker.fusion.device import DeviceOperations, find_row_kernels
from millrace.worker.fusion.operations import CompiledOperations, Operations
from millrace.worker.kernels.library import DTYPES


def choose_operations(
    attention: Attention, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool = False
) -> Operations | None:
    """Return the fastest operations of the device, or None if the model's modules serve better or are asked for."""
    if device.type == "cuda":
        return DeviceOperations(attention, dtype, device, find_row_kernels(device), batch_invariant=batch_invariant)
    if isinstance(attention, CompiledAttention) and dtype in DTYPES:
        return CompiledOperations(attention.kernels, dtype, batch_invariant=batch_invariant)
    return None
