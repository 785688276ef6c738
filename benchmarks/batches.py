"""Sequences, batches and settings of draws for the benchmarks of a worker's kernels."""

from __future__ import annotations

import random
from itertools import accumulate

import torch
from msgspec.structs import replace
from torch import Tensor

from millrace.executor.wire.messages import LogitsSettings, NewSequence, RowSampling, SeqId, StepId, StepPlan, StepRow
from millrace.worker.input_batch import InputBatch, StepBatch
from millrace.worker.kv_pool import KVPool, LayerCache, LayerSpec
from millrace.worker.sampling_rows import SamplingRows, SamplingTable

BLOCK_SIZE = 16


def settings(
    temperature: float, top_k: int = 0, top_p: float = 1.0, processors: LogitsSettings | None = None
) -> RowSampling:
    return RowSampling(temperature, top_k, top_p, 0.0, 0, 0, 0, [], processors)


def sequences(rows: list[tuple[int, list[int]]], num_fed: int) -> tuple[list[NewSequence], list[StepRow]]:
    """Return new sequences, and the rows that feed their last tokens. rows: tokens and blocks of each."""
    new = [
        NewSequence(SeqId(row), [11 + row % 400] * length, length, settings(0.6))
        for row, (length, _) in enumerate(rows)
    ]
    return new, [StepRow(SeqId(row), length - num_fed, num_fed, blocks) for row, (length, blocks) in enumerate(rows)]


def batch(lengths: list[int], num_fed: int, device: torch.device) -> tuple[StepBatch, int]:
    """Return a step of rows of these lengths, whose blocks lie in random order, and the size of its KV pool in blocks."""
    ends = list(accumulate((-(-length // BLOCK_SIZE) for length in lengths), initial=0))
    blocks = random.Random(0).sample(range(1, 1 + ends[-1]), ends[-1])
    new, rows = sequences(
        [(length, blocks[start:end]) for length, start, end in zip(lengths, ends, ends[1:], strict=False)], num_fed
    )
    plan = StepPlan(StepId(1), 1, 1, len(rows) * num_fed, len(rows), rows, new)
    input_batch = InputBatch(len(rows), max(lengths), BLOCK_SIZE, 1, device)
    on_host = input_batch.update(plan)
    assert on_host is not None
    return input_batch.send(on_host), 1 + ends[-1]


def attention_inputs(
    lengths: list[int],
    num_fed: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    pool_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, LayerCache, StepBatch]:
    """Return random queries, keys and values of one layer, its cache, and the step. heads: numbers of query heads and of key
    heads, and their size."""
    num_heads, num_kv_heads, size = heads
    step, num_blocks = batch(lengths, num_fed, device)
    pool = KVPool([LayerSpec(0, num_kv_heads, size, size, None)], num_blocks, BLOCK_SIZE, pool_dtype or dtype, device)
    layer = pool.layers[0]
    slots = torch.arange(num_blocks * BLOCK_SIZE, device=device)
    random_numbers = torch.randn(num_kv_heads, len(slots), size, dtype=dtype, device=device)
    layer.write(random_numbers, random_numbers, slots)
    query, key, value = (
        torch.randn(count, len(lengths) * num_fed, size, dtype=dtype, device=device)
        for count in (num_heads, num_kv_heads, num_kv_heads)
    )
    return query, key, value, layer, step


def sampling_rows(
    num_rows: int, device: torch.device, kind: RowSampling, token_ids: list[int], num_prompt: int = 1
) -> SamplingRows:
    """Return rows at their first output position, each with the settings `kind` and a seed of its own."""
    table = SamplingTable(num_rows, device)
    for slot in range(num_rows):
        table.add(slot, NewSequence(SeqId(slot), token_ids, num_prompt, replace(kind, seed=slot)))
    return table.rows(torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64))
