"""A model directory, read and judged: its configuration, and the module tree that transformers builds from it.

Any decoder-only language model whose attention goes through transformers' attention interface is served. What would be
computed wrongly is refused here by its configuration, or after loading by `millrace.worker.loading.probe`.
"""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from millrace.worker.attention.interface import ATTENTION_NAME
from millrace.worker.errors import ConfigError, ModelError

logger = logging.getLogger("millrace.worker")

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def read_config(directory: Path) -> PretrainedConfig:
    """The model's configuration. Raises `ModelError` for what can be known from it not to work."""
    raw = _read_config_json(directory)
    _check_code(directory, raw)
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{directory} is a quantized checkpoint ({method}), which is not supported: use the original one"
        )
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a config class makes of the file's values
        raise ModelError(f"transformers cannot read {directory / 'config.json'}: {error}") from error
    _check_architecture(config)
    return config


def build_empty(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model's modules on the meta device, with our attention; no memory is taken."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=ATTENTION_NAME, trust_remote_code=False
            )
    except Exception as error:  # whatever a model class makes of its configuration
        raise ModelError(f"transformers cannot build {config.model_type} from its config.json: {error}") from error
    _check_model(model)
    return model.eval()


def longest_sequence(config: PretrainedConfig, asked: int | None) -> int:
    """Tokens of the longest sequence: what the model was made for, or less when less is asked."""
    allowed: int | None = getattr(config, "max_position_embeddings", None)
    if asked is not None and asked < 1:
        raise ConfigError(f"max_model_len is {asked}: it must be at least 1")
    if allowed is None and asked is None:
        raise ModelError("the model's config.json does not say how long a sequence may be: set max_model_len")
    if asked is not None and allowed is not None and asked > allowed:
        logger.warning("max_model_len %d is more than the model's %d positions: using %d", asked, allowed, allowed)
    return min(length for length in (allowed, asked) if length is not None)


def _read_config_json(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise ModelError(f"there is no directory {directory}: give the path of a downloaded model")
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{directory} has no config.json: give the directory that holds the model's own files"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): copy the model again") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object: copy the model again")
    return raw


def _check_code(directory: Path, raw: dict[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type in CONFIG_MAPPING:
        if "auto_map" in raw:
            logger.info("%s brings code of its own, which is not run: transformers knows %s", directory, model_type)
        return
    if "auto_map" in raw:
        files = ", ".join(sorted(map(str, raw["auto_map"].values())))
        raise ModelError(f"{directory} needs code of its own (auto_map: {files}), and trust_remote_code is never used")
    raise ModelError(f'the installed transformers does not know model_type "{model_type}": update transformers')


def _check_architecture(config: PretrainedConfig) -> None:
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder: only decoder-only language models are supported")
    if config.get_text_config() is not config:
        raise ModelError(f"{name} takes more than text: use a text-only checkpoint of it")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{name} is not a causal language model: only those can generate")
    unknown = set(getattr(config, "layer_types", None) or ()) - SERVED_LAYER_TYPES
    if unknown:
        raise ModelError(f"{name} has layers of kind {', '.join(sorted(unknown))}, which are not supported")


def _check_model(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise ModelError(f"{name} keeps a state besides keys and values, which is not supported")
    if not model.is_backend_compatible():
        raise ModelError(f"{name} does not use transformers' attention interface, which is needed to serve it")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{name} cannot leave logits out (no logits_to_keep), which is needed to serve it")
