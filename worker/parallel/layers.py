"""Modules whose ranks compute a part each and then speak with each other.

Shapes: T tokens, I inputs, O outputs, H hidden size, n ranks of a stage. A rank's weight is [O / n, I] where outputs are
divided, and [O, I / n] where inputs are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worker.parallel.peers import Peers
from worker.parallel.topology import Topology


class SummedLinear(nn.Module):
    """A linear layer whose inputs are divided: each rank has a part of every sum."""

    def __init__(self, linear: nn.Linear, topology: Topology, peers: Peers) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias: Tensor | None = linear.bias
        self._peers = peers

    def forward(self, inputs: Tensor) -> Tensor:  # [..., I / n] -> [..., O]
        outputs = self._peers.sum(F.linear(inputs, self.weight))
        return outputs if self.bias is None else outputs + self.bias


class SplitLinear(SummedLinear):
    """The same for inputs that every rank has whole."""

    def __init__(self, linear: nn.Linear, topology: Topology, peers: Peers) -> None:
        super().__init__(linear, topology, peers)
        width = linear.weight.shape[1]
        self._own = slice(topology.tp_rank * width, (topology.tp_rank + 1) * width)

    def forward(self, inputs: Tensor) -> Tensor:  # [..., I] -> [..., O]
        return super().forward(inputs[..., self._own])


class GatheredLinear(nn.Module):
    """A linear layer whose outputs are divided, and needed whole by what comes next."""

    def __init__(self, linear: nn.Linear, topology: Topology, peers: Peers) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias: Tensor | None = linear.bias
        self._peers = peers

    def forward(self, inputs: Tensor) -> Tensor:  # [..., I] -> [..., O]
        return torch.cat(self._peers.gather(F.linear(inputs, self.weight, self.bias)), dim=-1)


class SummedExperts(nn.Module):
    """The experts of a mixture, of each of which every rank has a part of the inner width: a part of every sum."""

    def __init__(self, experts: nn.Module, topology: Topology, peers: Peers) -> None:
        super().__init__()
        self.own = experts
        self._peers = peers

    def forward(self, hidden_states: Tensor, *routing: Tensor) -> Tensor:  # [T, H] -> [T, H]
        return self._peers.sum(self.own(hidden_states, *routing))


class SharedEmbedding(nn.Module):
    """An embedding whose vocabulary is divided: each rank looks up the ids that it has, and the rest are zeros."""

    def __init__(self, embedding: nn.Embedding, topology: Topology, peers: Peers) -> None:
        super().__init__()
        self.own = embedding
        self._first_id = topology.share(embedding.num_embeddings).start
        self._num_ids = embedding.weight.shape[0]
        self._peers = peers

    def forward(self, token_ids: Tensor) -> Tensor:  # [1, T] -> [1, T, H]
        own_ids = token_ids - self._first_id
        is_elsewhere = (own_ids < 0) | (own_ids >= self._num_ids)
        embedded = self.own(own_ids.masked_fill(is_elsewhere, 0))
        return self._peers.sum(embedded.masked_fill(is_elsewhere.unsqueeze(-1), 0.0))
