"""Sampling where each rank has the logits of its own part of the vocabulary.

All ranks of a stage draw the same tokens: they see the same gathered numbers, and a draw depends on nothing else.

Shapes: M rows that yield a token, W ids of this rank, V ids of all, n ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.worker.input_batch import SampledRow
from millrace.worker.parallel.peers import Peers
from millrace.worker.parallel.topology import Topology
from millrace.worker.sampler import Sampled, sample


class Vocabulary:
    """Knows how the ids are divided among the ranks of a stage."""

    def __init__(self, vocab_size: int, topology: Topology, peers: Peers) -> None:
        self._vocab_size = vocab_size
        self._first_id = topology.share(vocab_size).start
        self._width = -(-vocab_size // topology.tp_size)
        self._is_whole = topology.tp_size == 1
        self._peers = peers

    def sample(self, logits: Tensor, rows: list[SampledRow]) -> Sampled:
        """Draw one token for each row of this rank's logits [M, W]."""
        if not rows:
            return Sampled([], [])
        if self._is_whole:
            return sample(logits, rows)
        if all(_is_plain_greedy(row) for row in rows):
            return self._argmax(logits)
        return sample(self.gather(logits), rows)

    def gather(self, logits: Tensor) -> Tensor:
        """All logits [M, V]."""
        padded = F.pad(logits, (0, self._width - logits.shape[1]))
        return torch.cat(self._peers.gather(padded), dim=-1)[:, : self._vocab_size]

    def _argmax(self, logits: Tensor) -> Sampled:
        """Each rank's best instead of all logits: two numbers a row. A float64 holds both a float32 and an id exactly.

        The first of equal peaks wins, as in one rank; a NaN is larger than everything.
        """
        peaks, own_ids = logits.max(dim=-1)
        offers = torch.stack([peaks.double(), (own_ids + self._first_id).double()])  # [2, M]
        all_peaks, all_ids = torch.stack(self._peers.gather(offers)).unbind(1)  # [n, M]
        peaks, winners = all_peaks.max(dim=0)
        ids, valid = torch.stack([all_ids.gather(0, winners.unsqueeze(0))[0], peaks.isfinite().double()]).tolist()
        return Sampled(token_ids=[int(token_id) for token_id in ids], is_valid=[bool(flag) for flag in valid])


def _is_plain_greedy(row: SampledRow) -> bool:
    return row.sampling.temperature == 0.0 and row.output_position >= row.sampling.min_tokens
