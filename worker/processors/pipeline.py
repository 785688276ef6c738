"""All logits processors in their order, which is vLLM's; the masks of grammars come last, so that nothing overrules them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from millrace.executor.wire.messages import NewSequence
from millrace.worker.grammars import Grammars, GrammarState
from millrace.worker.linear.packed import RowMasks
from millrace.worker.processors.bad_words import BadWords
from millrace.worker.processors.grammar import GrammarMask
from millrace.worker.processors.interface import LogitsProcessor, ProcessedRows
from millrace.worker.processors.masks import AllowedTokens, LogitBias, MinTokens
from millrace.worker.processors.penalties import Penalties
from millrace.worker.processors.thinking import ThinkingBudget
from millrace.worker.transfer import to_device

ORDER = (AllowedTokens, BadWords, MinTokens, LogitBias, Penalties, ThinkingBudget)


class StepProcessors:
    """The processors of one step, each with its rows. `apply`, then `record`."""

    def __init__(self, parts: list[tuple[LogitsProcessor[Any], ProcessedRows[Any]]]) -> None:
        self._parts = parts
        for processor, rows in parts:
            processor.prepare(rows)
        processor, rows = parts[-1]
        self.grammar_rows: ProcessedRows[GrammarState] | None = rows if isinstance(processor, GrammarMask) else None
        """The rows whose masks `apply` waits for."""

    def row_indices(self) -> Tensor:
        """Return the rows that a processor changes, on the host. Some may come twice."""
        indices = [index for _, rows in self._parts for index in rows.row_indices]
        return torch.tensor(indices, dtype=torch.int64, device="cpu")

    @property
    def is_grammar_alone(self) -> bool:
        """Whether the masks of grammars are all that changes logits."""
        return all(isinstance(processor, GrammarMask) for processor, _ in self._parts)

    def grammar_masks(self) -> RowMasks | None:
        """Return the masks of the rows with a grammar, instead of what `apply` does with them. Waits for the masks. None: no
        row has a grammar."""
        processor, rows = self._parts[-1]
        return RowMasks(rows.indices, processor.masks()) if isinstance(processor, GrammarMask) else None

    def apply_masks(self, logits: Tensor) -> None:
        """Change contiguous logits [M, V] in place as the masks of grammars do. Waits for the masks."""
        processor, rows = self._parts[-1]
        processor.apply(logits, rows)

    def apply(self, logits: Tensor, *, but_grammars: bool = False) -> Tensor:
        """Return the contiguous logits [M, V] as the processors change them: in place, or in float32 where one needs it."""
        if any(processor.needs_float32 for processor, _ in self._parts):
            logits = logits.float()
        for processor, rows in self._parts:
            if not (but_grammars and isinstance(processor, GrammarMask)):
                processor.apply(logits, rows)
        return logits

    def record(self, token_ids: Tensor) -> None:
        """Take the sampled ids [M] into the states."""
        for processor, rows in self._parts:
            processor.record(rows, token_ids[rows.indices])

    def rows_to_fail(self) -> list[int]:
        """Return the rows of the step that fail though they have a token."""
        if (rows := self.grammar_rows) is None:
            return []
        return [row for row, state in zip(rows.row_indices, rows.states, strict=True) if state.takes_too_much]

    def failure(self, index: int) -> str | None:
        """Return why a row of the step has no token, if its grammar knows."""
        if (rows := self.grammar_rows) is None or index not in rows.row_indices:
            return None
        return rows.states[rows.row_indices.index(index)].failure


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
        due = [(processor, *found) for processor in used if (found := _due_rows(processor, rows))[0]]
        if not due:
            return None
        numbers = [
            torch.tensor([rows, *zip(*map(each.numbers, states), strict=True)], dtype=torch.int64, device="cpu")
            for each, rows, states in due
        ]
        return StepProcessors(
            [
                (processor, ProcessedRows(row_indices, states, sent[0], sent[1:]))
                for (processor, row_indices, states), sent in zip(due, to_device(self._device, numbers), strict=True)
            ]
        )


def _due_rows(processor: LogitsProcessor[Any], rows: list[tuple[int, int]]) -> tuple[list[int], list[Any]]:
    """Return the indices and states of those (slot, output position) whose logits the processor changes."""
    indices, states = [], []
    for index, (slot, position) in enumerate(rows):
        state = processor.states.get(slot)
        if state is not None and processor.is_due(state, position):
            indices.append(index)
            states.append(state)
    return indices, states
