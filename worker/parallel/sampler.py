"""Sampling when each rank has the logits of its own part of the vocabulary.

All ranks of a stage draw the same tokens, since a draw depends on the gathered logits and the row only.

Shapes: M rows that yield a token, W ids of this rank, V ids of all ranks, n ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.worker.parallel.peers import Peers
from millrace.worker.parallel.topology import Topology
from millrace.worker.sampler import sample, without_failed
from millrace.worker.sampling_rows import SamplingRows
from millrace.worker.transfer import to_device


class VocabParallelSampler:
    """Samples from logits that the ranks of a stage divide. Keeps no state between steps."""

    def __init__(self, vocab_size: int, topology: Topology, peers: Peers) -> None:
        self._vocab_size = vocab_size
        self._first_id = topology.share(vocab_size).start
        self._width = -(-vocab_size // topology.tp_size)
        self._tp_size = topology.tp_size
        self._peers = peers

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Draw one token for each row of this rank's logits [M, W]. See `worker.sampler.sample`."""
        if self._tp_size == 1:
            return sample(logits, rows)
        if rows.is_plain_greedy:
            return self.merge(*logits.max(dim=-1))
        is_plain = rows.plain_greedy_rows()
        if not bool(is_plain.any()):
            return sample(self.gather(logits), rows)
        # Whole rows are many times as much data as the two numbers of a plain row, so only those that need it are gathered.
        (others,) = to_device(logits.device, [(~is_plain).nonzero().squeeze(1)])
        token_ids = self.merge(*logits.max(dim=-1))
        whole = torch.zeros(len(logits), self._vocab_size, dtype=logits.dtype, device=logits.device)
        whole[others] = self.gather(logits[others])
        token_ids[others] = sample(whole, rows)[others]
        return token_ids

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all ranks [M, V]."""
        if self._tp_size == 1:
            return logits
        padded = F.pad(logits, (0, self._width - logits.shape[1]))
        return torch.cat(self._peers.all_gather(padded), dim=-1)[:, : self._vocab_size]

    def merge(self, peaks: Tensor, own_ids: Tensor) -> Tensor:
        """Draw greedily from the largest logit [M] of each rank and its id [M] there: two numbers per row and rank. A
        float64 holds a float32 and an id exactly. As on one rank, the lowest of equal ids wins, and a NaN is the largest
        value."""
        if len(peaks) == 0:
            return own_ids
        if self._tp_size == 1:
            return without_failed(peaks, own_ids)
        best = torch.stack([peaks.double(), (own_ids + self._first_id).double()])  # [2, M]
        all_peaks, all_ids = torch.stack(self._peers.all_gather(best)).unbind(1)  # [n, M]
        peaks, winners = all_peaks.max(dim=0)
        token_ids = all_ids.gather(0, winners.unsqueeze(0))[0].long()
        return without_failed(peaks, token_ids)
