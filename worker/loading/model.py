"""Reads a model's configuration and builds its modules with transformers.

Any decoder-only language model is served whose attention uses transformers' attention interface. A model that would be
computed wrongly is refused here, by its configuration, or after loading by `millrace.worker.loading.probe`.
"""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from millrace.worker.attention.interface import ATTENTION_NAME
from millrace.worker.errors import ModelError, unsupported
from millrace.worker.loading.adapter import ADAPTER_FILE
from millrace.worker.loading.quantized import QUANTIZATION_KEYS, quantization_settings
from millrace.worker.recurrent.modules import recurrent_modules

logger = logging.getLogger("millrace.worker")

_DRAWS = frozenset({"normal_", "uniform_", "kaiming_uniform_"})
"""Methods of tensors and functions of torch.nn.init."""
_OTHER_TASKS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForMaskedLM",
)
"""Ends of the names of architectures that generate no text, also of model types that have one that does."""
_NOT_CAUSAL = frozenset({"paligemma"})
"""Models of which the tokens of a prompt attend to later ones too."""
LAYERS_WITHOUT_CACHE = frozenset({"mlp", "moe"})
"""Kinds of layers that know nothing of earlier tokens. In other models these are parts of the layers with attention."""
SERVED_LAYER_TYPES = frozenset(
    {
        "full_attention",
        "sliding_attention",
        "linear_attention",
        "conv",
        "hybrid",
        "hybrid_sliding",
        *LAYERS_WITHOUT_CACHE,
    }
)


def read_config(directory: Path) -> PretrainedConfig:
    """Return the model's configuration. Raises `ModelError` when it shows that the model cannot be served."""
    raw = _read_config_json(directory)
    try:
        _check_code(directory, raw)
        if (directory / ADAPTER_FILE).exists():
            logger.warning("the LoRA adapter in %s is not used, since there is a whole model", directory)
        if settings := quantization_settings(directory):
            logger.info("the weights are quantized (%s)", settings["quant_method"])
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        config = _language_model(config)
        for name in QUANTIZATION_KEYS & vars(config).keys():  # transformers would need the quantizer's own package
            delattr(config, name)
        _check_architecture(config)
        _check_yarn(raw, config)
        return config
    except ModelError:
        raise
    except Exception as error:  # values of a wrong type fail here, and a config class may raise anything
        raise _damaged_config("read", directory, error) from error


