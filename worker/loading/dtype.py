"""The number format of a model's weights: as stored, and as computed."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import PretrainedConfig

from millrace.worker.errors import ModelError
from millrace.worker.loading.checkpoint import open_weights

logger = logging.getLogger("millrace.worker")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float32}
"""By their names in safetensors. 64 bits are computed in 32."""


def choose_dtype(name: str, checkpoint_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the number format of weights and activations. "auto" follows the checkpoint, except float16 on a CPU."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu" and checkpoint_dtype == torch.float16:
        logger.info("the checkpoint is float16, which is slow on a CPU: running in float32")
        return torch.float32
    return checkpoint_dtype


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
