"""What a logits processor is.

Shapes: M rows that yield a token, N of them that a processor changes, V token ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from millrace.executor.wire.messages import NewSequence

State = TypeVar("State")


@dataclass(frozen=True)
class ProcessedRows(Generic[State]):
    """The rows of one step that one processor changes."""

    row_indices: list[int]
    """Rows of the logits."""
    states: list[State]
    indices: Tensor  # [N], `row_indices` on the device
    numbers: Tensor  # [X, N], on the device: see `LogitsProcessor.numbers`

    def owners(self, num_ids: int) -> Tensor:
        """Return to which of the N rows each of `num_ids` ids belongs. The first of a row's numbers is how many it has."""
        rows = torch.arange(len(self.states), device=self.indices.device)
        return rows.repeat_interleave(self.numbers[0], output_size=num_ids)

    def places(self, ids: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return where the logits of `ids`, a tensor for each row, are: row indices and ids."""
        token_ids = torch.cat(ids)
        return self.indices[self.owners(len(token_ids))], token_ids


class LogitsProcessor(ABC, Generic[State]):
    """Owns the settings and the state of the sequences that use this processor, by slot.

    The state depends on the tokens of the sequence alone, so that a sequence which was resumed or preempted goes on as
    before.
    """

    needs_float32: ClassVar[bool] = False
    """Whether lower precision would change the result. False for processors that only exclude ids."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.states: dict[int, State] = {}

    def add(self, slot: int, new: NewSequence) -> None:
        state = self.begin(slot, new)
        if state is not None:
            self.states[slot] = state

    def remove(self, slot: int) -> None:
        self.states.pop(slot, None)

    @abstractmethod
    def begin(self, slot: int, new: NewSequence) -> State | None:
        """Return the state of a new sequence, or None if it does not use this processor."""

    def numbers(self, state: State) -> tuple[int, ...]:
        """Return what `apply` and `record` need of a sequence on the device. The numbers of all processors and sequences
        travel in one copy."""
        return ()

    def is_due(self, state: State, output_position: int) -> bool:
        """Whether the logits of this output position are changed."""
        return True

    def prepare(self, rows: ProcessedRows[State]) -> None:
        """Begin what `apply` needs. Called before the forward pass of the step, and after `record` of the one before."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: ProcessedRows[State]) -> None:
        """Change rows of the contiguous logits [M, V] in place."""

    def record(self, rows: ProcessedRows[State], token_ids: Tensor) -> None:
        """Take the sampled ids [N] into the state. `NO_TOKEN` is that of a sequence that has failed."""
