"""Decode steps as graphs of a GPU: one launch replays all kernels of a forward pass.

A graph has fixed sizes and addresses. So the rows of a step are copied into tensors that stay, and padded to the size of a
graph. Padding feeds a token to block 0, which is never read. A graph is captured when a step first needs its size; until
then, and where capturing fails, steps run eagerly. The results are the same.

Shapes: R rows of a step, B rows of a graph, G groups of layers, P blocks of one group in a row's block table.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from millrace.worker.attention.triton import CHUNK, TritonAttention
from millrace.worker.fusion.decoder import FusedDecoder
from millrace.worker.input_batch import StepBatch

logger = logging.getLogger("millrace.worker")

MOST_CHUNKS = 8192
"""Of all rows of a graph: their partial results take 64 MiB with 16 heads of 128 elements. Larger steps are bound by memory,
and run eagerly."""
CAPTURE_PAUSE_S = 0.5
"""Least time between two captures, each of which takes as long as several steps."""

Replay = Callable[[], None]


class Capture(Protocol):
    """Records what a function queues on the device."""

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """Run `compute`, which writes to the same addresses each time, and record it. Return its result, and what runs it
        again."""


class CudaCapture:
    """Captures CUDA graphs. They share the memory of what is allocated on the way, since one runs at a time."""

    def __init__(self) -> None:
        self._memory: Any = None

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()  # compiles kernels, makes buffers and plans the attention, which a capture must not
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = compute()
        self._memory = graph.pool()
        return result, graph.replay


@dataclass(frozen=True)
class _Graph:
    batch: StepBatch
    """Of tensors that stay."""
    hidden: Tensor  # [B, H]
    replay: Replay


class DecodeGraphs:
    """Owns the graphs of one decoder and one KV pool."""

    def __init__(
        self, decoder: FusedDecoder, attention: TritonAttention, max_num_seqs: int, table_width: int, capture: Capture
    ) -> None:
        """`table_width`: blocks of the longest sequence in one group."""
        self._decoder, self._attention, self._capture = decoder, attention, capture
        self._max_num_seqs, self._table_width = max_num_seqs, table_width
        self._graphs: dict[tuple[int, int], _Graph] = {}
        """By number of rows and of chunks of a row."""
        self._num_buffers_made = 0
        self._next_capture_s = 0.0
        self._has_failed = False

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The captured numbers of rows, and of chunks of a row."""
        return sorted(self._graphs)

    def run(self, batch: StepBatch) -> Tensor | None:
        """Return what the decoder's `run` does, for a step of decode rows that all yield a token. None: run it eagerly."""
        num_rows = batch.num_rows
        is_decode = batch.input_ids.shape[1] == num_rows == len(batch.sample_indices) and not batch.is_permuted
        size, chunks = min(_size_for(num_rows), self._max_num_seqs), _chunks_for(max(batch.kv_lens))
        if not is_decode or self._has_failed or num_rows > size or size * chunks > MOST_CHUNKS:
            return None
        if self._num_buffers_made != self._decoder.num_buffers_made:  # the graphs write to buffers that are gone
            self._graphs.clear()
        graph = self._graphs.get((size, chunks)) or self._captured(size, chunks, batch)
        if graph is None:
            return None
        self._fill(graph.batch, batch)
        graph.replay()
        return graph.hidden[:num_rows]

    def _captured(self, size: int, chunks: int, batch: StepBatch) -> _Graph | None:
        now_s = time.monotonic()
        if now_s < self._next_capture_s:
            return None
        kept = self._empty_batch(size, chunks, batch)
        try:
            hidden, replay = self._capture(lambda: self._decoder.run(kept))
        except RuntimeError as error:
            logger.warning("steps run without graphs, which is slower: %.300s", error)
            self._has_failed = True
            self._graphs.clear()
            return None
        self._next_capture_s = time.monotonic() + CAPTURE_PAUSE_S
        self._num_buffers_made = self._decoder.num_buffers_made
        logger.debug("graph of %d rows, %d chunks each: %.2f s", size, chunks, time.monotonic() - now_s)
        graph = self._graphs[size, chunks] = _Graph(kept, hidden, replay)
        return graph

    def _empty_batch(self, size: int, chunks: int, like: StepBatch) -> StepBatch:
        """Return a batch of tensors that stay, with padding only."""
        tables, device = like.block_tables, like.block_tables.device
        return StepBatch(
            input_ids=torch.zeros(1, size, dtype=like.input_ids.dtype, device=device),
            positions=torch.zeros(1, size, dtype=like.positions.dtype, device=device),
            token_blocks=torch.zeros(size, tables.shape[0], dtype=tables.dtype, device=device),
            block_tables=torch.zeros(tables.shape[0], size, self._table_width, dtype=tables.dtype, device=device),
            sample_indices=torch.arange(size, device=device),
            query_starts=list(range(size + 1)),
            kv_lens=[1] * size,
            sampled=like.sampled,
            block_size=like.block_size,
            chunks_of_decodes=chunks,
        )

    def _fill(self, kept: StepBatch, batch: StepBatch) -> None:
        """Copy the rows [R] of a step, and pad them to [B]."""
        num_rows, size, width = batch.num_rows, kept.num_rows, batch.block_tables.shape[2]
        kept.input_ids[:, :num_rows] = batch.input_ids
        kept.positions[:, :num_rows] = batch.positions
        kept.token_blocks[:num_rows] = batch.token_blocks
        kept.block_tables[:, :num_rows, :width] = batch.block_tables
        if num_rows < size:
            kept.positions[:, num_rows:] = 0
            kept.token_blocks[num_rows:] = 0
            kept.block_tables[:, num_rows:, 0] = 0
        self._attention.update_decodes(kept, batch.kv_lens + [1] * (size - num_rows))


def _size_for(num_rows: int) -> int:
    """Return the rows of the graph for a step, if that many are possible: 1, 2, 4, 8, 16, 24, ..."""
    return 1 << (num_rows - 1).bit_length() if num_rows <= 8 else -(-num_rows // 8) * 8


def _chunks_for(kv_len: int) -> int:
    """Return the chunks of a row's keys that a graph has programs for: a power of 2."""
    return 1 << ((kv_len - 1) // CHUNK).bit_length()
