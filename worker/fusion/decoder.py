"""The forward pass of a recognised decoder on a CPU: kernels, one after the other, over buffers that stay.

transformers' modules take about 15 operations of torch a layer. Here a layer is eight calls:

    norm, projections, attention (with norms of heads, rotation and the KV pool), output + residual,
    norm, projections, activation, output + residual

Shapes: T tokens of the step, M tokens whose logits are needed, H hidden size, W outputs of the attention's projections,
Hq query heads, Dv size of a value head, I intermediate size, V token ids.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from millrace.worker.attention.compiled import LayerAttention, step_rows
from millrace.worker.fusion.mlp import MLP, make_mlp
from millrace.worker.fusion.structure import AttentionParts, DecoderParts, LayerParts, MLPParts, Norm, own_part
from millrace.worker.fusion.workspace import Workspace
from millrace.worker.host_memory import release_freed_memory
from millrace.worker.input_batch import StepBatch
from millrace.worker.kernels.library import Kernels
from millrace.worker.kernels.rows import RowNorm
from millrace.worker.kernels.sampling import argmax
from millrace.worker.kv_pool import KVPool
from millrace.worker.linear.choice import screen_argmax
from millrace.worker.linear.modules import pack_modules
from millrace.worker.linear.packed import CompiledLinear, PackedLinear
from millrace.worker.parallel.layers import RowParallelLinear, VocabParallelEmbedding


class DecoderWeights:
    """Owns the weights of a model as the kernels read them, and the buffers of its forward pass."""

    def __init__(self, parts: DecoderParts, kernels: Kernels, dtype: torch.dtype) -> None:
        """`dtype`: of the activations. Packs the weights layer by layer. The modules of `parts` cannot run any more."""
        self.kernels = kernels
        self.workspace = Workspace(dtype)
        self.layers = [LayerWeights(layer, self.workspace, kernels, dtype) for layer in parts.layers]
        self.norm = RowNorm(kernels, parts.norm.weights, parts.norm.epsilon, dtype)
        is_tied = parts.head.weight is own_part(parts.embedding).weight
        is_plain = type(parts.embedding) is nn.Embedding
        self.head = pack_modules([parts.head], dtype, torch.float32, keeps=is_tied and not is_plain)
        self.embedding: nn.Embedding | VocabParallelEmbedding | CompiledLinear = parts.embedding
        """The head if both have the same weights, which are in memory once then. Ranks that divide the ids keep both."""
        if is_tied and type(parts.embedding) is nn.Embedding and isinstance(self.head, CompiledLinear):
            self.embedding, parts.embedding.weight = self.head, parts.head.weight
        screen_argmax(self.head)
        self.logit_softcap = parts.logit_softcap


class LayerWeights:
    """The weights of one layer."""

    def __init__(self, parts: LayerParts, workspace: Workspace, kernels: Kernels, dtype: torch.dtype) -> None:
        def row_norm(norm: Norm) -> RowNorm:
            return RowNorm(kernels, norm.weights, norm.epsilon, dtype)

        self.attention: AttentionParts = parts.attention
        self.input_norm = row_norm(parts.input_norm)
        self.projections = pack_modules(parts.attention.projections, dtype)
        self.output = pack_modules([parts.attention.output], dtype)
        self.attention_norm = row_norm(parts.attention_norm) if parts.attention_norm else None
        self.mlp_input_norm = row_norm(parts.mlp_input_norm)
        self.mlp = make_mlp(parts.mlp, workspace, kernels, dtype)
        self.mlp_norm = row_norm(parts.mlp_norm) if parts.mlp_norm else None
        self.divided_mlp = parts.mlp.divided if isinstance(parts.mlp, MLPParts) else None
        release_freed_memory()  # the unpacked weights, or the heap grows by as much again


class FusedDecoder:
    """Runs the forward pass of one model over one KV pool."""

    def __init__(self, weights: DecoderWeights, pool: KVPool) -> None:
        self._weights = weights
        self._block_size = pool.block_size
        self._attention = [
            _attention(layer.attention, pool, weights.kernels, weights.workspace.dtype) for layer in weights.layers
        ]
        self._workspace = weights.workspace

    def run(self, batch: StepBatch) -> Tensor:  # [M, H]
        """Fill the batch's slots of the KV pool, and return the last hidden states of the tokens whose logits are needed.
        They are valid until the next call."""
        workspace, num_sampled = self._workspace, batch.sample_indices.shape[0]
        rows = step_rows(batch, self._block_size)
        hidden = self._embed(batch.input_ids[0])
        num_tokens, hidden_size = hidden.shape
        normed = workspace.rows("normed", num_tokens, hidden_size)
        for layer, attention in zip(self._weights.layers, self._attention, strict=True):
            layer.input_norm.into(hidden, normed)
            projected = workspace.rows("projected", num_tokens, layer.projections.num_outputs)
            layer.projections.into(normed, projected)
            attended = workspace.rows("attended", num_tokens, layer.output.num_inputs)
            attention.run(projected, attended, rows)
            if layer is self._weights.layers[-1] and (num_sampled < num_tokens or batch.is_permuted):
                # Nobody reads the other rows.
                if num_sampled == 0:
                    return hidden[:0]
                hidden, attended = (each.index_select(0, batch.sample_indices) for each in (hidden, attended))
                normed = workspace.rows("normed", num_sampled, hidden_size)
            self._add(layer.output, layer.attention.divided, layer.attention_norm, attended, hidden)
            layer.mlp_input_norm.into(hidden, normed)
            self._add(layer.mlp, layer.divided_mlp, layer.mlp_norm, normed, hidden)
        self._weights.norm.into(hidden, normed)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:  # [M, H] -> [M, V]
        """Return the logits of hidden states. They are valid until the next call."""
        head, softcap = self._weights.head, self._weights.logit_softcap
        logits = self._workspace.rows("logits", hidden.shape[0], head.num_outputs, head.output_dtype)
        if hidden.shape[0]:
            head.into(hidden, logits)
        return logits if softcap is None else torch.tanh(logits.div_(softcap)).mul_(softcap)

    def most_likely(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit [M] of each row, and the lowest id [M] that has it. Stores no logits where it can."""
        if (
            self._weights.logit_softcap is not None or not hidden.shape[0]
        ):  # the cap may round different logits to the same one
            return argmax(self._weights.kernels, self.logits(hidden))
        return self._weights.head.argmax(hidden)

    def _embed(self, input_ids: Tensor) -> Tensor:  # [T, H]
        embedding = self._weights.embedding
        hidden = self._workspace.rows("hidden", input_ids.shape[0], self._weights.head.num_inputs)
        if isinstance(embedding, CompiledLinear):
            return hidden.copy_(embedding.weight_rows(input_ids))
        if type(embedding) is nn.Embedding and embedding.weight.dtype == hidden.dtype:
            return torch.index_select(embedding.weight, 0, input_ids, out=hidden)
        return hidden.copy_(embedding(input_ids))

    def _add(
        self,
        block: PackedLinear | MLP,
        divided: RowParallelLinear | None,
        norm: RowNorm | None,
        inputs: Tensor,
        hidden: Tensor,
    ) -> None:
        """Add a block's output, or its norm, to the hidden states [T, H]. If the block is divided, sum it over the ranks."""
        if norm is None and divided is None:
            block.into(inputs, hidden, accumulate=True)
            return
        outputs = self._workspace.rows("outputs", *hidden.shape)
        block.into(inputs, outputs)
        if divided is not None:
            outputs = divided.join(outputs)
        if norm is not None:
            norm.into(outputs, hidden, adds=True)
        else:
            hidden += outputs


def _attention(parts: AttentionParts, pool: KVPool, kernels: Kernels, dtype: torch.dtype) -> LayerAttention:
    norms = parts.head_norms
    return LayerAttention(
        kernels,
        pool.layers[parts.spec.layer_index],
        parts.num_heads,
        dtype,
        parts.scaling,
        parts.spec.sliding_window,
        parts.softcap,
        rotary=(parts.rotary.cosines, parts.rotary.sines),
        norms=(norms[0].weights, norms[1].weights) if norms else None,
        norm_eps=norms[0].epsilon if norms else 0.0,
    )
