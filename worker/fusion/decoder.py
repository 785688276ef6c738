"""The forward pass of a recognised decoder: kernels, one after the other, over buffers that stay.

transformers' modules take about 15 operations of torch a layer. Here a layer is eight calls:

    norm, projections, attention (with norms of heads, rotation and the KV pool), output + residual,
    norm, projections, activation, output + residual

On a GPU a norm, the projections and the activation of few rows are one call.

Shapes: T tokens of the step, M tokens whose logits are needed, H hidden size, W outputs of the attention's projections,
Hq query heads, Dv size of a value head, I intermediate size, V token ids.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from millrace.worker.fusion.mlp import MLP, make_mlp
from millrace.worker.fusion.operations import NormOperation, Operations
from millrace.worker.fusion.parts import AttentionParts, DecoderParts, LayerParts, MLPParts, own_part
from millrace.worker.fusion.projection import Projection
from millrace.worker.input_batch import StepBatch
from millrace.worker.kv_pool import KVPool
from millrace.worker.linear.packed import CompiledLinear, PackedLinear, RowMasks
from millrace.worker.parallel.layers import RowParallelLinear


class DecoderWeights:
    """Owns the weights of a model as its operations read them, and the buffers of its forward pass."""

    def __init__(self, parts: DecoderParts, operations: Operations) -> None:
        """Takes the weights layer by layer. The modules of `parts` cannot run any more."""
        self.operations = operations
        self.layers = [LayerWeights(layer, operations) for layer in parts.layers]
        self.norm = operations.norm(parts.norm) if parts.norm else None
        self.head: PackedLinear | None = None
        self.embedding: nn.Module | None = parts.embedding
        """None if the head does it: if both have the same weights, which are in memory once then. None on a later stage."""
        if parts.head is not None:
            is_tied = parts.embedding is not None and parts.head.weight is own_part(parts.embedding).weight
            self.head, self.embedding = operations.head(parts.head, parts.embedding, is_tied=is_tied)
        self.logit_softcap = parts.logit_softcap
        self.embedding_multiplier, self.logit_divisor = parts.embedding_multiplier, parts.logit_divisor
        self.waits = False
        """Whether each step waits for the GPU. It cannot be a graph then."""

    def release_buffers(self) -> None:
        self.operations.workspace.clear()


class LayerWeights:
    """The weights of one layer."""

    def __init__(self, parts: LayerParts, operations: Operations) -> None:
        self.attention, self.multiplier = parts.attention, parts.multiplier
        gate = parts.attention.divide_gates() if isinstance(parts.attention, AttentionParts) else None
        self.gate = Projection(operations, [gate], parts.input_norm) if gate is not None else None
        self.projections = Projection(operations, parts.attention.projections, parts.input_norm)
        self.output = operations.linear([parts.attention.output])
        self.attention_norm = operations.norm(parts.attention_norm) if parts.attention_norm else None
        self.mlp = make_mlp(parts.mlp, operations, parts.mlp_input_norm)
        self.mlp_norm = operations.norm(parts.mlp_norm) if parts.mlp_norm else None
        self.divided_mlp = parts.mlp.divided if isinstance(parts.mlp, MLPParts) else None
        operations.release_memory()  # of the unpacked weights, or it grows by as much again


class FusedDecoder:
    """Runs the forward pass of one model over one KV pool."""

    def __init__(self, weights: DecoderWeights, pool: KVPool) -> None:
        self._weights = weights
        self._operations = operations = weights.operations
        self._attention = [
            operations.attention(layer.attention, pool.layers[layer.attention.spec.layer_index])
            if isinstance(layer.attention, AttentionParts)
            else operations.recurrence(layer.attention)
            for layer in weights.layers
        ]
        self._workspace = operations.workspace
        self._hidden_size = weights.layers[0].output.num_outputs

    @property
    def num_buffers_made(self) -> int:
        """While it stays, `run` writes to the same addresses."""
        return self._workspace.num_made

    def release_buffers(self) -> None:
        self._weights.release_buffers()

    @property
    def is_last_stage(self) -> bool:
        """Whether `run` returns only the hidden states of the tokens whose logits are needed."""
        return self._weights.norm is not None

    @property
    def vocab_size(self) -> int:
        """The ids whose logits this rank computes."""
        head = self._weights.head
        assert head is not None, "the last stage has the head"
        return head.num_outputs

    def run(self, batch: StepBatch, received: Tensor | None = None) -> Tensor:  # [M, H]
        """Fill the batch's slots of the KV pool, and return the last hidden states of the tokens whose logits are needed; on
        a stage before the last one those of all tokens. They are valid until the next call.

        `received`: the hidden states [T, H] from the stage before this one."""
        workspace, num_sampled = self._workspace, batch.sample_indices.shape[0]
        rows = self._operations.prepare(batch)
        num_tokens, hidden_size = batch.input_ids.shape[1], self._hidden_size
        hidden = workspace.rows("hidden", num_tokens, hidden_size)
        if received is None:
            self._embed(batch.input_ids[0], hidden)
        else:
            hidden.copy_(received)
        last_layer = self._weights.layers[-1] if self.is_last_stage else None
        for layer, attention in zip(self._weights.layers, self._attention, strict=True):
            projected = workspace.rows("projected", num_tokens, layer.projections.num_outputs)
            layer.projections.into(hidden, projected)
            attended = attention.run(projected, rows)
            if layer.gate is not None:
                gates = workspace.rows("gates", num_tokens, layer.gate.num_outputs)
                layer.gate.into(hidden, gates)
                attended *= gates.sigmoid_()
            if layer is last_layer and (num_sampled < num_tokens or batch.is_permuted):
                # Nobody reads the other rows.
                if num_sampled == 0:
                    return hidden[:0]
                hidden, attended = (each.index_select(0, batch.sample_indices) for each in (hidden, attended))
            self._add(layer.output, layer.attention.divided, layer.attention_norm, layer.multiplier, attended, hidden)
            self._add(layer.mlp, layer.divided_mlp, layer.mlp_norm, layer.multiplier, hidden, hidden)
        if self._weights.norm is None:
            return hidden
        normed = workspace.rows("normed", *hidden.shape)
        self._weights.norm(hidden, normed)
        return normed

    def received(self, num_tokens: int) -> Tensor:  # [T, H]
        """Return a buffer for hidden states from the stage before this one."""
        return self._workspace.rows("received", num_tokens, self._hidden_size)

    def logits(self, hidden: Tensor) -> Tensor:  # [M, H] -> [M, V]
        """Return the logits of hidden states. They are valid until the next call."""
        head, softcap, divisor = self._weights.head, self._weights.logit_softcap, self._weights.logit_divisor
        assert head is not None, "the last stage has the head"
        logits = self._workspace.rows("logits", hidden.shape[0], head.num_outputs, head.output_dtype)
        if hidden.shape[0]:
            head.into(hidden, logits)
        if divisor != 1:
            logits /= divisor
        return logits if softcap is None else torch.tanh(logits.div_(softcap)).mul_(softcap)

    @property
    def has_argmax(self) -> bool:
        """Whether `argmax` is possible. With a cap it is not, which may make different logits equal. So may a divisor that
        is no power of 2."""
        is_exact = self._weights.logit_softcap is None and math.frexp(self._weights.logit_divisor)[0] == 0.5
        return isinstance(self._weights.head, CompiledLinear) and is_exact

    def argmax(self, hidden: Tensor, masks: RowMasks | None = None) -> tuple[Tensor, Tensor]:
        """Return the largest logit [M] of each row, and the lowest id [M] that has it, without storing logits. M is at least
        1. Only if `has_argmax`."""
        head = self._weights.head
        assert isinstance(head, CompiledLinear)
        largest, ids = head.argmax(hidden, masks)
        return largest if self._weights.logit_divisor == 1 else largest / self._weights.logit_divisor, ids

    def _embed(self, input_ids: Tensor, hidden: Tensor) -> None:
        """Fill hidden states [T, H] with the embeddings of ids [T]."""
        embedding = self._weights.embedding
        if embedding is None:
            head = self._weights.head
            assert isinstance(head, CompiledLinear)
            rows = hidden if head.row_dtype == hidden.dtype else torch.empty_like(hidden, dtype=head.row_dtype)
            head.weight_rows(input_ids, rows)
            if rows is not hidden:
                hidden.copy_(rows)
        elif type(embedding) is nn.Embedding and embedding.weight.dtype == hidden.dtype:
            torch.index_select(embedding.weight, 0, input_ids, out=hidden)
        else:
            hidden.copy_(embedding(input_ids))
        if self._weights.embedding_multiplier != 1:
            hidden *= self._weights.embedding_multiplier

    def _add(
        self,
        block: PackedLinear | MLP,
        divided: RowParallelLinear | None,
        norm: NormOperation | None,
        multiplier: float,
        inputs: Tensor,
        hidden: Tensor,
    ) -> None:
        """Add a block's output, or its norm, times the multiplier to the hidden states [T, H]. If the block is divided, sum
        it over the ranks."""
        if norm is None and divided is None and multiplier == 1:
            block.into(inputs, hidden, accumulate=True)
            return
        outputs = self._workspace.rows("outputs", *hidden.shape)
        block.into(inputs, outputs)
        if divided is not None:
            outputs = divided.join(outputs)
        if norm is not None:
            norm(outputs, hidden, adds=True)
        else:
            hidden.add_(outputs, alpha=multiplier)
