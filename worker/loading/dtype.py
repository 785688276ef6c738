"""The number format of a model's weights: as stored, and as computed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from millrace.executor.wire.messages import WorkerConfig
from millrace.worker.errors import ModelError
from millrace.worker.kernels.library import KERNEL_DTYPES, find_kernels, has_bfloat16
from millrace.worker.kv_pool import FP8
from millrace.worker.linear.modules import widened_linear
from millrace.worker.loading.tensor_files import MAPPED_DTYPES, Source, StoredTensor
from millrace.worker.triton_support import find_triton

logger = logging.getLogger("millrace.worker")

LARGEST_SHARE = 0.5
"""Of a GPU's memory, for weights in 16 bits: more of them stay quantized, which is slower for many rows."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the number format of activations, and of weights unless `can_keep_bfloat16`. "auto" follows the checkpoint's,
    `stored`, but a CPU takes float32 where it has no instructions for that. Logs what is slow."""
    dtype = stored if name == "auto" else DTYPES[name]
    is_emulated = device.type == "cpu" and (
        dtype == torch.float16 or (dtype == torch.bfloat16 and not has_bfloat16(find_kernels()))
    )
    if not is_emulated:
        return dtype
    if name != "auto":
        logger.warning("%s is emulated on this CPU, which is slow: use --dtype auto or float32", name)
        return dtype
    if dtype == torch.float16:
        logger.info("the checkpoint is float16, which is slow on a CPU: running in float32")
    else:
        logger.info("the checkpoint is bfloat16, and this CPU has no instructions for it: running in float32")
    return torch.float32


def can_keep_bfloat16(dtype: torch.dtype, weights: dict[str, Source], device: torch.device) -> bool:
    """Whether float32 layers keep weights that are stored in bfloat16. The numbers are the same, since the compiled kernel
    widens them on the way. They take half of the memory, and half of the time at few rows."""
    return (
        dtype == torch.float32 and _packs_weights(device) and all(tensor.dtype == "BF16" for tensor in weights.values())
    )


def keeps_codes(config: WorkerConfig, model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the weights of quantized checkpoints stay codes, which the kernels of linear layers compute with. On a GPU
    they do where those of the meta model would take much of its memory."""
    if device.type == "cuda":
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        memory = config.gpu_memory_utilization * torch.cuda.get_device_properties(device).total_memory
        return num_bytes > LARGEST_SHARE * memory and dtype != torch.float32 and find_triton()
    return config.quantization is None and dtype in KERNEL_DTYPES and _packs_weights(device)


def _packs_weights(device: torch.device) -> bool:
    kernels = find_kernels() if device.type == "cpu" else None
    return kernels is not None and kernels.instruction_set != "generic"


def keep_bfloat16(model: PreTrainedModel) -> None:
    """Give the linear layers and the embedding of a meta model bfloat16 weights, and a forward that widens them."""
    embedding = model.get_input_embeddings()
    is_plain = type(embedding) is nn.Embedding
    for module in model.modules():
        if is_plain and module is embedding:
            _keep(module, _widened_embedding)
        elif type(module) is nn.Linear and (is_plain or module is not model.get_output_embeddings()):
            _keep(module, widened_linear)


def _keep(module: Any, forward: Callable[..., Tensor]) -> None:
    module.forward = partial(forward, module, module.weight.dtype)
    module.weight = nn.Parameter(module.weight.bfloat16(), requires_grad=False)


def _widened_embedding(module: nn.Embedding, dtype: torch.dtype, token_ids: Tensor) -> Tensor:
    return F.embedding(token_ids, module.weight).to(dtype)


def choose_kv_cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the number format of the KV pool. "auto" follows that of the activations, `dtype`."""
    return dtype if name == "auto" else {**DTYPES, "fp8": FP8}[name]


def declared_dtype(config: PretrainedConfig) -> torch.dtype | None:
    """Return the number format that config.json declares."""
    return config.dtype if isinstance(config.dtype, torch.dtype) and config.dtype in DTYPES.values() else None


def checkpoint_dtype(config: PretrainedConfig, weights: dict[str, Source]) -> torch.dtype:
    """Return the number format that config.json declares, or else that of the first stored matrix."""
    if (declared := declared_dtype(config)) is not None:
        return declared
    for name, tensor in sorted(weights.items()):
        if isinstance(tensor, StoredTensor) and len(tensor.shape) > 1:
            if (dtype := MAPPED_DTYPES.get(tensor.dtype)) is None:
                raise ModelError(
                    f"{name} in {tensor.path} is stored as {tensor.dtype}: use a checkpoint in 16 or 32 bits"
                )
            return torch.float32 if dtype == torch.float64 else dtype
    raise ModelError("the safetensors files hold no weight matrix: copy the model again")
