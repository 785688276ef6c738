"""Connects transformers' modules to our attention and KV pool.

The modules call the function that is registered here. The step is one more keyword argument of `model(...)`, which they
pass on. So there is no global state, and several models can run in one process.

Shapes: T tokens of all rows of a step one after the other, Hq query heads, Hkv key and value heads, D size of a key
head, Dv size of a value head.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from millrace.worker.errors import unsupported
from millrace.worker.input_batch import StepBatch
from millrace.worker.kv_pool import LayerCache

ATTENTION_NAME = "millrace"
"""Our name in transformers' attention interface. It has no mask function: then transformers builds no masks. Attention
here derives them from the step's lengths."""

STEP_KEYWORD = "millrace_step"
SINKS_OPTION = "s_aux"
"""transformers' name of the option with the attention sinks: one score of each query head."""


class Attention(Protocol):
    """One implementation of attention. Stateless between steps; it stores what it derives from a batch in
    `batch.derived`."""

    name: str

    def forward(
        self,
        query: Tensor,  # [Hq, T, D]
        key: Tensor,  # [Hkv, T, D]
        value: Tensor,  # [Hkv, T, Dv]
        layer: LayerCache,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        batch: StepBatch,
        sinks: Tensor | None = None,  # [Hq]
    ) -> Tensor:  # [T, Hq, Dv]
        """Write the step's keys and values into the layer's pool, then compute causal attention of each token to its
        own sequence. With a sliding window a token attends to the last `sliding_window` positions, its own included.
        With a softcap scores become `softcap * tanh(score / softcap)`. With sinks each head has one more score, which
        takes a share of the softmax and has no value."""


class ForwardStep:
    """Binds one batch to an attention implementation and the KV pool's layers for one forward pass."""

    def __init__(self, attention: Attention, layers: dict[int, LayerCache], batch: StepBatch) -> None:
        self._attention = attention
        self._layers = layers
        self._batch = batch

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        scaling = options.get("scaling")
        return self._attention.forward(
            query,
            key,
            value,
            layer=self._layers[module.layer_idx],  # type: ignore[index]
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            batch=self._batch,
            sinks=options.get(SINKS_OPTION),
        )


def run_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:  # [1, T, Hq, Dv]
    """Compute the attention of one layer. Called by transformers' modules."""
    step: Any = options.pop(STEP_KEYWORD, None)  # a `ForwardStep`, or what takes its place
    if step is None:
        raise unsupported(f"{type(module).__name__} does not pass keyword arguments on to attention")
    if attention_mask is not None:
        raise unsupported(f"{type(module).__name__} passes its own attention mask")
    return step.attend(module, query[0], key[0], value[0], options).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, run_attention)
