"""Decode steps as graphs of a GPU: one launch replays all kernels of a forward pass, and of the draw where it can.

A graph has fixed sizes and addresses. So the rows of a step are copied into tensors that stay, and padded to the size of a
graph. Padding feeds a token to block 0, which is never read, and its token goes to NO_SLOT.

    what the step's rows want             in the graph
    tokens, by temperature and min_p      forward pass, draw, last token of each slot
    tokens, some by top_k or top_p        the same, with the search for floors
    masks, penalties, log-probabilities   forward pass; the rest follows eagerly

The largest graph is captured first, the others when a step first needs them. Until then a larger one runs, or the step runs
eagerly, as it does where capturing fails. The results are the same.

Shapes: R rows of a step, B rows of a graph, G groups of layers, P blocks of one group in a row's block table.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from millrace.worker import sampling_triton
from millrace.worker.attention.triton import CHUNK, TritonAttention
from millrace.worker.fusion.decoder import FusedDecoder
from millrace.worker.input_batch import NO_SLOT, InputBatch, StepBatch

logger = logging.getLogger("millrace.worker")

MOST_CHUNKS = 8192
"""Of all rows of a graph: their partial results take 64 MiB with 16 heads of 128 elements. Larger steps are bound by memory,
and run eagerly."""
CAPTURE_PAUSE_STEPS = 64
"""Least number of steps between two captures, each of which takes as long as several steps. Ranks count the same steps, so
they capture together."""

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


class Kind(NamedTuple):
    """What a graph is for."""

    num_rows: int
    num_chunks: int
    """Of the keys of each row."""
    draws: bool
    """Whether it yields token ids [B], which are kept for the next step. If not, it yields hidden states [B, H]."""
    has_limits: bool = False
    """Whether it draws with top_k and top_p too."""

    def serves(self, wanted: Kind) -> bool:
        """Whether this graph can run the steps of another one."""
        is_large_enough = self.num_rows >= wanted.num_rows and self.num_chunks >= wanted.num_chunks
        return is_large_enough and self.draws == wanted.draws and self.has_limits >= wanted.has_limits


@dataclass(frozen=True)
class _Graph:
    """Tensors that stay, and what reads and writes them."""

    batch: StepBatch
    settings: Tensor  # [5, B], see `sampling_triton.pack_settings`
    result: Tensor
    replay: Replay


class DecodeGraphs:
    """Owns the graphs of one decoder and one KV pool."""

    def __init__(
        self,
        decoder: FusedDecoder,
        attention: TritonAttention,
        sequences: InputBatch,
        max_num_seqs: int,
        table_width: int,
        capture: Capture,
        *,
        is_alone: bool = True,
    ) -> None:
        """`table_width`: blocks of the longest sequence in one group. `is_alone`: whether no other rank runs these steps
        too. The others sum tensors with this one, so where a capture fails none can go on without it."""
        self._decoder, self._attention, self._sequences, self._capture = decoder, attention, sequences, capture
        self._max_num_seqs, self._table_width, self._is_alone = max_num_seqs, table_width, is_alone
        self._graphs: dict[Kind, _Graph] = {}
        self._buffers = (0, 0)
        """Stands for the addresses that the graphs have."""
        self._num_steps_to_pause = 0
        self._has_failed = False

    @property
    def kinds(self) -> list[Kind]:
        """The graphs that are captured."""
        return sorted(self._graphs)

    def draw(self, batch: StepBatch) -> Tensor | None:  # [R]
        """Run a step, draw a token for each row, and keep them as `InputBatch.record` does. Return the ids, valid until the
        next call. None: run it in another way."""
        sampled = batch.sampled
        if sampled.sampling.processors is not None or sampled.scored is not None:
            return None
        return self._run(batch, draws=True, has_limits=sampled.sampling.has_limits)

    def forward(self, batch: StepBatch) -> Tensor | None:  # [R, H]
        """Return what the decoder's `run` does. None: run it eagerly."""
        return self._run(batch, draws=False)

    def _run(self, batch: StepBatch, *, draws: bool, has_limits: bool = False) -> Tensor | None:
        num_rows = batch.num_rows
        is_decode = batch.input_ids.shape[1] == num_rows == len(batch.sample_indices) and not batch.is_permuted
        size, chunks = min(_size_for(num_rows), self._max_num_seqs), _chunks_for(max(batch.kv_lens))
        if not is_decode or self._has_failed or num_rows > size or size * chunks > MOST_CHUNKS:
            return None
        if self._buffers != self._current_buffers():  # the graphs write to buffers that are gone
            self._graphs.clear()
        graph = self._find(Kind(size, chunks, draws, has_limits), batch)
        if graph is None:
            return None
        self._fill(graph, batch)
        graph.replay()
        return graph.result[:num_rows]

    def _current_buffers(self) -> tuple[int, int]:
        return self._decoder.num_buffers_made, self._sequences.num_slots

    def _find(self, wanted: Kind, batch: StepBatch) -> _Graph | None:
        """Return the graph, or a larger one while captures pause."""
        self._num_steps_to_pause = max(0, self._num_steps_to_pause - 1)
        if wanted not in self._graphs and self._num_steps_to_pause == 0:
            # The largest one first: the others find place in its memory, which the profile of the memory has counted.
            is_first = all(kind.draws < wanted.draws for kind in self._graphs)
            self._add(self._largest(wanted, batch.block_size) if is_first else wanted, batch)
        return self._graphs.get(min((kind for kind in self._graphs if kind.serves(wanted)), default=wanted))

    def _largest(self, kind: Kind, block_size: int) -> Kind:
        num_chunks = 1 << (MOST_CHUNKS // self._max_num_seqs).bit_length() >> 1  # a power of 2
        longest = _chunks_for(self._table_width * block_size)
        return kind._replace(num_rows=self._max_num_seqs, num_chunks=max(1, min(num_chunks, longest)))

    def _add(self, kind: Kind, batch: StepBatch) -> None:
        began_s = time.monotonic()
        kept, settings = self._padding(kind, batch)

        def compute() -> Tensor:
            hidden = self._decoder.run(kept)
            if not kind.draws:
                return hidden
            token_ids = sampling_triton.draw(self._decoder.logits(hidden), settings, has_limits=kind.has_limits)
            return self._sequences.keep(kept.sampled.slots, token_ids)

        try:
            result, replay = self._capture(compute)
        except RuntimeError as error:
            if not self._is_alone:
                raise
            logger.warning("steps run without graphs, which is slower: %.300s", error)
            self._has_failed = True
            self._graphs.clear()
            return
        self._num_steps_to_pause = CAPTURE_PAUSE_STEPS
        if self._buffers != self._current_buffers():  # the first graph of its size may have made buffers anew
            self._graphs.clear()
            self._buffers = self._current_buffers()
        logger.debug("captured %r: %.2f s", kind, time.monotonic() - began_s)
        self._graphs[kind] = _Graph(kept, settings, result, replay)

    def _padding(self, kind: Kind, like: StepBatch) -> tuple[StepBatch, Tensor]:
        """Return a batch of tensors that stay, with padding only, and settings [5, B] for it."""
        size, tables, device = kind.num_rows, like.block_tables, like.block_tables.device
        slots = torch.full((size,), NO_SLOT, device=device)
        batch = StepBatch(
            input_ids=torch.zeros(1, size, dtype=like.input_ids.dtype, device=device),
            positions=torch.zeros(1, size, dtype=like.positions.dtype, device=device),
            token_blocks=torch.zeros(size, tables.shape[0], dtype=tables.dtype, device=device),
            block_tables=torch.zeros(tables.shape[0], size, self._table_width, dtype=tables.dtype, device=device),
            sample_indices=torch.arange(size, device=device),
            query_starts=list(range(size + 1)),
            kv_lens=[1] * size,
            sampled=replace(like.sampled, seq_ids=[], slots=slots),
            block_size=like.block_size,
            chunks_of_decodes=kind.num_chunks,
        )
        return batch, torch.zeros(5, size, dtype=torch.int64, device=device)

    def _fill(self, graph: _Graph, batch: StepBatch) -> None:
        """Copy the rows [R] of a step, and pad them to [B]."""
        kept, slots = graph.batch, graph.batch.sampled.slots
        num_rows, size, width = batch.num_rows, kept.num_rows, batch.block_tables.shape[2]
        kept.input_ids[:, :num_rows] = batch.input_ids
        kept.positions[:, :num_rows] = batch.positions
        kept.token_blocks[:num_rows] = batch.token_blocks
        kept.block_tables[:, :num_rows, :width] = batch.block_tables
        slots[:num_rows] = batch.sampled.slots
        if num_rows < size:
            kept.positions[:, num_rows:] = 0
            kept.token_blocks[num_rows:] = 0
            kept.block_tables[:, num_rows:, 0] = 0
            slots[num_rows:] = NO_SLOT
        self._attention.update_decodes(kept, batch.kv_lens + [1] * (size - num_rows))
        settings = sampling_triton.pack_settings(batch.sampled.sampling, size, slots.device)
        graph.settings.copy_(settings, non_blocking=True)


def _size_for(num_rows: int) -> int:
    """Return the rows of the graph for a step, if that many are possible: 1, 2, 4, 8, 16, 24, ..."""
    return 1 << (num_rows - 1).bit_length() if num_rows <= 8 else -(-num_rows // 8) * 8


def _chunks_for(kv_len: int) -> int:
    """Return the chunks of a row's keys that a graph has programs for: a power of 2."""
    return 1 << ((kv_len - 1) // CHUNK).bit_length()
