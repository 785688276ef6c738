"""How a forward pass of transformers' own modules reaches our attention and our KV pool.

The modules call the function registered here. Which step they work for comes along as one more keyword of
`model(...)`, which they hand down untouched, so that nothing global is involved and several models in one process do
not meet.

Shapes: T tokens of all rows of a step one after the other, Hq query heads, Hkv key and value heads, D size of a key
head, Dv size of a value head.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from millrace.worker.errors import ModelError
from millrace.worker.input_batch import StepBatch
from millrace.worker.kv_pool import LayerCache

ATTENTION_NAME = "millrace"
"""Our entry in transformers' attention interface. It has no mask function on purpose: without one transformers builds
no masks at all, and every attention here derives what it needs from the step's lengths."""

STEP_KEYWORD = "millrace_step"


class Attention(Protocol):
    """One way to compute attention. Stateless between steps; what it derives from a batch it keeps in `batch.derived`."""

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
    ) -> Tensor:  # [T, Hq, Dv]
        """Write the step's keys and values into the layer's pool, then let each token attend to those of its own
        sequence at its own position and before; with a sliding window to the last `sliding_window` of them, its own
        included. Scores are capped to `softcap * tanh(score / softcap)` when a softcap is given."""


class AttentionStep(Protocol):
    """What stands behind `STEP_KEYWORD` during one forward pass."""

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,  # [Hq, T, D]
        key: Tensor,  # [Hkv, T, D]
        value: Tensor,  # [Hkv, T, Dv]
        attention_mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:  # [T, Hq, Dv]
        """The attention of one layer, with the keywords that its module gave."""


class ForwardStep:
    """Binds one batch to an attention implementation and the KV pool's layers for one forward pass."""

    def __init__(self, attention: Attention, layers: dict[int, LayerCache], batch: StepBatch) -> None:
        self._attention = attention
        self._layers = layers
        self._batch = batch

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        options: dict[str, Any],
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
        )


def run_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:  # [1, T, Hq, Dv]
    """What transformers' modules call for each layer."""
    step: AttentionStep | None = options.pop(STEP_KEYWORD, None)
    if step is None:
        raise ModelError(f"{type(module).__name__} does not hand keywords down to its attention: not supported")
    return step.attend(module, query[0], key[0], value[0], attention_mask, options).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, run_attention)
