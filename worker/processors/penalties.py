"""Presence, frequency and repetition penalties.

A step reads and writes only the logits of ids that a sequence has: the cost grows with the tokens, not with the vocabulary.

Shapes: M rows that yield a token, N of them with penalties, V token ids, K rows of the table, L its width.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.executor.wire.messages import NewSequence
from millrace.worker.processors.interface import LogitsProcessor, ProcessedRows


@dataclass(slots=True)
class PenalisedSequence:
    table_row: int
    num_entries: int
    strengths: tuple[float, float, float]
    """The repetition, frequency and presence penalty."""


class Penalties(LogitsProcessor[PenalisedSequence]):
    """Owns a table with the ids of each sequence that has penalties, and how often its output has them.

    A row has the distinct ids of the prompt and of the output at the time of `begin`, then one entry for each token sampled
    since. Entries of the same id have the same count, so it does not matter which of them is written last.
    """

    needs_float32 = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._token_ids = torch.zeros(1, 64, dtype=torch.int64, device=device)  # [K, L]
        self._counts = torch.zeros(1, 64, device=device)  # [K, L] float32, exact up to 2**24
        self._free_rows = [0]

    def begin(self, slot: int, new: NewSequence) -> PenalisedSequence | None:
        settings = new.sampling.processors
        if settings is None:
            return None
        strengths = (settings.repetition_penalty, settings.frequency_penalty, settings.presence_penalty)
        if strengths == (1.0, 0.0, 0.0):
            return None
        counts: dict[int, int] = Counter(new.token_ids[new.num_prompt_tokens :])
        if settings.repetition_penalty != 1.0:
            counts = dict.fromkeys(new.token_ids[: new.num_prompt_tokens], 0) | counts
        # Without a repetition penalty a count of 0 changes nothing: any id can be the first entry.
        counts = counts or {0: 0}
        self._make_space(len(counts))
        state = PenalisedSequence(self._free_rows.pop(), len(counts), strengths)
        self._token_ids[state.table_row, : len(counts)] = torch.tensor(list(counts))
        self._counts[state.table_row, : len(counts)] = torch.tensor(list(counts.values()), dtype=torch.float32)
        return state

    def remove(self, slot: int) -> None:
        if (state := self.states.pop(slot, None)) is not None:
            self._free_rows.append(state.table_row)

    def apply(self, logits: Tensor, rows: ProcessedRows[PenalisedSequence]) -> None:
        _, token_ids, counts = self._entries(rows)
        strengths = torch.tensor([state.strengths for state in rows.states]).to(rows.device)  # [N, 3]
        repetition, frequency, presence = strengths.unsqueeze(2).unbind(1)
        # Flat indices: on a CPU several times as fast as pairs of them.
        places = (rows.indices.unsqueeze(1) * logits.shape[1] + token_ids).view(-1)
        values = logits.view(-1).index_select(0, places).view(token_ids.shape)
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - frequency * counts - presence * (counts > 0)
        logits.view(-1).index_copy_(0, places, values.view(-1))

    def record(self, rows: ProcessedRows[PenalisedSequence], token_ids: Tensor) -> None:
        self._make_space(max(state.num_entries for state in rows.states) + 1)
        table_rows, known, counts = self._entries(rows)
        is_same = known == token_ids.unsqueeze(1)
        new_counts = (counts * is_same).amax(dim=1) + 1
        counts = torch.where(is_same, new_counts.unsqueeze(1), counts)
        self._counts[:, : counts.shape[1]].index_copy_(0, table_rows, counts)
        # The token of a failed sequence is none: repeat the first entry.
        has_token = token_ids >= 0
        ends = torch.tensor([state.num_entries for state in rows.states]).to(rows.device)
        self._token_ids[table_rows, ends] = torch.where(has_token, token_ids, known[:, 0])
        self._counts[table_rows, ends] = torch.where(has_token, new_counts, counts[:, 0])
        for state in rows.states:
            state.num_entries += 1

    def _entries(self, rows: ProcessedRows[PenalisedSequence]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the table rows [N], and their ids and counts [N, L], cut off after the longest row. Shorter rows repeat
        their first entry."""
        lengths = [state.num_entries for state in rows.states]
        width = max(lengths)
        table_rows = torch.tensor([state.table_row for state in rows.states]).to(rows.device)
        token_ids = self._token_ids[:, :width].index_select(0, table_rows)
        counts = self._counts[:, :width].index_select(0, table_rows)
        is_past_end = torch.arange(width, device=rows.device) >= torch.tensor(lengths).to(rows.device).unsqueeze(1)
        return (
            table_rows,
            torch.where(is_past_end, token_ids[:, :1], token_ids),
            torch.where(is_past_end, counts[:, :1], counts),
        )

    def _make_space(self, width: int) -> None:
        """Provide a free row, and this width."""
        num_rows, old_width = self._token_ids.shape
        new_width = max(old_width, 1 << (width - 1).bit_length())
        new_rows = 0 if self._free_rows else num_rows
        if new_width == old_width and not new_rows:
            return
        padding = (0, new_width - old_width, 0, new_rows)
        self._token_ids = torch.nn.functional.pad(self._token_ids, padding)
        self._counts = torch.nn.functional.pad(self._counts, padding)
        self._free_rows += range(num_rows, num_rows + new_rows)
