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

    indices: Tensor  # [N], of rows of the logits
    states: list[State]

    @property
    def device(self) -> torch.device:
        return self.indices.device

    def owners(self, ids: list[Tensor]) -> Tensor:
        """For each id of `ids`, a tensor for each row, return which of the N rows it belongs to."""
        sizes = [len(each) for each in ids]
        numbers = torch.arange(len(sizes), device=self.device)
        return numbers.repeat_interleave(torch.tensor(sizes).to(self.device), output_size=sum(sizes))

    def places(self, ids: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return where the logits of `ids`, a tensor for each row, are: row indices and ids."""
        return self.indices[self.owners(ids)], torch.cat(ids)


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

    def failure(self, state: State) -> str | None:
        """Return why this processor has left no token, if it knows."""
        return None
