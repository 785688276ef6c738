"""Runs steps: makes a batch of a plan, computes its logits, samples tokens from them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import (
    NO_TOKEN,
    NewSequence,
    RowFailure,
    RowSampling,
    SeqId,
    StepId,
    StepPlan,
    StepResult,
    StepRow,
)
from millrace.worker.attention.interface import STEP_KEYWORD, ForwardStep
from millrace.worker.errors import PlanError, StepSkipped, is_out_of_memory
from millrace.worker.fusion.decoder import FusedDecoder
from millrace.worker.input_batch import HostBatch, InputBatch, SampledRows, StepBatch
from millrace.worker.kv_pool import KVPool, num_blocks_for
from millrace.worker.logprobs import ScoredTokens, head_logits
from millrace.worker.rank_model import RankModel
from millrace.worker.sampler import sample, without_failed
from millrace.worker.sampling_rows import SamplingRows
from millrace.worker.transfer import record_event, reserve_pinned, to_host

if TYPE_CHECKING:
    from millrace.worker.graphs import StepGraphs

logger = logging.getLogger("millrace.worker")


@dataclass(frozen=True)
class StepOutput:
    """What a step yields. Log-probabilities are records, see `ScoredTokens`; None where none are wanted."""

    token_ids: Tensor  # [M]
    logprobs: Tensor | None = None
    prompt_logprobs: Tensor | None = None

    def to_host(self) -> StepOutput:
        """Start the copy to the host."""
        logprobs, prompt_logprobs = (
            None if each is None else to_host(each) for each in (self.logprobs, self.prompt_logprobs)
        )
        return StepOutput(to_host(self.token_ids), logprobs, prompt_logprobs)


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose result has not been collected."""

    plan: StepPlan
    rows: SampledRows | None
    """None if this rank samples no tokens."""
    prompts: ScoredTokens | None
    output: StepOutput | None
    """On the host, filled when `done` has happened. None if this rank returns no tokens."""
    done: torch.cuda.Event | None
    """None on a CPU, which has computed the step already."""
    began: torch.cuda.Event | None
    host_s: float
    """Duration of the launch, which on a CPU is that of the step."""

    def is_ready(self) -> bool:
        """Whether `result` would not wait. After an error of the device it raises that error at once."""
        try:
            return self.done is None or self.done.query()
        except RuntimeError:
            return True

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        device_s = self.host_s
        if self.done is not None and self.began is not None:
            self.done.synchronize()
            device_s = self.began.elapsed_time(self.done) / 1000
        rows, prompts, output = self.rows, self.prompts, self.output
        if rows is None or output is None:
            return StepResult(self.plan.step_id, self.plan.epoch, [], device_s=device_s)
        token_ids = output.token_ids.tolist()
        for index in rows.sampling.processors.rows_to_fail() if rows.sampling.processors else ():
            token_ids[index] = NO_TOKEN
        return StepResult(
            self.plan.step_id,
            self.plan.epoch,
            token_ids,
            [_failure(rows, index) for index, token_id in enumerate(token_ids) if token_id == NO_TOKEN],
            device_s,
            rows.scored.pack(output.logprobs) if rows.scored and output.logprobs is not None else [],
            prompts.pack(output.prompt_logprobs) if prompts and output.prompt_logprobs is not None else [],
        )


def _failure(rows: SampledRows, index: int) -> RowFailure:
    position = int(rows.sampling.output_positions[index])
    if rows.sampling.processors is not None and (reason := rows.sampling.processors.failure(index)) is not None:
        message = f"the form of the output allows no token at output {position}: {reason}"
        return RowFailure(rows.seq_ids[index], "invalid_request", message)
    message = f"no finite logit, or no token that is allowed, at output {position} or before it"
    return RowFailure(rows.seq_ids[index], "nan_logits", message)


