"""Presence, frequency and repetition penalties.

A step reads and writes only the logits of ids that a sequence has: the cost grows with the distinct ids of the longest
sequence, not with the vocabulary.

Shapes: M rows that yield a token, N of them with penalties, V token ids, K rows of the table, L its width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from millrace.executor.wire.messages import NewSequence
from millrace.worker.processors.interface import LogitsProcessor, ProcessedRows
from millrace.worker.transfer import HostCopy, to_device

WIDTH_UNIT = 64
"""The width grows by this, so the table is seldom copied."""


class Penalties(LogitsProcessor[int]):
    """Owns a table with the distinct ids of each sequence that has penalties, and how often its output has them. The state
    of a sequence is its table row.

    Behind its entries a row repeats the first one, so that a duplicate of an id always has the same count.
    """

    needs_float32 = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._token_ids = torch.zeros(1, WIDTH_UNIT, dtype=torch.int64, device=device)  # [K, L]
        self._counts = torch.zeros(1, WIDTH_UNIT, dtype=torch.float32, device=device)  # [K, L], exact up to 2**24
        self._num_entries = torch.zeros(1, dtype=torch.int64, device=device)  # [K]
        self._strengths = torch.zeros(1, 3, dtype=torch.float32, device=device)  # [K, 3]: see `begin`
        self._free_rows = [0]
        self._longest = 0
        """At least the number of entries of any row, known without waiting for the device."""
        self._counted: HostCopy | None = None
        """The numbers of entries, on their way to the host."""
        self._longest_new = self._num_steps = 0
        """The longest sequence that has begun, and the steps, since that copy began."""

    def begin(self, slot: int, new: NewSequence) -> int | None:
        settings = new.sampling.processors
        if settings is None:
            return None
        strengths = (settings.repetition_penalty, settings.frequency_penalty, settings.presence_penalty)
        if strengths == (1.0, 0.0, 0.0):
            return None
        num_outputs = len(new.token_ids) - new.num_prompt_tokens
        known = new.token_ids if settings.repetition_penalty != 1.0 else new.token_ids[new.num_prompt_tokens :]
        # A count of 0 changes nothing without a repetition penalty, so any id can be the first entry. They are sorted, since
        # reads in ascending order are twice as fast.
        token_ids, places = torch.tensor(known or [0], dtype=torch.int64, device="cpu").unique(return_inverse=True)
        counts = places[len(places) - num_outputs :].bincount(minlength=len(token_ids))
        if not self.states:
            self._longest, self._counted = 0, None
        if not self.states or len(token_ids) >= self._token_ids.shape[1]:
            self._set_width(max(self._longest, len(token_ids)))
        self._longest = max(self._longest, len(token_ids))
        self._longest_new = max(self._longest_new, len(token_ids))
        table_row = self._take_row()
        filled = pad(token_ids, (0, self._token_ids.shape[1] - len(token_ids)), value=int(token_ids[0]))
        counts = pad(counts, (0, len(filled) - len(counts)), value=int(counts[0]))
        strengths_on_host = torch.tensor(strengths, dtype=torch.float32, device="cpu")
        sent = to_device(self.device, [filled, counts.float(), strengths_on_host])
        self._token_ids[table_row], self._counts[table_row], self._strengths[table_row] = sent
        self._num_entries[table_row].fill_(len(token_ids))
        return table_row

    def numbers(self, state: int) -> tuple[int, ...]:
        return (state,)

    def remove(self, slot: int) -> None:
        if (table_row := self.states.pop(slot, None)) is not None:
            self._free_rows.append(table_row)

    def apply(self, logits: Tensor, rows: ProcessedRows[int]) -> None:
        table_rows = rows.numbers[0]
        repetition, frequency, presence = self._strengths[table_rows].unsqueeze(2).unbind(1)  # [N, 1] each
        token_ids = self._token_ids.index_select(0, table_rows)
        counts = self._counts.index_select(0, table_rows)
        is_every_row = len(rows.states) == len(logits)
        if is_every_row:
            values = logits.gather(1, token_ids)
        else:
            places = (token_ids + rows.indices.unsqueeze(1) * logits.shape[1]).view(-1)
            values = logits.view(-1).index_select(0, places).view(token_ids.shape)
        # Positive logits are divided, others multiplied. On a CPU several times as fast as torch.where.
        divided = values.clamp(min=0).div_(repetition)
        values.clamp_(max=0).mul_(repetition).add_(divided)
        values.sub_(counts.clamp(max=1).mul_(presence).add_(counts.mul_(frequency)))
        if is_every_row:
            logits.scatter_(1, token_ids, values)
        else:
            logits.view(-1).index_copy_(0, places, values.view(-1))

    def record(self, rows: ProcessedRows[int], token_ids: Tensor) -> None:
        if self._longest == self._token_ids.shape[1]:
            self._count_entries()
            self._set_width(self._longest)
        self._longest += 1
        self._num_steps += 1
        table_rows = rows.numbers[0]
        token_ids = token_ids.clamp(min=0)  # a sequence that has failed may count any id
        known_ids = self._token_ids.index_select(0, table_rows)
        # 1.0 where they are equal. Comparing into a float tensor saves a conversion.
        is_same = torch.empty(known_ids.shape, dtype=torch.float32, device=self.device)
        torch.eq(known_ids, token_ids.unsqueeze(1), out=is_same)
        self._counts.index_add_(0, table_rows, is_same)
        is_new = is_same.amax(dim=1) == 0
        ends = self._num_entries[table_rows]
        first_ids, first_counts = self._token_ids[table_rows, 0], self._counts[table_rows, 0]
        self._token_ids[table_rows, ends] = torch.where(is_new, token_ids, first_ids)
        self._counts[table_rows, ends] = first_counts.masked_fill_(is_new, 1.0)
        self._num_entries[table_rows] = ends + is_new

    def _count_entries(self) -> None:
        """Lower the bound of the longest row, if the numbers of entries have reached the host. On a GPU that takes from one
        call to the next one."""
        if self._counted is None:
            self._counted, self._longest_new, self._num_steps = HostCopy(self._num_entries), 0, 0
        if self._counted.is_ready():
            counts = self._counted.tolist()
            known = [counts[row] for row in self.states.values() if row < len(counts)]
            self._longest, self._counted = max([self._longest_new, *known]) + self._num_steps, None

    def _set_width(self, longest: int) -> None:
        """Make the table wide enough for another entry behind the longest row."""
        width = (longest // WIDTH_UNIT + 1) * WIDTH_UNIT
        more = max(0, width - self._token_ids.shape[1])
        self._token_ids, self._counts = (
            torch.cat([each[:, :width], each[:, :1].expand(-1, more)], dim=1)
            for each in (self._token_ids, self._counts)
        )

    def _take_row(self) -> int:
        if not self._free_rows:
            num_rows = len(self._num_entries)
            self._token_ids, self._counts, self._strengths = (
                pad(each, (0, 0, 0, num_rows)) for each in (self._token_ids, self._counts, self._strengths)
            )
            self._num_entries = pad(self._num_entries, (0, num_rows))
            self._free_rows += range(num_rows, 2 * num_rows)
        return self._free_rows.pop()
