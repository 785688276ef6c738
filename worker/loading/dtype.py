"""The number format of a model's weights: as stored, and as computed."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import PretrainedConfig

from millrace.worker.errors import ModelError
from millrace.worker.kernels.library import find_kernels, has_bfloat16
from millrace.worker.loading.checkpoint import open_weights

logger = logging.getLogger("millrace.worker")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float32}
"""By their names in safetensors. 64 bits are computed in 32."""


def choose_dtype(name: str, checkpoint_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the number format of activations, and of weights unless `keeps_bfloat16`. "auto" follows the checkpoint, but a
    CPU takes float32 where it has no instructions for the checkpoint's. Logs what is slow."""
    if device.type != "cpu":
        return checkpoint_dtype if name == "auto" else DTYPES[name]
    if name == "auto":
        if checkpoint_dtype == torch.float16:
            logger.info("the checkpoint is float16, which is slow on a CPU: running in float32")
            return torch.float32
        if checkpoint_dtype == torch.bfloat16 and not has_bfloat16(find_kernels()):
            logger.info("the checkpoint is bfloat16, and this CPU has no instructions for it: running in float32")
            return torch.float32
        return checkpoint_dtype
    dtype = DTYPES[name]
    is_emulated = dtype == torch.float16 or (dtype == torch.bfloat16 and not has_bfloat16(find_kernels()))
    if is_emulated:
        logger.warning("%s is emulated on this CPU, which is slow: use --dtype auto or float32", name)
    return dtype


def choose_kv_cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the number format of the KV pool. "auto" follows that of the activations, `dtype`."""
    return dtype if name == "auto" else DTYPES[name]


def checkpoint_dtype(config: PretrainedConfig, tensor_files: dict[str, Path]) -> torch.dtype:
    """Return the number format that config.json declares, or else that of the first stored matrix."""
    declared = config.dtype
    if isinstance(declared, torch.dtype) and declared in DTYPES.values():
        return declared
    for name, path in sorted(tensor_files.items()):
        with open_weights(path) as file:
            tensor = file.get_slice(name)
            if len(tensor.get_shape()) > 1:
                stored = tensor.get_dtype()
                if stored not in STORED_DTYPES:
                    raise ModelError(f"{name} in {path} is stored as {stored}: use a checkpoint in 16 or 32 bits")
                return STORED_DTYPES[stored]
    raise ModelError("the safetensors files hold no weight matrix: copy the model again")
