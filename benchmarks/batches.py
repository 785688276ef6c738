"""Sequences, batches and settings of draws for the benchmarks of a worker's kernels."""

from __future__ import annotations

import random

import torch
from msgspec.structs import replace

from millrace.executor.wire.messages import LogitsSettings, NewSequence, RowSampling, SeqId, StepId, StepPlan, StepRow
from millrace.worker.input_batch import InputBatch, StepBatch
from millrace.worker.sampling_rows import SamplingRows, SamplingTable

BLOCK_SIZE = 16


def settings(
    temperature: float, top_k: int = 0, top_p: float = 1.0, processors: LogitsSettings | None = None
) -> RowSampling:
    return RowSampling(temperature, top_k, top_p, 0.0, 0, 0, 0, [], processors)


def sequences(num_rows: int, length: int, num_fed: int, blocks: list[int]) -> tuple[list[NewSequence], list[StepRow]]:
    """Return new sequences of `length` tokens, and the rows that feed their last ones. The blocks are shared out."""
    share = len(blocks) // num_rows
    new = [NewSequence(SeqId(row), [11 + row % 400] * length, length, settings(0.6)) for row in range(num_rows)]
    starts = range(0, num_rows * share, share)
    parts = (blocks[start : start + share] for start in starts)
    return new, [StepRow(SeqId(row), length - num_fed, num_fed, part) for row, part in enumerate(parts)]


def batch(num_rows: int, length: int, num_fed: int, device: torch.device) -> tuple[StepBatch, int]:
    """Return a step of equal rows, whose blocks lie in random order, and the size of its KV pool in blocks."""
    num_blocks = 1 + num_rows * -(-length // BLOCK_SIZE)
    blocks = random.Random(0).sample(range(1, num_blocks), num_blocks - 1)
    new, rows = sequences(num_rows, length, num_fed, blocks)
    plan = StepPlan(StepId(1), 1, 1, num_rows * num_fed, num_rows, rows, new)
    input_batch = InputBatch(num_rows, length, BLOCK_SIZE, 1, device)
    on_host = input_batch.update(plan)
    assert on_host is not None
    return input_batch.send(on_host), num_blocks


def sampling_rows(
    num_rows: int, device: torch.device, kind: RowSampling, token_ids: list[int], num_prompt: int = 1
) -> SamplingRows:
    """Return rows at their first output position, each with the settings `kind` and a seed of its own."""
    table = SamplingTable(num_rows, device)
    for slot in range(num_rows):
        table.add(slot, NewSequence(SeqId(slot), token_ids, num_prompt, replace(kind, seed=slot)))
    return table.rows(torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64))
