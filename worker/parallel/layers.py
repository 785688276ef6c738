"""Modules of which each rank computes a part, and that then communicate.

Shapes: T tokens, I inputs, O outputs, H hidden size, n ranks of a stage. A rank's weight is [O / n, I] where outputs
are divided, and [O, I / n] where inputs are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from millrace.worker.parallel.peers import Peers


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are divided. The outputs are summed over the ranks."""

    def __init__(self, linear: nn.Linear, peers: Peers, *, input_is_parallel: bool = True) -> None:
        """`input_is_parallel`: whether the inputs are this rank's part. If not, they are whole, and it takes its part."""
        super().__init__()
        self.own = linear
        self.bias: Tensor | None = linear.bias  # added once, to the sum
        linear.register_parameter("bias", None)
        self._peers = peers
        self.input_is_parallel = input_is_parallel
        width, tp_rank = linear.weight.shape[1], peers.topology.tp_rank
        self._own_inputs = slice(None) if input_is_parallel else slice(tp_rank * width, (tp_rank + 1) * width)

    def forward(self, inputs: Tensor) -> Tensor:  # [..., I / n] or [..., I] -> [..., O]
        return self.join(self.own(inputs[..., self._own_inputs]))

    def join(self, outputs: Tensor) -> Tensor:
        """Return the layer's outputs from those of the rank's own part, which are overwritten."""
        self._peers.all_reduce(outputs)
        return outputs if self.bias is None else outputs + self.bias


class ColumnParallelLinear(nn.Module):
    """A linear layer whose outputs are divided, and gathered for a next module that needs them whole."""

    def __init__(self, linear: nn.Linear, peers: Peers) -> None:
        super().__init__()
        self.own = linear
        self._peers = peers

    def forward(self, inputs: Tensor) -> Tensor:  # [..., I] -> [..., O]
        return torch.cat(self._peers.all_gather(self.own(inputs)), dim=-1)


class TensorParallelExperts(nn.Module):
    """The experts of a mixture, divided by their inner width. The outputs are summed over the ranks."""

    def __init__(self, experts: nn.Module, peers: Peers) -> None:
        super().__init__()
        self.own = experts
        self._peers = peers

    def forward(self, hidden_states: Tensor, *routing: Tensor) -> Tensor:  # [T, H] -> [T, H]
        return self._peers.all_reduce(self.own(hidden_states, *routing))


class VocabParallelEmbedding(nn.Module):
    """An embedding with a divided vocabulary. A rank has zeros for the ids of others, and the results are summed."""

    def __init__(self, embedding: nn.Embedding, peers: Peers) -> None:
        super().__init__()
        self.own = embedding
        self._first_id = peers.topology.share(embedding.num_embeddings).start
        self._num_ids = embedding.weight.shape[0]
        self._peers = peers

    def forward(self, token_ids: Tensor) -> Tensor:  # [1, T] -> [1, T, H]
        own_ids = token_ids - self._first_id
        is_foreign = (own_ids < 0) | (own_ids >= self._num_ids)
        embedded = self.own(own_ids.masked_fill(is_foreign, 0))
        return self._peers.all_reduce(embedded.masked_fill(is_foreign.unsqueeze(-1), 0.0))
