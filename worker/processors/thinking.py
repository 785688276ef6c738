"""The limit of the tokens between the markers of thinking.

Shapes: M rows that yield a token, N of them with a limit, V token ids, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from millrace.executor.wire.messages import NewSequence, ThinkingLimit
from millrace.worker.processors.interface import LogitsProcessor, ProcessedRows

NOT_THINKING = -1
FORCED_LOGIT = 1e9
"""Finite, so that a row with NaN still fails, and so much above all others that they have the probability 0."""


class LimitedSequence(NamedTuple):
    slot: int
    limit: ThinkingLimit


class ThinkingBudget(LogitsProcessor[LimitedSequence]):
    """Owns the number of tokens since the start marker by slot, on the device. Where it reaches the limit, the end marker
    follows. Tokens of the prompt count."""

    needs_float32 = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._num_thought = torch.empty(0, dtype=torch.int64, device=device)  # [S]

    def begin(self, slot: int, new: NewSequence) -> LimitedSequence | None:
        limit = new.sampling.processors.thinking if new.sampling.processors is not None else None
        if limit is None:
            return None
        if slot >= len(self._num_thought):
            self._num_thought = pad(self._num_thought, (0, 2 * slot + 1 - len(self._num_thought)))
        # An assignment to a single element would copy the number from pageable memory, and wait for the device.
        self._num_thought[slot].fill_(num_thought(new.token_ids, new.num_prompt_tokens, limit))
        return LimitedSequence(slot, limit)

    def numbers(self, state: LimitedSequence) -> tuple[int, ...]:
        return state.slot, state.limit.budget, state.limit.start_id, state.limit.end_id

    def apply(self, logits: Tensor, rows: ProcessedRows[LimitedSequence]) -> None:
        slots, budgets, _, end_ids = rows.numbers
        places = (rows.indices, end_ids)
        logits[places] = torch.where(self._num_thought[slots] >= budgets, FORCED_LOGIT, logits[places])

    def record(self, rows: ProcessedRows[LimitedSequence], token_ids: Tensor) -> None:
        slots, _, start_ids, end_ids = rows.numbers
        counts = self._num_thought[slots]
        begun = torch.where(token_ids == start_ids, 0, NOT_THINKING)
        counts = torch.where(counts == NOT_THINKING, begun, counts + 1)
        self._num_thought[slots] = counts.masked_fill_(token_ids == end_ids, NOT_THINKING)


def num_thought(token_ids: list[int], num_prompt_tokens: int, limit: ThinkingLimit) -> int:
    """Return the number of tokens since the start marker behind the last end marker, or NOT_THINKING. Of several start
    markers it is the last one of the prompt, where others may be text about thinking, or the first one of the output."""
    count = NOT_THINKING
    for position, token_id in enumerate(token_ids):
        if token_id == limit.end_id:
            count = NOT_THINKING
        elif token_id == limit.start_id and (count == NOT_THINKING or position < num_prompt_tokens):
            count = 0
        elif count != NOT_THINKING:
            count += 1
    return count
