"""Runs the steps of one of several ranks.

Activations go from stage to stage. The last stage samples the tokens and sends their ids back. An earlier stage runs
the next plan meanwhile. It waits for the ids when a plan feeds them:

    stage 0    step 1   step 2            ids 1   step 3 (feeds the tokens of step 1)
    stage 1             step 1   step 2           ids 2   step 3

So steps of different sequences overlap, and a step that feeds the tokens of another step waits for them. No rank waits
for a plan that it does not have: the receiver knows from its own plan that the other side sends.

Shapes: T tokens of the step, H hidden size, M rows that yield a token, W ids of this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.executor.wire.messages import StepPlan, StepResult
from millrace.worker.input_batch import HostBatch, SampledRows, StepBatch
from millrace.worker.kv_pool import KVPool
from millrace.worker.logprobs import ScoredTokens
from millrace.worker.parallel.peers import Peers
from millrace.worker.parallel.sampler import VocabParallelSampler
from millrace.worker.parallel.stages import find_stage_input
from millrace.worker.parallel.topology import Topology
from millrace.worker.rank_model import RankModel
from millrace.worker.runner import LaunchedStep, Runner, StepOutput
from millrace.worker.sampling_rows import SamplingRows
from millrace.worker.transfer import to_device


@dataclass(frozen=True)
class PendingTokens:
    """The tokens of an earlier step, which the last stage sends."""

    micro_batch: int
    rows: SampledRows
    token_ids: Tensor  # [M], filled when the work is done
    work: dist.Work


class ParallelRunner(Runner):
    """Owns what a `Runner` owns, and the tokens that this stage has to receive from the last stage."""

    def __init__(self, model: RankModel, pool: KVPool, max_num_seqs: int, topology: Topology, peers: Peers) -> None:
        super().__init__(model, pool, max_num_seqs, samples=topology.is_last_stage)
        self._masks_head = False  # its head has a part of the ids
        self._dtype: torch.dtype = getattr(torch, model.facts.dtype)
        self._topology = topology
        self._peers = peers
        self._sampler = VocabParallelSampler(self._model.config.vocab_size, topology, peers)
        self._stage_input = find_stage_input(self._model)
        self._pending: deque[PendingTokens] = deque()

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        """Run this rank's part of one step. Only the output rank's result has tokens."""
        self._receive_tokens_for(plan)
        launched = super()._launch(plan)
        if launched.done is None:
            self._send_tokens(launched.output)
        return launched

    def _result(self, launched: LaunchedStep) -> StepResult:
        if launched.done is not None:
            launched.done.synchronize()  # here and not in the launch, which would wait for the device
            self._send_tokens(launched.output)
        return super()._result(launched if self._topology.is_output_rank else replace(launched, output=None))

    @property
    def has_idle_work(self) -> bool:
        return False  # ranks capture together, in their steps

    def finish(self) -> None:
        while self._pending:
            self._record_oldest()
        self._peers.finish_sends()
        self._received = None
        if self._stage_input is not None:
            self._stage_input.received = None

    def _sample(self, plan: StepPlan, batch: StepBatch) -> StepOutput | None:
        if not self._topology.is_last_stage:
            if self.decoder is None:
                hidden = self._compute_hidden(batch)
            else:
                hidden = self._run_decoder(self.decoder, batch).unsqueeze(0)
                hidden = hidden.clone()  # the next step overwrites them
            self._peers.send(hidden, self._topology.stage + 1)
            self._start_receiving(plan.micro_batch, batch.sampled)
            return None
        return super()._sample(plan, batch)

    def _run(
        self, plan: StepPlan, on_host: HostBatch
    ) -> tuple[StepOutput | None, SampledRows | None, ScoredTokens | None]:
        if not self._topology.is_first_stage:
            self._received = self._receive_hidden(len(on_host.tensors["token_slots"]))
        return super()._run(plan, on_host)

    def _draw_in_graph(self, rows: HostBatch) -> Tensor | None:
        return super()._draw_in_graph(rows) if self._topology.is_last_stage else None

    def _draw_greedily(self, peaks: Tensor, token_ids: Tensor) -> Tensor:
        return self._sampler.merge(peaks, token_ids)

    def _draw(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return self._sampler.sample(logits, rows)

    def _all_logits(self, logits: Tensor) -> Tensor:
        return self._sampler.gather(logits)

    def _inputs(self, batch: StepBatch) -> dict[str, Tensor]:
        if self._stage_input is None or self._received is None:
            return super()._inputs(batch)
        self._stage_input.received = self._received.unsqueeze(0)
        return {"inputs_embeds": self._stage_input.received}

    def _receive_hidden(self, num_tokens: int) -> Tensor:  # [T, H]
        hidden = torch.empty(num_tokens, self._model.config.hidden_size, dtype=self._dtype, device=self._device)
        self._peers.receive(hidden, self._topology.stage - 1).wait()
        return hidden

    # --- the sampled ids, from the last stage to the others ---

    def _send_tokens(self, output: StepOutput | None) -> None:
        """Send what a step of the last stage yields, which is on the host."""
        if output is not None and len(output.token_ids):
            for stage in range(self._topology.stage):
                self._peers.send(output.token_ids, stage)

    def _start_receiving(self, micro_batch: int, rows: SampledRows) -> None:
        if rows.seq_ids:
            token_ids = torch.empty(len(rows.seq_ids), dtype=torch.int64)
            work = self._peers.receive(token_ids, self._topology.pp_size - 1)
            self._pending.append(PendingTokens(micro_batch, rows, token_ids, work))

    def _receive_tokens_for(self, plan: StepPlan) -> None:
        """Wait for the tokens that the step feeds, for those of finished sequences, and for those of all earlier steps."""
        seq_ids = {*plan.finished, *plan.paused, *(row.seq_id for row in plan.rows)}
        while any(
            pending.micro_batch == plan.micro_batch or not seq_ids.isdisjoint(pending.rows.seq_ids)
            for pending in self._pending
        ):
            self._record_oldest()

    def _record_oldest(self) -> None:
        pending = self._pending.popleft()
        pending.work.wait()
        self._sequences.record(pending.rows, *to_device(self._device, [pending.token_ids]))
