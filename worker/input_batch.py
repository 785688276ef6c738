"""The state of each sequence between steps, and the flat batch of a step.

The decode rows that go on are kept as tensors, so a step of such rows alone costs a few tensor operations, however many
there are. Other rows are listed in the plan.

Shapes: S slots, R rows of the step, D of them decode rows that go on, T tokens of all rows one after the other, G groups of
layers, P blocks of one group in the longest row's block table, M rows that yield a token, N prompt tokens with a wanted
log-probability.

    row 0: decode  row 1: decode  row 2: a prompt's chunk
    input_ids       b9             c2             a4 a5 a6 a7
    positions        9              2              4  5  6  7
    query_starts     0              1              2             6 = T
    kv_lens         10              3                       8
    sample_indices   0              1                       5     M = 3, if row 2 reaches its sequence's last token
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from millrace.executor.wire.messages import NO_TOKEN, NULL_BLOCK, NewSequence, SeqId, StepPlan, StepRow
from millrace.worker.errors import PlanError
from millrace.worker.grammars import Grammars
from millrace.worker.kv_pool import num_blocks_for
from millrace.worker.logprobs import ScoredTokens
from millrace.worker.sampling_rows import SamplingRows, SamplingTable
from millrace.worker.transfer import to_device

NO_SLOT = -1
"""The slot of a row without a sequence: the last entry of a tensor that has one entry more than there are slots."""


@dataclass(frozen=True)
class HostBatch:
    """The rows of one step, on the host. The fields are those of `StepBatch` of the same name."""

    tensors: dict[str, Tensor]
    """Those that go to the device, by name."""
    query_starts: list[int]
    kv_lens: list[int]
    sampled: SampledRows
    scored_parts: list[tuple[int, int]]
    """See `ScoredTokens`."""
    is_permuted: bool


@dataclass(frozen=True)
class StepBatch:
    """The rows of one step, flattened. Tensors are on the device, lists on the host."""

    input_ids: Tensor  # [1, T]
    positions: Tensor  # [1, T]
    token_blocks: Tensor  # [T, G] int32, the block of each token
    block_tables: Tensor  # [G, R, P] int32, block 0 past a row's end, and maybe before its window
    sample_indices: Tensor  # [M + N], the tokens whose logits are needed: first those of the rows that yield a token
    query_starts: list[int]
    """R + 1 offsets into the T tokens."""
    kv_lens: list[int]
    """Per row: tokens of its sequence in the KV pool after this step."""
    sampled: SampledRows
    block_size: int
    prompts: ScoredTokens | None = None
    """The tokens of prompts whose log-probabilities are wanted. None: none."""
    is_permuted: bool = False
    """Whether `sample_indices` may be of another order than the tokens, or have some twice."""
    space_for_chunks: int | None = None
    """Space for the chunks of the decode rows, see `attention/triton.py`: in a graph it is the same in every step. None: as
    many as they have."""
    space_for_tiled: int | None = None
    """Rows cut into tiles that a graph has space for. None: it is none, or one of decode rows only."""
    on_host: HostBatch | None = None
    """What it was made of, if a plan was."""
    derived: dict[Any, Any] = field(default_factory=dict)
    """What an attention implementation computes once per step and uses in every layer."""

    @property
    def num_rows(self) -> int:
        return len(self.kv_lens)

    @cached_property
    def slot_mapping(self) -> Tensor:  # [G, T]
        """The slots of the tokens in the tensors of each group."""
        offsets = self.positions[0] % self.block_size
        return (self.token_blocks.long() * self.block_size + offsets.unsqueeze(1)).T.contiguous()


@dataclass(frozen=True)
class SampledRows:
    """The rows of a step that yield a token."""

    seq_ids: list[SeqId]
    slots: Tensor  # [M]
    sampling: SamplingRows
    scored: ScoredTokens | None = None
    """The sampled tokens whose log-probabilities are wanted. None: none."""


@dataclass(slots=True)
class SequenceState:
    """Owns what the worker knows of one sequence."""

    token_ids: list[int]
    """The tokens that came with the plan. The worker keeps only the last one of those that it has sampled since."""
    num_prompt_tokens: int
    slot: int
    """Its row in the tensors that have one for each sequence."""
    prompt_logprobs: int | None = None
    """See `RowSampling`."""
    num_blocks: int = 0
    micro_batch: int | None = None
    """Set while its decode row goes on."""


@dataclass
class DecodeRows:
    """Owns the decode rows of one micro-batch that go on."""

    seq_ids: list[SeqId]
    slots: Tensor  # [D]
    positions: Tensor  # [D], of the token to feed next

    def retain(self, indices: list[int]) -> None:
        """Keep these rows."""
        kept = torch.tensor(indices, dtype=torch.int64, device="cpu")
        self.seq_ids = [self.seq_ids[index] for index in indices]
        self.slots, self.positions = self.slots[kept], self.positions[kept]

    def advance(self, seq_ids: list[SeqId], slots: list[int], positions: list[int]) -> None:
        """Count a step, after which these rows go on too."""
        self.positions = self.positions + 1
        if seq_ids:
            self.seq_ids = self.seq_ids + seq_ids
            self.slots = torch.cat([self.slots, torch.tensor(slots, dtype=torch.int64, device="cpu")])
            self.positions = torch.cat([self.positions, torch.tensor(positions, dtype=torch.int64, device="cpu")])


@dataclass
class ListedRows:
    """The rows that a plan lists, flattened."""

    slots: list[int] = field(default_factory=list)
    kv_lens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])
    """Offsets of the rows' tokens, and one past the end."""
    positions: list[int] = field(default_factory=list)
    token_slots: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """NO_TOKEN stands for the token that the sequence sampled last."""
    sampled_ids: list[SeqId] = field(default_factory=list)
    sampled_slots: list[int] = field(default_factory=list)
    sampled_ends: list[int] = field(default_factory=list)
    sample_offsets: list[int] = field(default_factory=list)
    scored_offsets: list[int] = field(default_factory=list)
    """Offsets of the tokens that precede a scored token of the prompt. The next two fields describe the scored tokens."""
    scored_ids: list[int] = field(default_factory=list)
    scored_parts: list[tuple[int, int]] = field(default_factory=list)


