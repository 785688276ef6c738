"""Steps as graphs of a GPU: one launch replays all kernels of a forward pass, and of the draw where it can.

A graph has fixed sizes and addresses. So the tokens of a step are padded to the size of a graph, and copied to the device at
once, into tensors with fixed addresses. A padding token is written to block 0, which is never read, and what is drawn for it
goes to NO_SLOT.

    rows of the step                                  what the graph computes
    decode rows, by temperature and min_p             forward pass, draw, last token of each slot
    decode rows, some by top_k or top_p               the same, with top_k and top_p
    decode rows, some with masks, penalties, ...      forward pass; the rest follows eagerly
    some of several tokens                            the same; a graph has space for as many rows as there may be

The graphs that most steps need are captured while there is nothing to do, one at a time; the others, and those that are
needed earlier, in the first step that needs them, the largest one of decode rows first. Until then a larger one runs, or the
step runs eagerly, as it does where capturing fails. The results are the same.

Shapes: R rows of a step, M of them yield a token, T tokens of all rows, B rows of a graph, N tokens of a graph, G groups of
layers, P blocks of one group in a row's block table, H hidden size.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millrace.executor.wire.failures import is_interruption
from millrace.executor.wire.messages import NO_TOKEN
from millrace.worker import sampling_triton, tokens_triton
from millrace.worker.attention.triton import CHUNK, TritonAttention
from millrace.worker.capture import Capture, Replay
from millrace.worker.errors import is_out_of_memory
from millrace.worker.fusion.decoder import FusedDecoder
from millrace.worker.graph_kinds import Kind, chunks_for, likely_kinds, size_for, tokens_for
from millrace.worker.input_batch import NO_SLOT, HostBatch, InputBatch, SampledRows, StepBatch
from millrace.worker.sampling_rows import greedy_rows
from millrace.worker.transfer import FixedBuffer

logger = logging.getLogger("millrace.worker")

MOST_CHUNKS = 8192
"""Limit for the chunks of keys of all rows of a graph: their partial results take 64 MiB with 16 heads of 128 elements.
Larger steps are bound by memory and run eagerly."""
MOST_TOKENS = 4096
"""Limit for the tokens of a graph with prompts. The device takes longer for larger steps than the host does to queue their
kernels."""
MOST_TILED = 64
"""Rows of several tokens that a graph has space for, if decode rows are not cut into tiles as they are."""
CAPTURE_PAUSE_STEPS = 64
"""Least number of steps between two captures of graphs of decode rows, and of others. Each takes as long as several steps.
Ranks count the same steps, so they capture together."""
NO_MEMORY_PAUSE_STEPS = 2048
"""The same behind a capture for which there was no memory. Memory may be short for a while only."""


@dataclass(frozen=True)
class _Graph:
    """Tensors with fixed addresses, and the recorded work that reads and writes them."""

    batch: StepBatch
    inputs: FixedBuffer
    """See `_inputs`."""
    received: Tensor | None
    """The hidden states [N, H] from the stage before this one."""
    result: Tensor
    replay: Replay


class StepGraphs:
    """Owns the graphs of one decoder and one KV pool."""

    def __init__(
        self,
        decoder: FusedDecoder,
        attention: TritonAttention,
        sequences: InputBatch,
        max_num_seqs: int,
        max_step_tokens: int,
        table_width: int,
        capture: Capture,
        *,
        all_logits: Callable[[Tensor], Tensor],
        is_alone: bool = True,
        decodes_only: bool = False,
    ) -> None:
        """`table_width`: blocks of the longest sequence in one group. `all_logits`: returns the logits of all ids, where
        this rank has those of a part. `is_alone`: whether no other rank sums tensors with this one. Where a capture fails,
        the others could not go on without graphs. `decodes_only`: whether only steps of decode rows run as graphs."""
        self._decoder, self._attention, self._sequences, self._capture = decoder, attention, sequences, capture
        self._all_logits = all_logits
        self._max_num_seqs, self._table_width, self._is_alone = max_num_seqs, table_width, is_alone
        self._most_tiled = max_num_seqs if attention.tiles_decodes else MOST_TILED
        """Rows cut into tiles that a graph has space for."""
        self._longest = chunks_for(table_width * sequences.block_size)
        """Chunks of the longest sequence."""
        self._most_tokens = 0 if decodes_only else MOST_TOKENS
        self._likely = likely_kinds(max_num_seqs, min(max_step_tokens, self._most_tokens))
        self._graphs: dict[Kind, _Graph] = {}
        self._has_compiled_draws = False
        self._buffers = (0, 0)
        """Identifies the buffers whose addresses are in the graphs."""
        self._num_steps_to_pause = {True: 0.0, False: 0.0}
        """Until the next capture, by whether all rows are decode rows. Infinite after one that failed, unless memory was
        short."""

    @property
    def kinds(self) -> list[Kind]:
        """The graphs that are captured."""
        return sorted(self._graphs)

    @property
    def is_complete(self) -> bool:
        """Whether `capture_next` has nothing to do."""
        return self._has_compiled_draws and self._next_likely() is None

    def capture_next(self) -> None:
        """Capture one of the graphs that most steps need. When there are all, compile the kernels of other steps."""
        self._drop_stale()
        if (kind := self._next_likely()) is not None:
            self._add(kind)
        elif not self._has_compiled_draws:
            self._has_compiled_draws = True
            self._compile_draws()

    def _compile_draws(self) -> None:
        """Draw from logits in float32, which processors make of them. Else all rows would wait while the first of these
        steps compiles its kernels."""
        greedy = greedy_rows(1)
        drawn = replace(greedy, temperatures=torch.ones(1, dtype=torch.float32, device="cpu"))
        try:
            logits = torch.zeros(1, self._decoder.vocab_size, dtype=torch.float32, device=self._sequences.device)
            for rows in (greedy, drawn, replace(drawn, top_k=torch.ones_like(drawn.top_k))):
                sampling_triton.sample(logits, rows)
        except Exception as error:  # a step that needs them reports it
            if is_interruption(error):
                raise
            logger.warning("the draws from float32 logits were not compiled: %.300s", error)

    def _next_likely(self) -> Kind | None:
        can_capture = {kind: steps <= CAPTURE_PAUSE_STEPS for kind, steps in self._num_steps_to_pause.items()}
        return next((kind for kind in self._likely if kind not in self._graphs and can_capture[kind.is_decode]), None)

    def draw(self, rows: HostBatch, received: Tensor | None = None) -> Tensor | None:  # [R]
        """Run a step, draw a token for each row, and keep them as `InputBatch.record` does. Return the ids, valid until the
        next call. None: run it in another way. `received`: as for `FusedDecoder.run`."""
        sampling = rows.sampled.sampling
        if sampling.processors is not None or sampling.logprobs:
            return None
        return self._run(rows, received, draws=True, has_limits=sampling.has_limits)

    def forward(self, rows: HostBatch, received: Tensor | None = None) -> Tensor | None:
        """Return what the decoder's `run` does; on the last stage also rows of padding behind it, up to the next size of a
        graph. None: run it eagerly."""
        return self._run(rows, received, draws=False)

    def _run(
        self, rows: HostBatch, received: Tensor | None = None, *, draws: bool, has_limits: bool = False
    ) -> Tensor | None:
        wanted = self._kind_of(rows, draws=draws, has_limits=has_limits)
        if wanted is None:
            return None
        self._drop_stale()
        graph = self._find(wanted, received)
        if graph is None:
            return None
        self._fill(graph, rows)
        if graph.received is not None and received is not None:
            graph.received[: len(received)] = received
        graph.replay()
        if not self._decoder.is_last_stage:
            return graph.result[: len(rows.tensors["token_slots"])]
        num_sampled = len(rows.tensors["sample_indices"])
        # With other numbers of rows the head would need kernels that no graph has loaded. CUDA loads a kernel when it is
        # first launched, and waits for all queued steps meanwhile.
        return graph.result[: num_sampled if draws or not num_sampled else size_for(num_sampled)]

    def _kind_of(self, rows: HostBatch, *, draws: bool, has_limits: bool) -> Kind | None:
        """Return the smallest graph for a step. None: there is none."""
        num_rows, num_tokens, num_sampled = (
            len(each) for each in (rows.kv_lens, rows.tensors["token_slots"], rows.tensors["sample_indices"])
        )
        size, padded, num_chunks = self._max_num_seqs, 0, chunks_for(max(rows.kv_lens))
        if num_tokens == num_rows == num_sampled and not rows.is_permuted:
            size = min(size_for(num_rows), size)
        elif draws or num_tokens > self._most_tokens or self._attention.num_tiled(rows) > self._most_tiled:
            return None
        else:
            padded = tokens_for(num_tokens)
        if max(num_rows, num_sampled) > size or sum(rows.kv_lens) // CHUNK + size > MOST_CHUNKS:
            return None
        return Kind(size, num_chunks, draws, has_limits, padded)

    def _drop_stale(self) -> None:
        """Drop the graphs if they write to buffers that are gone."""
        if self._buffers != self._current_buffers():
            self._graphs.clear()

    def _current_buffers(self) -> tuple[int, int]:
        return self._decoder.num_buffers_made, self._sequences.num_slots

    def _find(self, wanted: Kind, received: Tensor | None) -> _Graph | None:
        """Return the graph, or a larger one while captures pause."""
        pause = max(0, self._num_steps_to_pause[wanted.is_decode] - 1)
        is_due = pause == 0 and wanted not in self._graphs
        self._num_steps_to_pause[wanted.is_decode] = CAPTURE_PAUSE_STEPS if is_due else pause
        if is_due:
            # The largest one first: the others fit into its memory, which the memory profile has counted.
            decodes = [kind for kind in self._graphs if kind.is_decode]
            is_first = wanted.is_decode and all(kind.draws < wanted.draws for kind in decodes)
            self._add(wanted._replace(num_rows=self._max_num_seqs) if is_first else wanted, received)
        return self._graphs.get(min((kind for kind in self._graphs if kind.serves(wanted)), default=wanted))

    def _add(self, kind: Kind, received: Tensor | None = None) -> None:
        """Capture a graph. `received`: the hidden states of the step that needs it."""
        began_s = time.monotonic()
        try:
            graph = self._captured(kind, received)
        except Exception as error:  # the compiler's are no RuntimeErrors
            if not self._is_alone or is_interruption(error):
                raise
            pause = NO_MEMORY_PAUSE_STEPS if is_out_of_memory(error) else math.inf
            what = "decode steps" if kind.is_decode else "steps with prompts"
            what = what if math.isinf(pause) else f"the next {pause} {what}"
            frames = None if isinstance(error, RuntimeError) else error
            message = "no more graphs for %s: those that have none are slower: %.300s"
            logger.warning(message, what, error, exc_info=frames)
            self._num_steps_to_pause[kind.is_decode] = pause
            return
        if self._buffers != self._current_buffers():  # the first graph of its size may have made buffers anew
            self._graphs.clear()
            self._buffers = self._current_buffers()
        logger.debug("captured %r: %.2f s", kind, time.monotonic() - began_s)
        self._graphs[kind] = graph

    def _captured(self, kind: Kind, received: Tensor | None) -> _Graph:
        """Return a new graph. Raises torch's own error, also when memory runs out."""
        inputs = self._inputs(kind)
        if received is not None:  # all graphs read the same memory
            received = self._decoder.received(max(MOST_TOKENS, self._max_num_seqs))[: kind.num_tokens or kind.num_rows]
            received.zero_()  # new memory may hold NaN, and the capture computes with it
        slots, known_ids, *_, settings = inputs.tensors
        kept = self._batch(kind, inputs.tensors)

        def compute() -> Tensor:
            tokens_triton.feed(slots, known_ids, self._sequences.last_tokens, kept.input_ids)
            self._attention.update(kept)
            hidden = self._decoder.run(kept, received)
            if not kind.draws:
                return hidden
            logits = self._all_logits(self._decoder.logits(hidden))
            token_ids = sampling_triton.draw(logits, settings, has_limits=kind.has_limits)
            tokens_triton.keep(slots, token_ids, self._sequences.last_tokens)
            return token_ids

        result, replay = self._capture(compute)
        return _Graph(kept, inputs, received, result, replay)

    def _inputs(self, kind: Kind) -> FixedBuffer:
        """Return slots [N], known ids [N], positions [1, N], blocks of the tokens [N, G], block tables [G, B, P], the tokens
        whose hidden states it yields [B], and the settings of the draw [5, B], see `sampling_triton.pack_settings`. All rows
        are padding."""
        size, num_groups, block_size = kind.num_rows, self._sequences.num_groups, self._sequences.block_size
        width = min(self._table_width, -(-kind.num_chunks * CHUNK // block_size))
        num_tokens = kind.num_tokens or size
        inputs = FixedBuffer(
            self._sequences.device,
            [
                ((num_tokens,), torch.int64),
                ((num_tokens,), torch.int64),
                ((1, num_tokens), torch.int64),
                ((num_tokens, num_groups), torch.int32),
                ((num_groups, size, width), torch.int32),
                ((size,), torch.int64),
                ((5, size if kind.draws else 0), torch.int64),
            ],
        )
        inputs.tensors[0].fill_(NO_SLOT)
        return inputs

    def _batch(self, kind: Kind, inputs: list[Tensor]) -> StepBatch:
        """Return a batch of tensors with fixed addresses."""
        slots, _, positions, token_blocks, block_tables, sample_indices, _ = inputs
        return StepBatch(
            input_ids=torch.zeros_like(positions),
            positions=positions,
            token_blocks=token_blocks,
            block_tables=block_tables,
            sample_indices=sample_indices,
            query_starts=list(range(kind.num_rows + 1)),
            kv_lens=[1] * kind.num_rows,
            sampled=SampledRows([], slots, greedy_rows(kind.num_rows)),
            block_size=self._sequences.block_size,
            is_permuted=not kind.is_decode,
            space_for_chunks=min(kind.num_rows * self._longest, MOST_CHUNKS),
            space_for_tiled=None if kind.is_decode else self._most_tiled,
        )

    def _fill(self, graph: _Graph, rows: HostBatch) -> None:
        """Copy the rows of a step to the device, padded."""
        given, num_rows, width = rows.tensors, len(rows.kv_lens), rows.tensors["block_tables"].shape[2]
        num_tokens, num_sampled = len(given["token_slots"]), len(given["sample_indices"])
        with graph.inputs.filling() as (slots, known_ids, positions, token_blocks, block_tables, sampled, settings):
            slots[:num_tokens], slots[num_tokens:] = given["token_slots"], NO_SLOT
            known_ids[:num_tokens] = given.get("known_ids", NO_TOKEN)
            positions[:, :num_tokens] = given["positions"]
            token_blocks[:num_tokens] = given["token_blocks"]
            block_tables[:, :num_rows, :width] = given["block_tables"]
            sampled[:num_sampled] = given["sample_indices"]
            if settings.shape[1]:
                sampling_triton.pack_settings(rows.sampled.sampling, settings)
        self._attention.fill(graph.batch, rows)
