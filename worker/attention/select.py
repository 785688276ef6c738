"""Chooses the attention implementation of a rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from millrace.worker.attention.compiled import CompiledAttention
from millrace.worker.attention.cpu import CPUAttention
from millrace.worker.attention.interface import Attention
from millrace.worker.attention.reference import ReferenceAttention
from millrace.worker.errors import ConfigError
from millrace.worker.kernels.library import find_kernels
from millrace.worker.kv_pool import LayerSpec
from millrace.worker.triton_support import find_triton

logger = logging.getLogger("millrace.worker")

MAX_HEAD_SIZE = 256
"""Elements of a head that the Triton kernels compute."""
FP8_CAPABILITY = (8, 9)
"""Compute capability of the GPUs that convert fp8."""


def choose_attention(
    name: str, device: torch.device, kv_cache_dtype: str = "auto", *, batch_invariant: bool = False
) -> Attention:
    """Return the implementation `name`; "auto" is the fastest one for the device. Raises `ConfigError` when it does
    not run there, or not with such a KV pool. Not all are batch-invariant: see `choose_operations`."""
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "triton" if find_triton() else "reference"
    attention = _find_attention(name, device, batch_invariant)
    if kv_cache_dtype == "fp8" and name != "reference":
        if device.type == "cpu":
            raise ConfigError('kv_cache_dtype "fp8" needs a GPU: on a CPU use "auto" or "bfloat16"')
        if torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            raise ConfigError(
                f'kv_cache_dtype "fp8" needs a GPU of compute capability 8.9, unlike {device}: use "auto"'
            )
    return attention


def attention_for(attention: Attention, specs: Iterable[LayerSpec]) -> Attention:
    """Return `attention`, or the reference if it does not compute heads of these sizes."""
    size = max((max(spec.key_dim, spec.value_dim) for spec in specs), default=0)
    if attention.name != "triton" or size <= MAX_HEAD_SIZE:
        return attention
    logger.warning(
        "attention uses the slow reference implementation: the Triton kernel has no heads of %d elements", size
    )
    return ReferenceAttention()


def _find_attention(name: str, device: torch.device, batch_invariant: bool) -> Attention:
    if name == "reference":
        return ReferenceAttention()
    if name == "cpu" and device.type == "cpu":
        kernels = find_kernels()
        return CPUAttention() if kernels is None else CompiledAttention(kernels, rounds=not batch_invariant)
    if name == "triton" and device.type != "cpu" and find_triton():
        from millrace.worker.attention.triton import TritonAttention

        return TritonAttention(batch_invariant=batch_invariant)
    if name in ("cpu", "triton"):
        raise ConfigError(f'attention "{name}" does not run on {device}: use "auto" or "reference"')
    raise ConfigError(f'unknown attention "{name}": use "auto", "reference", "cpu" or "triton"')