class Runner:
    """Owns what a step changes: the sequences on this rank and the contents of the KV pool."""

    def __init__(
        self,
        model: RankModel,
        pool: KVPool,
        max_num_seqs: int,
        *,
        samples: bool = True,
        all_logits: Callable[[Tensor], Tensor] = lambda logits: logits,
    ) -> None:
        """`samples`: whether this rank draws the tokens. `all_logits`: returns the logits of all ids, where this rank has
        those of a part. It must not refer to this object: the graphs keep it, and in a cycle the pool would outlive both."""
        self._samples, self._all_logits = samples, all_logits
        self._model = model.module
        self._attention = model.attention
        self._pool = pool
        self.decoder = FusedDecoder(model.decoder, pool) if model.decoder else None
        """Computes the forward pass. None: the model's modules do."""
        self._masks_head = self.decoder is not None and self.decoder.has_argmax and model.is_alone
        """Whether the head applies the masks of grammars, so that no logits are stored: if it has all ids."""
        self._device = self._model.device
        if self._device.type == "cuda":
            reserve_pinned()
        self._sequences = InputBatch(
            max_num_seqs,
            model.facts.max_model_len,
            pool.block_size,
            pool.num_groups,
            self._device,
            samples=samples,
            grammars=model.grammars,
        )
        self._states = model.states or None
        if self._states is not None:
            self._states.allocate(max_num_seqs)
            logger.info("states of recurrent layers: %.1f MiB", self._states.num_bytes() / 2**20)
        self._graphs = self._make_graphs(model, max_num_seqs)
        self._received: Tensor | None = None
        """The hidden states [T, H] from the stage before this one, if there is one."""
        self._launched: deque[LaunchedStep] = deque()
        self._has_failed = False
        """Whether a step has failed, and the engine may not know it yet."""

    def _make_graphs(self, model: RankModel, max_num_seqs: int) -> StepGraphs | None:
        """Return what runs steps as graphs, where Triton runs all that they need on a GPU."""
        if self.decoder is None or self._device.type != "cuda" or not model.uses_graphs:
            return None
        from millrace.worker.attention.triton import TritonAttention
        from millrace.worker.capture import CudaCapture
        from millrace.worker.graphs import StepGraphs

        assert isinstance(model.attention, TritonAttention)
        return StepGraphs(
            *(self.decoder, model.attention, self._sequences, max_num_seqs, model.facts.kv_layout.max_step_tokens),
            table_width=num_blocks_for(model.facts.max_model_len, self._pool.block_size),
            capture=CudaCapture(),
            all_logits=self._all_logits,
            is_alone=model.is_alone,
            decodes_only=self._states is not None,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Begin one step. On a CPU it is computed here. Raises `PlanError`, `StepSkipped`, and torch's own error when memory
        runs out."""
        if plan.depth == 1:
            self._has_failed = False
            self._launched.clear()
        if self._has_failed:
            raise StepSkipped(f"step {plan.step_id} was planned before the failure of an earlier step was known")
        if self._pool.host is None and (plan.swap_out or plan.swap_in):
            raise PlanError("there is no host memory tier: swap_out and swap_in must be empty")
        self._has_failed = True
        decoder = self.decoder
        num_buffers_made = decoder.num_buffers_made if decoder is not None else 0
        try:
            self._launched.append(self._launch(plan))
        except Exception as error:
            if decoder is not None and decoder.num_buffers_made != num_buffers_made and is_out_of_memory(error):
                decoder.release_buffers()  # or those that this step has enlarged would stay
            raise
        self._has_failed = False

    def collect(self) -> StepResult:
        """Wait for the oldest step that was launched, and return its result."""
        if not self._launched:
            raise StepSkipped("an earlier step has failed")
        try:
            return self._result(self._launched.popleft())
        except Exception:
            self._has_failed = True
            # The frames of the error own them, see `executor/rank/lost_device.py`.
            _others, self._launched = self._launched, deque()
            raise

    def _result(self, launched: LaunchedStep) -> StepResult:
        return launched.result()

    def is_result_ready(self) -> bool:
        """Whether `collect` would return at once."""
        return not self._launched or self._launched[0].is_ready()

    @property
    def has_idle_work(self) -> bool:
        """Whether graphs are missing that most steps need."""
        return self._graphs is not None and not self._graphs.is_complete

    @torch.inference_mode()
    def do_idle_work(self) -> None:
        """Capture one of these graphs."""
        assert self._graphs is not None
        self._graphs.capture_next()

    @torch.inference_mode()
    def compute_logits(self, batch: StepBatch) -> Tensor:
        """Run the forward pass: fill the batch's slots of the KV pool, return logits [rows that sample, vocabulary]."""
        if self.decoder is not None:
            return self.decoder.logits(self._run_decoder(self.decoder, batch))[: len(batch.sample_indices)]
        output = self._model(**self._forward_arguments(batch), logits_to_keep=batch.sample_indices)
        logits: Tensor = output.logits[0]
        return logits

    def finish(self) -> None:
        """Wait for transfers of earlier steps and release their tensors. One rank has none."""

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        if self._pool.host is not None:
            self._pool.host.swap_out(plan.swap_out)
            self._pool.host.swap_in(plan.swap_in)
        on_host = self._sequences.update(plan)
        began_s, began = time.perf_counter(), self._record_event()
        output, rows, prompts = self._run(plan, on_host) if on_host is not None else (None, None, None)
        self._pool.copy_blocks(plan.copy)
        output = output.to_host() if output is not None else None
        return LaunchedStep(plan, rows, prompts, output, self._record_event(), began, time.perf_counter() - began_s)

    def _run(
        self, plan: StepPlan, on_host: HostBatch
    ) -> tuple[StepOutput | None, SampledRows | None, ScoredTokens | None]:
        """Run the rows of a step. Return what they yield, its rows, and its prompts; None if another rank samples."""
        if self._states is not None:
            self._states.allocate(self._sequences.num_slots)
        if self._graphs is not None and self._samples:
            token_ids = self._graphs.draw(on_host, self._received)
            if token_ids is not None:
                return StepOutput(token_ids), on_host.sampled, None
        if self._states is not None:
            self._states.begin(on_host)
        batch = self._sequences.send(on_host)
        output = self._sample(plan, batch)
        return (output, batch.sampled, batch.prompts) if output is not None else (None, None, None)

    def _sample(self, plan: StepPlan, batch: StepBatch) -> StepOutput | None:
        """Run the batch. Return what it yields, or None if another rank samples."""
        if batch.prompts is not None:
            return self._sample_and_score_prompts(batch, batch.prompts)
        sampled, decoder = batch.sampled, self.decoder
        if decoder is None or not decoder.has_argmax or not self._is_greedy(sampled):
            return self._sample_from(self.compute_logits(batch), sampled)
        hidden, processors = self._run_decoder(decoder, batch), sampled.sampling.processors
        masks = processors.grammar_masks() if processors is not None else None
        token_ids = self._draw_greedily(*decoder.argmax(hidden, masks))
        return StepOutput(self._sequences.record(sampled, token_ids))

    def _is_greedy(self, rows: SampledRows) -> bool:
        """Whether there are rows, and the largest logit of each is all that is needed of the head."""
        is_greedy = rows.sampling.is_plain_greedy or (self._masks_head and rows.sampling.is_masked_greedy)
        return is_greedy and rows.scored is None and bool(rows.seq_ids)

    def _run_decoder(self, decoder: FusedDecoder, batch: StepBatch) -> Tensor:  # [M or more, H]
        rows, received = batch.on_host, self._received
        hidden = self._graphs.forward(rows, received) if self._graphs is not None and rows is not None else None
        return decoder.run(batch, received) if hidden is None else hidden

    def _sample_and_score_prompts(self, batch: StepBatch, prompts: ScoredTokens) -> StepOutput:
        if self.decoder is not None:
            hidden = self._run_decoder(self.decoder, batch)
        else:
            hidden = self._compute_hidden(batch)[0, batch.sample_indices]
        output = self._sample_from(self._head_logits(hidden[: len(batch.sampled.seq_ids)]), batch.sampled)
        hidden = hidden[prompts.rows]
        assert prompts.token_ids is not None
        records = prompts.records(lambda part: self._all_logits(self._head_logits(hidden[part])), prompts.token_ids)
        return replace(output, prompt_logprobs=records)

    def _sample_from(self, logits: Tensor, rows: SampledRows) -> StepOutput:
        """Draw one token for each row of logits [M, V], and record it."""
        if rows.scored is None:
            return StepOutput(self._sequences.record(rows, self._draw(logits, rows.sampling)))
        raw = self._all_logits(logits[rows.scored.rows])  # the sampler may change the logits
        token_ids = self._sequences.record(rows, self._draw(logits, rows.sampling))
        records = rows.scored.records(raw.__getitem__, token_ids[rows.scored.rows].clamp(min=0))
        return StepOutput(token_ids, records)

    def _draw_greedily(self, peaks: Tensor, token_ids: Tensor) -> Tensor:  # [M]
        """Return the ids [M] with the largest logits of all ranks. `peaks` [M]: the largest ones of this rank, whose ids are
        `token_ids` [M]. NO_TOKEN where the largest one is NaN or infinite."""
        return without_failed(peaks, token_ids)

    def _draw(self, logits: Tensor, rows: SamplingRows) -> Tensor:  # [M]
        return sample(logits, rows)

    def _head_logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden) if self.decoder is not None else head_logits(self._model, hidden)

    def _compute_hidden(self, batch: StepBatch) -> Tensor:  # [1, T, H]
        hidden: Tensor = self._model.base_model(**self._forward_arguments(batch)).last_hidden_state
        return hidden

    def _record_event(self) -> torch.cuda.Event | None:
        return record_event(self._device, enable_timing=True)

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


