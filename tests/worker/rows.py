"""Rows and batches for tests of the sampler and of attention."""

from __future__ import annotations

import random

import torch

from millrace.executor.wire.messages import NULL_BLOCK, NewSequence, RowSampling, SeqId
from millrace.worker.input_batch import SampledRows, StepBatch
from millrace.worker.sampling_rows import SamplingRows, SamplingTable

Row = tuple[RowSampling, int]
"""The settings of a row and its output position."""


def sampling_rows(rows: list[Row]) -> SamplingRows:
    table = SamplingTable(len(rows), torch.device("cpu"))
    for slot, (sampling, _) in enumerate(rows):
        table.add(slot, NewSequence(SeqId(slot), [], 0, sampling))
    return table.rows(torch.arange(len(rows)), torch.tensor([position for _, position in rows]))


def make_batch(
    rows: list[tuple[int, int]], block_size: int, num_blocks: int, seed: int, window: int | None = None
) -> StepBatch:
    """Rows of (length with this step, tokens fed), in blocks taken at random, without those that the window has passed."""
    free = random.Random(seed).sample(range(1, num_blocks), num_blocks - 1)
    tables = torch.zeros(len(rows), max(-(-length // block_size) for length, _ in rows), dtype=torch.int32)
    positions, blocks, starts = [], [], [0]
    for index, (length, count) in enumerate(rows):
        num_used = -(-length // block_size)
        tables[index, :num_used] = torch.tensor([free.pop() for _ in range(num_used)], dtype=torch.int32)
        if window is not None:
            tables[index, : max(0, length - count + 1 - window) // block_size] = NULL_BLOCK
        fed = torch.arange(length - count, length)
        positions.append(fed)
        blocks.append(tables[index, fed // block_size])
        starts.append(starts[-1] + count)
    return StepBatch(
        input_ids=torch.zeros(1, starts[-1], dtype=torch.int64),
        positions=torch.cat(positions).unsqueeze(0),
        token_blocks=torch.cat(blocks).unsqueeze(1),
        block_tables=tables.unsqueeze(0),
        sample_indices=torch.tensor(starts[1:]) - 1,
        query_starts=starts,
        kv_lens=[length for length, _ in rows],
        sampled=SampledRows([], torch.empty(0), sampling_rows([])),
        block_size=block_size,
    )
