"""Processors without a memory of the tokens: allowed ids, ids that wait for min_tokens, biases.

Shapes: M rows that yield a token, V token ids, B ids of one row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from millrace.executor.wire.messages import NewSequence
from millrace.worker.processors.interface import LogitsProcessor, ProcessedRows
from millrace.worker.transfer import to_device


class AllowedTokens(LogitsProcessor[Tensor]):
    """Excludes all ids but those allowed. The state: the allowed ids [B]."""

    def begin(self, slot: int, new: NewSequence) -> Tensor | None:
        settings = new.sampling.processors
        if settings is None or settings.allowed_token_ids is None:
            return None
        token_ids = torch.tensor(settings.allowed_token_ids, dtype=torch.int64, device="cpu")
        return to_device(self.device, [token_ids])[0]

    def numbers(self, state: Tensor) -> tuple[int, ...]:
        return (len(state),)

    def apply(self, logits: Tensor, rows: ProcessedRows[Tensor]) -> None:
        places = rows.places(rows.states)
        kept = logits[places]
        logits.index_fill_(0, rows.indices, float("-inf"))
        logits[places] = kept


class HeldEnds(NamedTuple):
    min_tokens: int
    token_ids: Tensor  # [B]


class MinTokens(LogitsProcessor[HeldEnds]):
    """Excludes the ids that would end the text before it has `min_tokens` tokens."""

    def begin(self, slot: int, new: NewSequence) -> HeldEnds | None:
        sampling = new.sampling
        if not sampling.min_tokens or not sampling.end_token_ids:
            return None
        token_ids = torch.tensor(sampling.end_token_ids, dtype=torch.int64, device="cpu")
        return HeldEnds(sampling.min_tokens, *to_device(self.device, [token_ids]))

    def numbers(self, state: HeldEnds) -> tuple[int, ...]:
        return (len(state.token_ids),)

    def is_due(self, state: HeldEnds, output_position: int) -> bool:
        return output_position < state.min_tokens

    def apply(self, logits: Tensor, rows: ProcessedRows[HeldEnds]) -> None:
        places = rows.places([state.token_ids for state in rows.states])
        logits[places] = logits.new_full((), float("-inf"))  # to assign a number copies it from pageable memory


class Biases(NamedTuple):
    token_ids: Tensor  # [B]
    values: Tensor  # [B] float32


class LogitBias(LogitsProcessor[Biases]):
    """Adds a number to the logits of some ids."""

    needs_float32 = True

    def begin(self, slot: int, new: NewSequence) -> Biases | None:
        settings = new.sampling.processors
        if settings is None or not settings.logit_bias:
            return None
        token_ids = torch.tensor(list(settings.logit_bias), dtype=torch.int64, device="cpu")
        values = torch.tensor(list(settings.logit_bias.values()), dtype=torch.float32, device="cpu")
        return Biases(*to_device(self.device, [token_ids, values]))

    def numbers(self, state: Biases) -> tuple[int, ...]:
        return (len(state.token_ids),)

    def apply(self, logits: Tensor, rows: ProcessedRows[Biases]) -> None:
        places = rows.places([state.token_ids for state in rows.states])
        logits[places] += torch.cat([state.values for state in rows.states])
