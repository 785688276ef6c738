"""All logits processors in their order, which is vLLM's; the masks of grammars come last, so that nothing overrules them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from millrace.executor.wire.messages import NewSequence
from millrace.worker.grammars import Grammars
from millrace.worker.processors.bad_words import BadWords
from millrace.worker.processors.grammar import GrammarMask
from millrace.worker.processors.interface import LogitsProcessor, ProcessedRows
from millrace.worker.processors.masks import AllowedTokens, LogitBias, MinTokens
from millrace.worker.processors.penalties import Penalties
from millrace.worker.processors.thinking import ThinkingBudget

ORDER = (AllowedTokens, BadWords, MinTokens, LogitBias, Penalties, ThinkingBudget)


class StepProcessors:
    """The processors of one step, each with its rows. `apply`, then `record`."""

    def __init__(self, parts: list[tuple[LogitsProcessor[Any], ProcessedRows[Any]]]) -> None:
        self._parts = parts
        for processor, rows in parts:
            processor.prepare(rows)

    def row_indices(self) -> Tensor:
        """Return the rows that a processor changes, on the host. Some may come twice."""
        return torch.cat([rows.indices for _, rows in self._parts]).cpu()

    def apply(self, logits: Tensor) -> Tensor:
        """Return the contiguous logits [M, V] as the processors change them: in place, or in float32 where one needs it."""
        if any(processor.needs_float32 for processor, _ in self._parts):
            logits = logits.float()
        for processor, rows in self._parts:
            processor.apply(logits, rows)
        return logits

    def record(self, token_ids: Tensor) -> None:
        """Take the sampled ids [M] into the states."""
        for processor, rows in self._parts:
            processor.record(rows, token_ids[rows.indices])

    def failure(self, index: int) -> str | None:
        """Return why a row of the step has no token, if a processor knows."""
        for processor, rows in self._parts:
            for row, state in zip(rows.indices.tolist(), rows.states, strict=True):
                if row == index and (failure := processor.failure(state)) is not None:
                    return failure
        return None


class LogitsProcessors:
    """Owns the processors of a rank that samples."""

    def __init__(self, device: torch.device, grammars: Grammars | None = None) -> None:
        """`grammars`: None for sequences without any."""
        self._device = device
        self._all: list[LogitsProcessor[Any]] = [*(each(device) for each in ORDER), GrammarMask(device, grammars)]

    def add(self, slot: int, new: NewSequence) -> None:
        for processor in self._all:
            processor.add(slot, new)

    def remove(self, slot: int) -> None:
        for processor in self._all:
            processor.remove(slot)

    def of_step(self, slots: Tensor, output_positions: Tensor) -> StepProcessors | None:
        """Return the processors of a step whose rows have these slots [M] and output positions [M], both on the host. None
        if they change nothing."""
        used = [processor for processor in self._all if processor.states]
        if not used:
            return None
        rows = list(zip(slots.tolist(), output_positions.tolist(), strict=True))
        parts = [(processor, found) for processor in used if (found := self._rows(processor, rows)) is not None]
        return StepProcessors(parts) if parts else None

    def _rows(self, processor: LogitsProcessor[Any], rows: list[tuple[int, int]]) -> ProcessedRows[Any] | None:
        indices, states = [], []
        for index, (slot, position) in enumerate(rows):
            state = processor.states.get(slot)
            if state is not None and processor.is_due(state, position):
                indices.append(index)
                states.append(state)
        return ProcessedRows(torch.tensor(indices).to(self._device, non_blocking=True), states) if indices else None
