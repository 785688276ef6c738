"""Finds the attention layers of a model by running it once.

Each layer's attention call is recorded instead of computed. This gives the shapes for the KV pool of any architecture,
and finds attention options that our attention does not support.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from millrace.executor.wire.failures import is_interruption
from millrace.worker.attention.interface import SINKS_OPTION, STEP_KEYWORD
from millrace.worker.errors import ModelError, unsupported
from millrace.worker.kv_pool import LayerSpec
from millrace.worker.linear.codes import CodedWeight
from millrace.worker.linear.modules import IS_READ, widened_linear
from millrace.worker.loading.model import LAYERS_WITHOUT_CACHE
from millrace.worker.loading.rope import static_frequencies
from millrace.worker.logprobs import head_logits
from millrace.worker.parallel.stages import find_stage_input
from millrace.worker.recurrent.modules import recurrent_modules

logger = logging.getLogger("millrace.worker")

PROBE_TOKENS = 2

SUPPORTED_OPTIONS = frozenset({"scaling", "sliding_window", "softcap", SINKS_OPTION})
IGNORED_OPTIONS = frozenset({"dropout", "position_ids", "position_embeddings", "is_causal"})
"""Some models pass these; they have no effect on causal attention in inference."""

_OWN_FORWARDS = (nn.Linear.forward.__code__, widened_linear.__code__)
_FACTS = (Tensor.dtype.__get__, Tensor.device.__get__)  # type: ignore[attr-defined]
"""What packed weights have in common with those of the model."""


class _WithoutProducts(TorchFunctionMode):
    """Inside, linear layers return zeros and keep the dtype of their weights: both would take most of the time. Parameters
    that others than the forward of a linear layer read are marked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sys._getframe(1).f_code not in _OWN_FORWARDS and func not in _FACTS:
            for each in (*args, *(kwargs or {}).values()):
                if isinstance(each, nn.Parameter):
                    setattr(each, IS_READ, True)
        if func is functional.linear:
            inputs, weight = args[:2]
            return inputs.new_zeros(*inputs.shape[:-1], weight.shape[0])
        if func is Tensor.to and isinstance(args[0], nn.Parameter) and args[0].dim() > 1:
            return args[0]
        return func(*args, **(kwargs or {}))


class ProbeStep:
    """Takes the place of a `ForwardStep`: records each layer once, and returns zeros."""

    def __init__(self) -> None:
        self.specs: dict[int, LayerSpec] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        name = type(module).__name__
        layer_index = getattr(module, "layer_idx", None)
        if not isinstance(layer_index, int) or layer_index in self.specs:
            raise unsupported(f"{name} calls attention without a layer_idx of its own (got {layer_index!r})")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise unsupported(f"{name} attends to later tokens")
        _check_options(name, options)
        _check_sinks(name, options.get(SINKS_OPTION), len(query))
        self.specs[layer_index] = LayerSpec(
            layer_index=layer_index,
            num_kv_heads=key.shape[0],
            key_dim=key.shape[-1],
            value_dim=value.shape[-1],
            sliding_window=options.get("sliding_window"),
        )
        return value.new_zeros(query.shape[1], query.shape[0], value.shape[-1])


def probe_layers(model: PreTrainedModel, layers: range | None = None) -> list[LayerSpec]:
    """Return the attention layers in order: those of `layers`, or of the whole model. Needs only shapes, so the model
    may be on the meta device. Raises `ModelError` when the layers cannot be served correctly."""
    probe = ProbeStep()
    positions = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0)
    try:
        with torch.inference_mode(), _with_few_values(model), _WithoutProducts():
            model(
                **_inputs(model),
                position_ids=positions,
                use_cache=False,
                logits_to_keep=1,
                **{STEP_KEYWORD: probe},
            )
    except (ModelError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # a model's code may raise anything
        name = type(model).__name__
        if isinstance(error, NotImplementedError) and model.device.type == "meta":
            raise ModelError(
                f"{name} cannot be divided, since its forward pass needs values: run it on one rank"
            ) from error
        raise ModelError(f"{name} cannot be run with this config.json ({error}): copy the model again") from error
    expected = range(model.config.num_hidden_layers) if layers is None else layers
    specs = [probe.specs[index] for index in sorted(probe.specs)]
    others = {module.layer_idx for module in recurrent_modules(model)}
    others |= {
        i for i, kind in enumerate(getattr(model.config, "layer_types", None) or ()) if kind in LAYERS_WITHOUT_CACHE
    }
    if not specs or not set(probe.specs) <= set(expected) <= set(probe.specs) | others:
        count = f"{len(specs)} of the {len(expected)} layers"
        raise unsupported(f"{type(model).__name__} uses transformers' attention interface in {count} only")
    return specs


def check_windows(config: Any, specs: list[LayerSpec], max_model_len: int) -> None:
    """Refuse a sliding window that a model puts into its masks only: the attention calls have to name it, unless no sequence
    is longer than the window."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if isinstance(window, int) and window >= max_model_len:
        return
    for spec in specs:
        has_window = layer_types[spec.layer_index] == "sliding_attention" if layer_types else window is not None
        if has_window and spec.sliding_window is None:
            what = f"layer {spec.layer_index} of {config.model_type} does not pass its sliding window"
            if not isinstance(window, int) or window < 2:
                raise unsupported(what)
            raise ModelError(f"{what} of {window} tokens: set max_model_len to {window} or less")


def runs_head_alone(model: PreTrainedModel) -> bool:
    """Whether the head runs without the layers, which log-probabilities of prompts need. A model's code may do anything."""
    hidden = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=model.device)
    try:
        with torch.inference_mode(), _WithoutProducts():
            head_logits(model, hidden)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        if is_interruption(error):
            raise
        name, reason = type(model).__name__, f"{type(error).__name__}: {error}"
        logger.info("%s has no log-probabilities of prompts, since its head does not run alone: %.200s", name, reason)
        return False
    return True


@contextlib.contextmanager
def _with_few_values(model: PreTrainedModel) -> Iterator[None]:
    """On the meta device, avoid what needs values: rotary frequencies by position, and grouped products of experts. Of
    experts that are codes, avoid products of all."""
    is_meta = model.device.type == "meta"
    if not is_meta and not any(isinstance(each, CodedWeight) and each.dim() == 3 for each in model.parameters()):
        yield
        return
    before, model.config._experts_implementation = model.config._experts_implementation, "batched_mm"
    try:
        with static_frequencies(model) if is_meta else contextlib.nullcontext():
            yield
    finally:
        model.config._experts_implementation = before


def _inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    stage_input = find_stage_input(model)
    if stage_input is None:
        return {"input_ids": torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device=model.device)}
    shape = (1, PROBE_TOKENS, model.config.hidden_size)
    stage_input.received = torch.zeros(shape, dtype=model.dtype, device=model.device)
    return {"inputs_embeds": stage_input.received}


def _check_options(name: str, options: dict[str, Any]) -> None:
    used = {option for option, value in options.items() if value is not None and value is not False}
    unknown = used - IGNORED_OPTIONS - SUPPORTED_OPTIONS
    if unknown:
        raise unsupported(f"the attention of {name} uses {', '.join(sorted(unknown))}")


def _check_sinks(name: str, sinks: Any, num_heads: int) -> None:
    if sinks is not None and (not isinstance(sinks, Tensor) or sinks.shape != (num_heads,)):
        shape = list(getattr(sinks, "shape", ()))
        raise unsupported(f"{name} passes attention sinks of shape {shape} for {num_heads} heads")
