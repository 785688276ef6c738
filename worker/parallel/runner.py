"""The steps of a rank that is one of several.

A step's activations go from stage to stage. The last stage draws the tokens and sends their ids back; an earlier stage
goes on with the next plan meanwhile, and takes the ids in when a plan touches the sequences that they belong to:

    stage 0    step 1   step 2            ids 1   step 3 (feeds what step 1 drew)
    stage 1             step 1   step 2           ids 2   step 3

So steps of different sequences overlap, and a step that feeds the last one's tokens waits for them. Nothing here waits
for a plan that has not come: whoever receives knows from its own plan that the other side sends.

Shapes: T tokens of the step, H hidden size, M rows that yield a token, W ids of this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from millrace.executor.wire.messages import SeqId, StepId, StepPlan, StepResult
from millrace.worker.attention.interface import Attention
from millrace.worker.input_batch import SampledRow, StepBatch
from millrace.worker.kv_pool import KVPool
from millrace.worker.parallel.peers import Peers
from millrace.worker.parallel.stages import find_stage_input
from millrace.worker.parallel.topology import Topology
from millrace.worker.parallel.vocabulary import Vocabulary
from millrace.worker.runner import Runner
from millrace.worker.sampler import Sampled

NOT_DRAWN = -1
"""Sent for a row that could not be drawn."""


@dataclass(frozen=True)
class Expected:
    """The tokens of an earlier step, which the last stage draws."""

    step_id: StepId
    rows: list[SampledRow]
    token_ids: Tensor  # [M], filled when the work is done
    work: dist.Work


class ParallelRunner(Runner):
    """Owns, beside what a `Runner` does, the results that this stage still waits for."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: Attention,
        pool: KVPool,
        max_num_seqs: int,
        max_model_len: int,
        topology: Topology,
        peers: Peers,
    ) -> None:
        super().__init__(model, attention, pool, max_num_seqs, max_model_len)
        self._topology = topology
        self._peers = peers
        self._vocabulary = Vocabulary(model.config.vocab_size, topology, peers)
        self._inlet = find_stage_input(model)
        self._expected: deque[Expected] = deque()

    def execute_model(self, plan: StepPlan) -> StepResult:
        """Run this rank's part of one step. Only the output rank's result has tokens."""
        self._take_in({row.seq_id for row in plan.rows} | set(plan.finished))
        result = super().execute_model(plan)
        if self._topology.is_output_rank:
            return result
        return StepResult(plan.step_id, plan.epoch, [], [], [], device_s=result.device_s)

    def finish(self) -> None:
        while self._expected:
            self._record_next()
        self._peers.finish_sends()
        if self._inlet is not None:
            self._inlet.received = None

    def _sample(self, step_id: StepId, batch: StepBatch) -> Sampled | None:
        if not self._topology.is_last_stage:
            self._peers.send(self._compute_hidden(batch), self._topology.stage + 1)
            self._expect(step_id, batch.sampled_rows)
            return None
        sampled = self._vocabulary.sample(self.compute_logits(batch), batch.sampled_rows)
        self._publish(sampled)
        return sampled

    def _compute_hidden(self, batch: StepBatch) -> Tensor:  # [1, T, H]
        hidden: Tensor = self._model.base_model(**self._forward_arguments(batch)).last_hidden_state
        return hidden

    def _inputs(self, batch: StepBatch) -> dict[str, Tensor]:
        if self._inlet is None:
            return super()._inputs(batch)
        shape = (*batch.input_ids.shape, self._model.config.hidden_size)
        buffer = torch.empty(shape, dtype=self._model.dtype, device=batch.input_ids.device)
        self._inlet.received = self._peers.receive(buffer, self._topology.stage - 1)
        return {"inputs_embeds": buffer}

    # --- the sampled ids on their way back ---

    def _publish(self, sampled: Sampled) -> None:
        pairs = zip(sampled.token_ids, sampled.is_valid, strict=True)
        token_ids = torch.tensor([token_id if is_valid else NOT_DRAWN for token_id, is_valid in pairs])
        for stage in range(self._topology.stage if len(token_ids) else 0):
            self._peers.send(token_ids, stage)

    def _expect(self, step_id: StepId, rows: list[SampledRow]) -> None:
        if rows:
            token_ids = torch.empty(len(rows), dtype=torch.int64)
            work = self._peers.expect(token_ids, self._topology.pp_size - 1)
            self._expected.append(Expected(step_id, rows, token_ids, work))

    def _take_in(self, seq_ids: set[SeqId]) -> None:
        """Wait for the tokens of these sequences, and for all that come before them."""
        while any(row.seq_id in seq_ids for expected in self._expected for row in expected.rows):
            self._record_next()

    def _record_next(self) -> None:
        expected = self._expected.popleft()
        expected.work.wait()
        token_ids = expected.token_ids.tolist()
        self._record(expected.step_id, expected.rows, Sampled(token_ids, [each != NOT_DRAWN for each in token_ids]))
