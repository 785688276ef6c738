"""Runs steps: makes a batch of a plan, computes its logits, samples tokens from them."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.executor.wire.messages import (
    NewSequence,
    RowFailure,
    RowSampling,
    SeqId,
    StepId,
    StepPlan,
    StepResult,
    StepRow,
)
from millrace.worker.attention.interface import STEP_KEYWORD, Attention, ForwardStep
from millrace.worker.errors import PlanError
from millrace.worker.input_batch import InputBatch, SampledRow, StepBatch
from millrace.worker.kv_pool import KVPool, num_blocks_for
from millrace.worker.sampler import Sampled, sample

logger = logging.getLogger("millrace.worker")


class Runner:
    """Owns what a step changes: the sequences on this rank and the contents of the KV pool."""

    def __init__(
        self, model: PreTrainedModel, attention: Attention, pool: KVPool, max_num_seqs: int, max_model_len: int
    ) -> None:
        self._model = model
        self._attention = attention
        self._pool = pool
        self._sequences = InputBatch(max_num_seqs, max_model_len, pool.block_size, model.device)

    @torch.inference_mode()
    def execute_model(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises `PlanError`, and torch's own error when memory runs out."""
        if plan.swap_out or plan.swap_in:
            raise PlanError("there is no host memory tier: swap_out and swap_in must be empty")
        self._pool.copy_blocks(plan.copy)
        failed_ids = self._sequences.update(plan)
        failures = [
            RowFailure(seq_id, "nan_logits", "an earlier step of this sequence failed") for seq_id in failed_ids
        ]
        batch = self._sequences.batch(plan)
        if batch is None:
            return StepResult(plan.step_id, plan.epoch, [], [], [], failures)
        started_s = time.perf_counter()
        sampled = self._sample(plan.step_id, batch)
        device_s = time.perf_counter() - started_s
        if sampled is None:
            return StepResult(plan.step_id, plan.epoch, [], [], [], failures, device_s)
        seq_ids, token_ids, failed = self._record(plan.step_id, batch.sampled_rows, sampled)
        return StepResult(plan.step_id, plan.epoch, seq_ids, [1] * len(seq_ids), token_ids, failures + failed, device_s)

    @torch.inference_mode()
    def compute_logits(self, batch: StepBatch) -> Tensor:
        """Run the forward pass: fill the batch's slots of the KV pool, return logits [rows that sample, vocabulary]."""
        output = self._model(**self._forward_arguments(batch), logits_to_keep=batch.sample_indices)
        logits: Tensor = output.logits[0]
        return logits

    def finish(self) -> None:
        """Wait for transfers of earlier steps and release their tensors. One rank has none."""

    def _sample(self, step_id: StepId, batch: StepBatch) -> Sampled | None:
        """Run the batch. Return its tokens, or None if another rank samples them."""
        return sample(self.compute_logits(batch), batch.sampled_rows)

    def _record(
        self, step_id: StepId, rows: list[SampledRow], sampled: Sampled
    ) -> tuple[list[SeqId], list[int], list[RowFailure]]:
        """Append the tokens to their sequences. Return the ids of these, the tokens, and the rows that failed."""
        seq_ids: list[SeqId] = []
        token_ids: list[int] = []
        failures: list[RowFailure] = []
        for row, token_id, is_valid in zip(rows, sampled.token_ids, sampled.is_valid, strict=True):
            if not is_valid:
                self._sequences.mark_failed(row.seq_id)
                failures.append(
                    RowFailure(row.seq_id, "nan_logits", f"no finite logit at output {row.output_position}")
                )
                continue
            self._sequences.record(step_id, row.seq_id, token_id)
            seq_ids.append(row.seq_id)
            token_ids.append(token_id)
        return seq_ids, token_ids, failures

    def _forward_arguments(self, batch: StepBatch) -> dict[str, Any]:
        return {
            **self._inputs(batch),
            "position_ids": batch.positions,
            "use_cache": False,
            STEP_KEYWORD: ForwardStep(self._attention, self._pool.layers, batch),
        }

    def _inputs(self, batch: StepBatch) -> dict[str, Tensor]:
        """Return the input of the first layer."""
        return {"input_ids": batch.input_ids}

    @property
    def num_sequences(self) -> int:
        return self._sequences.num_sequences


def largest_prefill(num_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int) -> StepPlan:
    """Return the most expensive plan: `num_tokens` tokens in as many rows as may sample, all drawn at random. The first
    row is the last chunk of a sequence of `max_model_len` tokens, so that it attends to as many positions as possible.

    All rows use block 1, so a pool of two blocks is enough. The results mean nothing.
    """
    sampling = RowSampling(1.0, 50, 0.9, 0.0, 0, 0, 0, [])
    num_rows = min(max_num_seqs, num_tokens)
    spare = num_tokens - num_rows
    rows: list[StepRow] = []
    new: list[NewSequence] = []
    for index in range(num_rows):
        num_fed = min(1 + spare, max_model_len)
        spare -= num_fed - 1
        length = num_fed if index else max_model_len
        new.append(NewSequence(SeqId(index), [0] * length, length, sampling))
        blocks = [1] * num_blocks_for(length, block_size)
        rows.append(StepRow(SeqId(index), length - num_fed, num_fed, 0, blocks))
    return StepPlan(StepId(0), 0, 1, rows, new)