def largest_prefill(layout: KVLayout, max_num_seqs: int, longest: int) -> StepPlan:
    """Return the most expensive plan: the most tokens of a step in as many rows as may sample, all drawn at random. The
    first row is the last chunk of a sequence of `longest` tokens, so that it attends to as many positions as possible.

    All rows use block 1, so a pool of two blocks is enough. The results mean nothing.
    """
    sampling = RowSampling(1.0, 50, 0.9, 0.0, 0, 0, 0, [])
    num_tokens = layout.max_step_tokens
    num_rows = min(max_num_seqs, num_tokens)
    spare = num_tokens - num_rows
    rows: list[StepRow] = []
    new: list[NewSequence] = []
    for index in range(num_rows):
        num_fed = min(1 + spare, longest)
        spare -= num_fed - 1
        length = num_fed if index else longest
        new.append(NewSequence(SeqId(index), [0] * length, length, sampling))
        blocks = [1] * layout.num_columns(length) * layout.num_groups
        rows.append(StepRow(SeqId(index), length - num_fed, num_fed, blocks))
    return StepPlan(StepId(0), 0, 1, sum(row.num_tokens for row in rows), num_rows, rows, new)


def largest_decode(layout: KVLayout, max_num_seqs: int) -> list[StepPlan]:
    """Return two steps behind `largest_prefill`. The first one replaces its sequences by short ones, the second one is a
    decode step of as many rows as there may be, for which a graph is captured."""
    count = min(max_num_seqs, layout.max_step_tokens)
    seq_ids = [SeqId(index) for index in range(count)]
    rows = [StepRow(seq_id, 0, 1, [1] * layout.num_columns(2) * layout.num_groups) for seq_id in seq_ids]
    new = [NewSequence(seq_id, [0], 1, RowSampling(1.0, 50, 0.9, 0.0, 0, 0, 0, [])) for seq_id in seq_ids]
    return [
        StepPlan(StepId(1), 0, 1, count, count, rows, new, finished=seq_ids),
        StepPlan(StepId(2), 0, 1, count, count),
    ]