def build_empty(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the modules on the meta device, which allocates no memory, with our attention."""
    try:
        with torch.device("cpu"), _WithoutValues():  # whatever default device the program of an `LLM` has set
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=ATTENTION_NAME, trust_remote_code=False
            )
    except Exception as error:  # a model class may raise anything for its configuration
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):  # it has a list of its own
            raise _without_interface(config.model_type) from error
        raise _damaged_config(f"build {config.model_type} from", str(config.name_or_path), error) from error
    _check_model(model)
    _keep_float32(model, dtype)
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]  # else `initialize_weights` computes no buffers later
    return model.to("meta").eval()  # type: ignore[arg-type]


def _keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give those tensors float32 that keep it in transformers, such as the biases that choose experts."""
    kept = set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    if dtype != torch.float32:
        kept |= set(model._keep_in_fp32_modules_strict or ())
    for name, module in model.named_modules() if kept else ():
        for tensors in (module._parameters, module._buffers):
            for leaf, tensor in tensors.items():
                if tensor is not None and tensor.is_floating_point() and any(each in f"{name}.{leaf}" for each in kept):
                    tensor.data = tensor.data.float()


class WithoutDraws(TorchFunctionMode):
    """Inside, random values are not drawn: parameters keep what is in their memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWS:
            return args[0] if args else options["tensor"]
        return func(*args, **options)


class _WithoutValues(WithoutDraws):
    """Inside, `torch.empty` allocates no memory either, so modules get parameters without values. Unlike on the meta device,
    all else is computed: many operations on meta tensors make torch import sympy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = {"device": "meta"} if func is torch.empty else {}
        return super().__torch_function__(func, types, args, (kwargs or {}) | device)


def longest_sequence(config: PretrainedConfig, max_model_len: int | None) -> int:
    """Return the maximum tokens of a sequence: the model's positions, or `max_model_len` when that is less."""
    allowed: int | None = getattr(config, "max_position_embeddings", None)
    if allowed is not None and allowed < 1:
        raise ModelError(f"max_position_embeddings in config.json is {allowed}: copy the model again")
    if allowed is None and max_model_len is None:
        raise ModelError("config.json has no max_position_embeddings: set max_model_len")
    if allowed is not None:
        allowed = max(allowed, _yarn_positions(config))
    if max_model_len is not None and allowed is not None and max_model_len > allowed:
        rule = "if it was trained for more, raise max_position_embeddings in its config.json"
        logger.warning(
            "max_model_len %d exceeds the model's %d positions, which are used: %s", max_model_len, allowed, rule
        )
    return min(length for length in (allowed, max_model_len) if length is not None)


def _yarn_positions(config: PretrainedConfig) -> int:
    """Return the positions that YaRN extends a model to, which config.json need not repeat. 0 without YaRN."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in rope:  # settings by layer type: other layers attend to a window, at any position
        rope = rope["full_attention"] or {}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if rope.get("rope_type") != "yarn" or not isinstance(factor, int | float) or not isinstance(original, int):
        return 0
    return int(factor * original)


def _read_config_json(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise ModelError(f"there is no directory {directory}: give the path of a downloaded model")
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{directory} has no config.json: give the directory with the model's files") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({error}): copy the model again") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object: copy the model again")
    return raw


def _check_code(directory: Path, raw: dict[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type in CONFIG_MAPPING:
        if "auto_map" in raw:
            logger.info("the code in %s is not run: transformers has %s itself", directory, model_type)
        return
    if "auto_map" in raw:
        code = raw["auto_map"]
        files = ", ".join(sorted(map(str, code.values() if isinstance(code, dict) else [code])))
        raise ModelError(
            f"{directory} needs its own code ({files}), and trust_remote_code is never used: use another model"
        )
    if model_type is None:
        raise ModelError(f"{directory / 'config.json'} has no model_type: copy the model again")
    raise ModelError(f'the installed transformers does not know model_type "{model_type}": update transformers')


def _check_yarn(raw: dict[str, Any], config: PretrainedConfig) -> None:
    """Warn of YaRN without the length that it extends: transformers takes max_position_embeddings for it, which may be the
    extended one already."""
    if "original_max_position_embeddings" not in str(raw) and (num_positions := _yarn_positions(config)):
        original = config.max_position_embeddings
        rule = f"if {original} is the extended length, set original_max_position_embeddings beside the factor of YaRN"
        logger.warning("YaRN extends the %d positions of config.json to %d: %s", original, num_positions, rule)


def _language_model(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the language model in one that takes images or audio too, else `config`."""
    text, name = config.get_text_config(), config.model_type
    if text is config or config.is_encoder_decoder:
        return config
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING or name in _NOT_CAUSAL:
        raise ModelError(f"{name} takes more than text, and its language model cannot be used alone: use another model")
    logger.info("%s takes more than text: its language model, %s, is served alone", name, text.model_type)
    text.name_or_path, text.dtype = config.name_or_path, text.dtype or config.dtype
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    return text


def _check_architecture(config: PretrainedConfig) -> None:
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder: use a decoder-only language model")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{name} is not a causal language model: use a model that generates text")
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", True):
        raise ModelError(f"{name} is an encoder: use a model that generates text")
    architectures = config.architectures or ()
    if architectures and all(str(each).endswith(_OTHER_TASKS) for each in architectures):
        raise ModelError(f"{architectures[0]} is not a causal language model: use a model that generates text")
    unknown = set(getattr(config, "layer_types", None) or ()) - SERVED_LAYER_TYPES
    if unknown:
        raise unsupported(f"{name} has layers of kind {', '.join(sorted(unknown))}")


def _check_model(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not model.is_backend_compatible() and not recurrent_modules(model):  # whose classes do not say it
        raise _without_interface(name)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise unsupported(f"{name}.forward has no parameter logits_to_keep")


def _without_interface(name: str) -> ModelError:
    return unsupported(f"{name} does not use transformers' attention interface")


def _damaged_config(attempt: str, directory: Path | str, error: Exception) -> ModelError:
    return ModelError(
        f"transformers cannot {attempt} {Path(directory) / 'config.json'} ({error}): copy the model again, or update "
        "transformers"
    )