def _no_rows() -> DecodeRows:
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    return DecodeRows([], none, none)


class InputBatch:
    """Owns the state of the running sequences on this rank: tokens, sampling and block tables. All tensors but the sampled
    tokens are on the host."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
        *,
        samples: bool = True,
        grammars: Grammars | None = None,
    ) -> None:
        """`samples`: whether this rank draws the tokens. Others receive them. `grammars`: None for rows without any."""
        self.block_size = block_size
        self.num_groups = num_groups
        self.device = device
        self._sequences: dict[SeqId, SequenceState] = {}
        self._decodes: defaultdict[int, DecodeRows] = defaultdict(_no_rows)
        """By micro-batch."""
        self._free_slots = list(range(max_num_seqs))
        self._tables = torch.zeros(
            max_num_seqs, num_blocks_for(max_model_len, block_size) * num_groups, dtype=torch.int32, device="cpu"
        )
        """[S, P * G], see `KVLayout`. Blocks that the engine has taken back are still there."""
        self._prompt_lens = torch.zeros(max_num_seqs, dtype=torch.int64, device="cpu")
        self._samples = samples
        self._sampling = SamplingTable(max_num_seqs, device, grammars)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        """The token sampled last by slot, NO_TOKEN once a row of the sequence has failed. The last one is NO_SLOT's."""

    @property
    def num_slots(self) -> int:
        """While it stays, so does the address of `last_tokens`."""
        return len(self._prompt_lens)

    def update(self, plan: StepPlan) -> HostBatch | None:
        """Apply the plan's differences and return the rows of its step; None if it has none.

        Raises `PlanError` when the rows are not those that the engine means.
        """
        self._remove(plan)
        self._add(plan.new)
        for seq_id, block_id in plan.new_blocks:
            self._append_blocks(self._sequences[seq_id], [block_id])
        for row in plan.rows:
            self._append_blocks(self._sequences[row.seq_id], row.new_blocks)
        decodes = self._decodes[plan.micro_batch]
        num_tokens = len(decodes.seq_ids) + sum(row.num_tokens for row in plan.rows)
        if num_tokens != plan.num_tokens:
            raise PlanError(f"step {plan.step_id} has {plan.num_tokens} tokens, but this rank has {num_tokens}")
        if num_tokens == 0:
            return None
        return self._batch(plan, decodes)

    def send(self, rows: HostBatch) -> StepBatch:
        """Return the batch of these rows on the device."""
        sampling = rows.sampled.sampling
        sent = dict(zip(rows.tensors, to_device(self.device, rows.tensors.values()), strict=True))
        scored = None
        if sampling.logprobs:
            scored = ScoredTokens(sent["scored_rows"], [(1, num_ids) for _, num_ids in sampling.logprobs])
        prompts = None
        if rows.scored_parts:
            prompts = ScoredTokens(sent["prompt_rows"], rows.scored_parts, sent["prompt_ids"])
        return StepBatch(
            input_ids=self.input_ids(sent["token_slots"], sent.get("known_ids")).unsqueeze(0),
            positions=sent["positions"],
            token_blocks=sent["token_blocks"],
            block_tables=sent["block_tables"],
            sample_indices=sent["sample_indices"],
            query_starts=rows.query_starts,
            kv_lens=rows.kv_lens,
            sampled=SampledRows(rows.sampled.seq_ids, sent["sampled_slots"], sampling, scored),
            block_size=self.block_size,
            prompts=prompts,
            is_permuted=rows.is_permuted,
            on_host=rows,
        )

    def input_ids(self, token_slots: Tensor, known_ids: Tensor | None) -> Tensor:  # [T]
        """Return the tokens that a step feeds, on the device: the known one, or, where that is NO_TOKEN, the last one of the
        slot."""
        sampled = self.last_tokens[token_slots].clamp_(min=0)  # a failed row computes anything
        return sampled if known_ids is None else torch.where(known_ids == NO_TOKEN, sampled, known_ids)

    def record(self, rows: SampledRows, token_ids: Tensor) -> Tensor:
        """Keep the sampled ids [M], on the device, for the rows that feed them. Return them with NO_TOKEN for the rows of
        sequences that had failed before."""
        token_ids = token_ids.masked_fill(self.last_tokens[rows.slots] == NO_TOKEN, NO_TOKEN)
        self.last_tokens[rows.slots] = token_ids
        if rows.sampling.processors is not None:
            rows.sampling.processors.record(token_ids)
        return token_ids

    # --- differences ---

    def _remove(self, plan: StepPlan) -> None:
        """Drop finished sequences, and take out decode rows that do not go on."""
        leaving: list[SequenceState] = []
        for seq_id in plan.finished:
            if (known := self._sequences.pop(seq_id, None)) is not None:
                self._free_slots.append(known.slot)
                self._sampling.remove(known.slot)
                leaving.append(known)
        others = [*plan.paused, *(row.seq_id for row in plan.rows)]
        leaving += [self._sequences[seq_id] for seq_id in others if seq_id in self._sequences]
        changed = {state.micro_batch for state in leaving} - {None}
        for state in leaving:
            state.micro_batch = None
        for number in changed:
            assert number is not None
            rows = self._decodes[number]
            states = (self._sequences.get(seq_id) for seq_id in rows.seq_ids)
            rows.retain([i for i, state in enumerate(states) if state is not None and state.micro_batch == number])

    def _add(self, new: list[NewSequence]) -> None:
        for each in new:
            assert each.seq_id not in self._sequences, f"sequence {each.seq_id} exists already"
            slot = self._take_slot()
            self._sequences[each.seq_id] = SequenceState(
                list(each.token_ids), each.num_prompt_tokens, slot, each.sampling.prompt_logprobs
            )
            self._tables[slot] = NULL_BLOCK
            self._prompt_lens[slot] = each.num_prompt_tokens
            if self._samples:
                self._sampling.add(slot, each)
        if new:
            slots = torch.tensor([self._sequences[each.seq_id].slot for each in new], dtype=torch.int64, device="cpu")
            self.last_tokens.index_fill_(0, to_device(self.device, [slots])[0], 0)

    def _append_blocks(self, sequence: SequenceState, block_ids: list[int]) -> None:
        if block_ids:
            end = sequence.num_blocks + len(block_ids)
            added = torch.tensor(block_ids, dtype=torch.int32, device="cpu")
            self._tables[sequence.slot, sequence.num_blocks : end] = added
            sequence.num_blocks = end

    def _take_slot(self) -> int:
        if not self._free_slots:
            count = self._tables.shape[0]
            self._tables, self._prompt_lens, self.last_tokens = (
                torch.cat([each, torch.zeros_like(each)])
                for each in (self._tables, self._prompt_lens, self.last_tokens)
            )
            self._sampling.grow()
            self._free_slots = list(range(count, 2 * count))
        return self._free_slots.pop()

    # --- the batch ---

    def _batch(self, plan: StepPlan, decodes: DecodeRows) -> HostBatch:
        count, listed = len(decodes.seq_ids), self._list_rows(plan)
        ends = decodes.positions + 1
        positions = _extended(decodes.positions, listed.positions)
        token_slots = _extended(decodes.slots, listed.token_slots)
        tables = self._tables.unflatten(1, (-1, self.num_groups))  # [S, P, G]
        blocks = tables[token_slots, positions // self.block_size]  # [T, G]
        assert bool(blocks.all()), f"step {plan.step_id} has a row without a block for its position"
        kv_lens = ends.tolist() + listed.kv_lens
        width = num_blocks_for(max(kv_lens), self.block_size)
        row_slots = _extended(decodes.slots, listed.slots)
        sampled_slots = _extended(decodes.slots, listed.sampled_slots)
        output_positions = _extended(ends, listed.sampled_ends) - self._prompt_lens[sampled_slots]
        sampling = self._sampling.rows(sampled_slots, output_positions)
        logit_offsets = [count + i for i in listed.sample_offsets + listed.scored_offsets]
        on_host = {
            "token_slots": token_slots,
            "positions": positions.unsqueeze(0),
            "token_blocks": blocks,
            "block_tables": tables[:, :width].index_select(0, row_slots).movedim(2, 0).contiguous(),
            "sample_indices": _extended(torch.arange(count, device="cpu"), logit_offsets),
            "sampled_slots": sampled_slots,
        }
        if listed.token_ids:
            on_host["known_ids"] = torch.tensor([NO_TOKEN] * count + listed.token_ids, dtype=torch.int64, device="cpu")
        if sampling.logprobs:
            scored_rows = [row for row, _ in sampling.logprobs]
            on_host["scored_rows"] = torch.tensor(scored_rows, dtype=torch.int64, device="cpu")
        if listed.scored_parts:
            first, num_scored = len(sampled_slots), len(listed.scored_ids)
            on_host["prompt_rows"] = torch.arange(first, first + num_scored, device="cpu")
            on_host["prompt_ids"] = torch.tensor(listed.scored_ids, dtype=torch.int64, device="cpu")
        batch = HostBatch(
            on_host,
            query_starts=list(range(count)) + [count + offset for offset in listed.offsets],
            kv_lens=kv_lens,
            sampled=SampledRows(decodes.seq_ids + listed.sampled_ids, sampled_slots, sampling),
            scored_parts=listed.scored_parts,
            is_permuted=bool(listed.scored_parts) or any(row.num_tokens == 0 for row in plan.rows),
        )
        decodes.advance(listed.sampled_ids, listed.sampled_slots, listed.sampled_ends)
        return batch

    def _list_rows(self, plan: StepPlan) -> ListedRows:
        """Flatten the plan's own rows. Those that yield a token go on from now on."""
        listed = ListedRows()
        for row in plan.rows:
            state, end = self._sequences[row.seq_id], row.start + row.num_tokens
            num_known = len(state.token_ids)
            assert end <= num_known or row.num_tokens == 1, f"{row}, but {num_known} tokens are known"
            if row.num_tokens > 0:
                listed.slots.append(state.slot)
                listed.kv_lens.append(end)
                listed.positions += range(row.start, end)
                listed.token_slots += [state.slot] * row.num_tokens
                # Behind the known tokens only the device knows the token that was sampled last.
                listed.token_ids += state.token_ids[row.start : end] if end <= num_known else [NO_TOKEN]
                listed.offsets.append(len(listed.positions))
                if state.prompt_logprobs is not None:
                    self._list_scored(state, row, listed)
            if end >= num_known:
                state.micro_batch = plan.micro_batch
                listed.sampled_ids.append(row.seq_id)
                listed.sampled_slots.append(state.slot)
                listed.sampled_ends.append(end)
                listed.sample_offsets.append(len(listed.positions) - 1)  # of a fork: that of the row before it
        return listed

    def _list_scored(self, state: SequenceState, row: StepRow, listed: ListedRows) -> None:
        """List the prompt's tokens that come behind those of a row."""
        token_ids = state.token_ids[row.start + 1 : min(row.start + row.num_tokens + 1, state.num_prompt_tokens)]
        if token_ids and state.prompt_logprobs is not None:
            first = len(listed.positions) - row.num_tokens
            listed.scored_offsets += range(first, first + len(token_ids))
            listed.scored_ids += token_ids
            listed.scored_parts.append((len(token_ids), state.prompt_logprobs))


def _extended(tensor: Tensor, values: list[int]) -> Tensor:
    return torch.cat([tensor, torch.tensor(values, dtype=tensor.dtype, device="cpu")]) if values else tensor
