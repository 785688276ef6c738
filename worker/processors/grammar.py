"""Masks of grammars.

The mask of a row needs the token that the step before has sampled. It is computed in a thread, from the token on, while the
device computes the forward pass; the step waits for it where the logits are there.

Shapes: M rows that yield a token, N of them with a grammar, V token ids, B bytes of a mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.executor.wire.messages import NewSequence
from millrace.worker.grammars import Grammars, GrammarState
from millrace.worker.processors.interface import LogitsProcessor, ProcessedRows
from millrace.worker.transfer import HostCopy

_ROWS_AT_ONCE = defaultdict(lambda: 64, cpu=16)
"""Bounds the memory for a number for each id, which fits into a CPU's cache."""


class GrammarMask(LogitsProcessor[GrammarState]):
    """Excludes the ids with which no text of the grammar goes on, and those that end the text before it is complete."""

    def __init__(self, device: torch.device, grammars: Grammars | None = None) -> None:
        super().__init__(device)
        self._grammars = grammars
        self._sampled: list[tuple[list[GrammarState], Callable[[], list[int]]]] = []
        """Tokens that the states do not have yet."""
        self._masks: Future[Tensor] | None = None
        is_allowed = (torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)) & 1
        self._biases = torch.zeros(256, 8, dtype=torch.float32, device=device)
        self._biases.masked_fill_(is_allowed == 0, float("-inf"))
        """For each byte of a mask what is added to the logits of its ids. Ten times as fast as torch's `masked_fill_`."""

    def begin(self, slot: int, new: NewSequence) -> GrammarState | None:
        if not new.sampling.grammar:
            return None
        assert self._grammars is not None, "a rank without grammars"
        return self._grammars.begin(new)

    def prepare(self, rows: ProcessedRows[GrammarState]) -> None:
        assert self._grammars is not None
        sampled, self._sampled = self._sampled, []
        self._masks = self._grammars.masks(sampled, rows.states)

    def masks(self) -> Tensor:  # [N, B]
        """Wait for the masks of the step's rows, and return them."""
        assert self._masks is not None
        return self._masks.result()

    def apply(self, logits: Tensor, rows: ProcessedRows[GrammarState]) -> None:
        masks = self.masks().to(self.device, non_blocking=True)
        at_once, biases = _ROWS_AT_ONCE[self.device.type], self._biases.to(logits.dtype)
        for indices, part in zip(rows.indices.split(at_once), masks.split(at_once), strict=True):
            logits.index_add_(0, indices, F.embedding(part.int(), biases).flatten(1)[:, : logits.shape[1]])

    def record(self, rows: ProcessedRows[GrammarState], token_ids: Tensor) -> None:
        self._sampled.append((rows.states, HostCopy(token_ids).tolist))
