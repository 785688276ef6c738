"""The state of each sequence between steps, and the flat batch that is made of a plan.

Shapes: R rows of the step, T tokens of all rows one after the other, P blocks in the longest row's block table, M rows
that yield a token.

    row 0: a prompt's chunk        row 1: decode  row 2: decode
    input_ids       a4 a5 a6 a7    b9             c2
    positions        4  5  6  7     9              2
    query_starts     0              4              5              6 = T
    kv_lens                  8             10              3
    sample_indices           3              4              5     M = 3, if row 0 reaches its sequence's last token
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from millrace.executor.wire.messages import RowSampling, SeqId, StepId, StepPlan, StepRow
from millrace.worker.kv_pool import num_blocks_for


class SampledRow(NamedTuple):
    """A row that yields a token."""

    seq_id: SeqId
    sampling: RowSampling
    output_position: int


@dataclass(frozen=True)
class StepBatch:
    """The rows of one step, flattened. Tensors are on the device, lists on the host."""

    input_ids: Tensor  # [1, T]
    positions: Tensor  # [1, T]
    slot_mapping: Tensor  # [T]
    block_tables: Tensor  # [R, P], block 0 past a row's end
    sample_indices: Tensor  # [M]
    query_starts: list[int]
    """R + 1 offsets into the T tokens."""
    kv_lens: list[int]
    """Per row: tokens of its sequence in the KV pool after this step."""
    sampled_rows: list[SampledRow]
    derived: dict[Any, Any] = field(default_factory=dict)
    """What an attention implementation computes once per step and uses in every layer."""

    @property
    def num_rows(self) -> int:
        return len(self.kv_lens)


@dataclass(slots=True)
class SequenceState:
    """Owns what the worker knows of one sequence."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: RowSampling
    slot: int
    """Row of the block table matrix."""
    num_blocks: int = 0
    sampled_by: StepId | None = None
    """The last step that sampled a token for it."""
    is_failed: bool = False
    """A step had no valid token for it. Rows of plans that were sent before the engine knew are not run."""


class InputBatch:
    """Owns the state of the running sequences on this rank: token ids, sampling and block tables."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._sequences: dict[SeqId, SequenceState] = {}
        self._tables = torch.zeros(max_num_seqs, num_blocks_for(max_model_len, block_size), dtype=torch.int64)
        self._free_slots = list(range(max_num_seqs))

    def update(self, plan: StepPlan) -> list[SeqId]:
        """Apply the plan's differences. Return the sequences whose rows cannot run because an earlier step failed."""
        # Finished before new: a preempted sequence comes back under its old id, possibly in the same plan.
        for seq_id in plan.finished:
            if (known := self._sequences.pop(seq_id, None)) is not None:
                self._free_slots.append(known.slot)
        for new in plan.new:
            assert new.seq_id not in self._sequences, f"sequence {new.seq_id} exists already"
            slot = self._take_slot()
            state = SequenceState(list(new.token_ids), new.num_prompt_tokens, new.sampling, slot)
            self._sequences[new.seq_id] = state
        for row in plan.rows:
            self._update_row(plan.step_id, row)
        return [row.seq_id for row in plan.rows if self._sequences[row.seq_id].is_failed]

    def batch(self, plan: StepPlan) -> StepBatch | None:
        """Flatten the rows of a plan that `update` has applied. None if no row can run."""
        rows = [row for row in plan.rows if not self._sequences[row.seq_id].is_failed]
        if not rows:
            return None
        input_ids: list[int] = []
        positions: list[int] = []
        row_of_token: list[int] = []
        query_starts = [0]
        sample_indices: list[int] = []
        sampled_rows: list[SampledRow] = []
        for index, row in enumerate(rows):
            sequence = self._sequences[row.seq_id]
            end = row.start + row.num_tokens
            input_ids += sequence.token_ids[row.start : end]
            positions += range(row.start, end)
            row_of_token += [index] * row.num_tokens
            query_starts.append(len(input_ids))
            if row.samples:
                sample_indices.append(len(input_ids) - 1)
                sampled_rows.append(SampledRow(row.seq_id, sequence.sampling, end - sequence.num_prompt_tokens))
        block_tables = self._block_tables(rows)
        return StepBatch(
            input_ids=self._to_device(torch.tensor([input_ids])),
            positions=self._to_device(torch.tensor([positions])),
            slot_mapping=self._to_device(
                self._slots(block_tables, torch.tensor(row_of_token), torch.tensor(positions))
            ),
            block_tables=self._to_device(block_tables),
            sample_indices=self._to_device(torch.tensor(sample_indices, dtype=torch.int64)),
            query_starts=query_starts,
            kv_lens=[row.start + row.num_tokens for row in rows],
            sampled_rows=sampled_rows,
        )

    def record(self, step_id: StepId, seq_id: SeqId, token_id: int) -> None:
        """Append the token that a step sampled. Later rows may feed it."""
        sequence = self._sequences[seq_id]
        sequence.token_ids.append(token_id)
        sequence.sampled_by = step_id

    def mark_failed(self, seq_id: SeqId) -> None:
        """Stop running the rows of a sequence, until a plan lists it in `finished`."""
        self._sequences[seq_id].is_failed = True

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def _update_row(self, step_id: StepId, row: StepRow) -> None:
        sequence = self._sequences[row.seq_id]
        self._append_blocks(sequence, row.new_blocks)
        if sequence.is_failed:
            return
        end = row.start + row.num_tokens
        assert row.num_tokens > 0 and end <= len(sequence.token_ids), f"{row} feeds unknown tokens"
        assert end <= sequence.num_blocks * self._block_size, f"{row} has no block for position {end - 1}"
        assert row.samples == (end == len(sequence.token_ids)), f"{row}, but {len(sequence.token_ids)} tokens are known"
        if row.input_lag > 0:
            assert sequence.sampled_by == step_id - row.input_lag, f"{row} of step {step_id}: {sequence.sampled_by=}"
            assert end == len(sequence.token_ids), f"{row} does not feed the token sampled last"

    def _append_blocks(self, sequence: SequenceState, block_ids: list[int]) -> None:
        if not block_ids:
            return
        end = sequence.num_blocks + len(block_ids)
        self._tables[sequence.slot, sequence.num_blocks : end] = torch.tensor(block_ids)
        sequence.num_blocks = end

    def _take_slot(self) -> int:
        if not self._free_slots:
            count = self._tables.shape[0]
            self._tables = torch.cat([self._tables, torch.zeros_like(self._tables)])
            self._free_slots = list(range(count, 2 * count))
        slot = self._free_slots.pop()
        self._tables[slot] = 0
        return slot

    def _block_tables(self, rows: list[StepRow]) -> Tensor:  # [R, P]
        slots = torch.tensor([self._sequences[row.seq_id].slot for row in rows])
        longest = max(row.start + row.num_tokens for row in rows)
        return self._tables[slots, : num_blocks_for(longest, self._block_size)]

    def _slots(self, block_tables: Tensor, row_of_token: Tensor, positions: Tensor) -> Tensor:  # [T]
        blocks = block_tables[row_of_token, positions // self._block_size]
        return blocks * self._block_size + positions % self._block_size

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
