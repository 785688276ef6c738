"""Bad words: token sequences whose last id is excluded where the output ends with the ids before it.

Shapes: M rows that yield a token, N of them with bad words, V token ids, S slots, B bad words of one sequence,
W ids before the last one in the longest bad word.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from millrace.executor.wire.messages import NO_TOKEN, NewSequence
from millrace.worker.processors.interface import LogitsProcessor, ProcessedRows
from millrace.worker.transfer import to_device

ANY = -2
"""Equals every id, and the place before the first one: fills up the words that are shorter than the longest one."""


@dataclass(slots=True)
class BadWordsOfSequence:
    slot: int
    prefixes: Tensor  # [B, W]
    last_ids: Tensor  # [B]


class BadWords(LogitsProcessor[BadWordsOfSequence]):
    """Owns the last W ids of each output by slot, on the device. The prompt does not count."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._tails = torch.empty(0, 0, dtype=torch.int64, device=device)  # [S, W], NO_TOKEN before the output's begin

    def begin(self, slot: int, new: NewSequence) -> BadWordsOfSequence | None:
        words = new.sampling.processors.bad_words if new.sampling.processors is not None else []
        if not words:
            return None
        self._make_space(slot, max(map(len, words)) - 1)
        width = self._tails.shape[1]
        tail = new.token_ids[new.num_prompt_tokens :][-width:] if width else []
        prefixes = [[ANY] * (width + 1 - len(word)) + word[:-1] for word in words]
        values = [NO_TOKEN] * (width - len(tail)) + tail, prefixes, [word[-1] for word in words]
        sent = to_device(self.device, [torch.tensor(each, dtype=torch.int64, device="cpu") for each in values])
        self._tails[slot] = sent[0]
        return BadWordsOfSequence(slot, *sent[1:])

    def numbers(self, state: BadWordsOfSequence) -> tuple[int, ...]:
        return len(state.last_ids), state.slot

    def apply(self, logits: Tensor, rows: ProcessedRows[BadWordsOfSequence]) -> None:
        last_ids = [state.last_ids for state in rows.states]
        prefixes = torch.cat([state.prefixes for state in rows.states])
        tails = self._tails[rows.numbers[1]][rows.owners(len(prefixes))]
        is_next = ((prefixes == ANY) | (prefixes == tails)).all(dim=1)
        added = torch.zeros_like(is_next, dtype=logits.dtype).masked_fill_(is_next, float("-inf"))
        # A sum, since several words can have the same last id.
        logits.index_put_(rows.places(last_ids), added, accumulate=True)

    def record(self, rows: ProcessedRows[BadWordsOfSequence], token_ids: Tensor) -> None:
        if self._tails.shape[1]:
            slots = rows.numbers[1]
            self._tails[slots] = torch.cat([self._tails[slots, 1:], token_ids.unsqueeze(1)], dim=1)

    def _make_space(self, slot: int, width: int) -> None:
        """Provide this slot and this width."""
        if not self.states:
            self._tails = self._tails[:, :0]  # the longest word may be gone
        num_slots, old_width = self._tails.shape
        wider, more = max(0, width - old_width), max(0, 2 * slot + 1 - num_slots) if slot >= num_slots else 0
        self._tails = pad(self._tails, (wider, 0, 0, more), value=NO_TOKEN)
        if wider:
            for state in self.states.values():
                state.prefixes = pad(state.prefixes, (wider, 0), value=ANY)
