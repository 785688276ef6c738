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
        self._sampler = VocabParallelSampler(model.module.config.vocab_size, topology, peers)
        super().__init__(model, pool, max_num_seqs, samples=topology.is_last_stage, all_logits=self._sampler.gather)
        self._dtype: torch.dtype = getattr(torch, model.facts.dtype)
        self._topology = topology
        self._peers = peers
        self._stage_input = find_stage_input(self._model)
        self._pending: deque[PendingTokens] = deque()
        self._unsent: deque[LaunchedStep] = deque()
        """Steps of the last stage whose tokens it has not sent, the oldest first."""

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        """Run this rank's part of one step. Only the output rank's result has tokens."""
        self._receive_tokens_for(plan)
        self._send_tokens_for(plan)
        launched = super()._launch(plan)
        if launched.output is not None and self._topology.stage > 0:
            self._unsent.append(launched)
            if launched.done is None:
                self._send_oldest()
        return launched

    def _result(self, launched: LaunchedStep) -> StepResult:
        while any(each is launched for each in self._unsent):
            self._send_oldest()
        return super()._result(launched if self._topology.is_output_rank else replace(launched, output=None))

    @property
    def has_idle_work(self) -> bool:
        return False  # ranks capture together, in their steps

    def finish(self) -> None:
        while self._unsent:
            self._send_oldest()
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

    def _draw_greedily(self, peaks: Tensor, token_ids: Tensor) -> Tensor:
        return self._sampler.merge(peaks, token_ids)

    def _draw(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return self._sampler.sample(logits, rows)

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

    def _send_tokens_for(self, plan: StepPlan) -> None:
        """Send the tokens that the stages before this one wait for before they begin the step. Its launch here may wait for
        the device, as a capture does, and the device waits for what these stages send."""
        while any(self._needs(plan, each.plan.micro_batch, each.rows) for each in self._unsent):
            self._send_oldest()

    def _send_oldest(self) -> None:
        launched = self._unsent.popleft()
        if launched.done is not None:
            launched.done.synchronize()
        assert launched.output is not None
        if len(launched.output.token_ids):
            for stage in range(self._topology.stage):
                self._peers.send(launched.output.token_ids, stage)

    def _start_receiving(self, micro_batch: int, rows: SampledRows) -> None:
        if rows.seq_ids:
            token_ids = torch.empty(len(rows.seq_ids), dtype=torch.int64, device="cpu")
            work = self._peers.receive(token_ids, self._topology.pp_size - 1)
            self._pending.append(PendingTokens(micro_batch, rows, token_ids, work))

    def _receive_tokens_for(self, plan: StepPlan) -> None:
        """Wait for the tokens that the step feeds, for those of finished sequences, and for those of all earlier steps."""
        while any(self._needs(plan, each.micro_batch, each.rows) for each in self._pending):
            self._record_oldest()

    def _needs(self, plan: StepPlan, micro_batch: int, rows: SampledRows | None) -> bool:
        """Whether a step begins behind the tokens of these rows of an earlier step."""
        seq_ids = {*plan.finished, *plan.paused, *(row.seq_id for row in plan.rows)}
        return micro_batch == plan.micro_batch or (rows is not None and not seq_ids.isdisjoint(rows.seq_ids))

    def _record_oldest(self) -> None:
        pending = self._pending.popleft()
        pending.work.wait()
        self._sequences.record(pending.rows, *to_device(self._device, [pending.token_ids]))
