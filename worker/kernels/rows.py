"""Norms and gated activations through the compiled kernels.

Shapes: M rows, K entries in each.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from millrace.worker.kernels.library import KERNEL_DTYPES, GateCall, Kernels, NormCall

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""As in kernels.h."""


class RowNorm:
    """An RMSNorm with float32 weights [K]."""

    def __init__(self, kernels: Kernels, weights: Tensor, epsilon: float, dtype: torch.dtype) -> None:
        self._weights = weights.float().contiguous()
        self._call = NormCall(
            weights=self._weights.data_ptr(), size=weights.numel(), dtype=KERNEL_DTYPES[dtype], epsilon=epsilon
        )
        self._pointer = ctypes.byref(self._call)
        self._run = kernels.table.norm

    def __call__(self, inputs: Tensor, outputs: Tensor, *, adds: bool = False) -> None:
        """Write the norms of contiguous rows [M, K] to the outputs [M, K], or add them to the outputs."""
        call = self._call
        call.input, call.output, call.num_rows = inputs.data_ptr(), outputs.data_ptr(), inputs.shape[0]
        call.adds, call.num_threads = adds, torch.get_num_threads()
        self._run(self._pointer)


class GatedActivation:
    """`activation(gate) * value`."""

    def __init__(self, kernels: Kernels, activation: str, size: int, dtype: torch.dtype) -> None:
        self._call = GateCall(size=size, dtype=KERNEL_DTYPES[dtype], activation=ACTIVATIONS[activation])
        self._pointer = ctypes.byref(self._call)
        self._run = kernels.table.gate

    def __call__(self, inputs: Tensor, outputs: Tensor) -> None:
        """Write the outputs [M, K] for contiguous inputs [M, 2 K]: the gates, then the values."""
        call = self._call
        call.input, call.output, call.num_rows = inputs.data_ptr(), outputs.data_ptr(), inputs.shape[0]
        call.num_threads = torch.get_num_threads()
        self._run(self._pointer)
