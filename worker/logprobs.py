"""Log-probabilities of tokens and of the most likely ids in their places, from the model's own logits.

Shapes: L tokens, K most likely ids for each of them, V ids of the vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from millrace.executor.wire.messages import record_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS_AT_ONCE = 64
"""Bounds the memory for logits. With fewer, most of the time would go into reading the weights of the head."""
_WORD_BYTES = 4


@dataclass(frozen=True)
class ScoredTokens:
    """Tokens of a step whose log-probabilities are wanted: L of those that it samples, or L of the prompts."""

    rows: Tensor  # [L], on the device: the rows of the step's logits from which the tokens come
    parts: list[tuple[int, int]]
    """For each part of the result how many of the tokens it has, and how many of the most likely ids for each."""
    token_ids: Tensor | None = None  # [L], on the device; None: those that the step samples

    def records(self, logits_of: Callable[[slice], Tensor], token_ids: Tensor) -> Tensor:
        """Return the records of the tokens [L] as [L, 2 + 2K] int32, see `record_bytes`, K being the largest of the parts.

        `logits_of` returns the logits of some of them, [at most TOKENS_AT_ONCE, V].
        """
        num_ids = max(count for _, count in self.parts)
        starts = range(0, len(token_ids), TOKENS_AT_ONCE)
        slices = [slice(start, start + TOKENS_AT_ONCE) for start in starts]
        return torch.cat([_records(logits_of(one).float(), token_ids[one], num_ids) for one in slices])

    def pack(self, records: Tensor) -> list[bytes]:
        """Return the bytes of each part. `records` are on the host."""
        packed, start = [], 0
        for num_tokens, num_ids in self.parts:
            part = records[start : start + num_tokens, : record_bytes(num_ids) // _WORD_BYTES]
            packed.append(part.contiguous().numpy().tobytes())
            start += num_tokens
        return packed


def _records(logits: Tensor, token_ids: Tensor, num_ids: int) -> Tensor:
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    ranks = (logits >= chosen).sum(dim=1, keepdim=True, dtype=torch.int32)
    normalizers = logits.logsumexp(dim=1, keepdim=True)
    likely, ids = logits.topk(num_ids)
    pairs = torch.stack([ids.int(), (likely - normalizers).view(torch.int32)], dim=2).flatten(1)
    return torch.cat([(chosen - normalizers).view(torch.int32), ranks, pairs], dim=1)


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return the logits [L, V] of last hidden states [L, H], with all that the model does to its logits.

    The model runs without its layers, because only its class knows the factors and caps.
    """
    name = model.base_model_prefix
    layers = getattr(model, name)
    setattr(model, name, _HiddenStates(hidden.unsqueeze(0)))
    try:
        token_ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = model(token_ids, use_cache=False).logits[0]
    finally:
        setattr(model, name, layers)
    return logits


class _HiddenStates(nn.Module):
    """Returns these last hidden states for any input."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._output = _Output(hidden)

    @property
    def decoder(self) -> _HiddenStates:
        """What the head of OPT calls instead."""
        return self

    def forward(self, *_: Any, **__: Any) -> _Output:
        return self._output


class _Output:
    """Last hidden states as the output of a model's layers. Of what else a head passes on there is nothing."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None
