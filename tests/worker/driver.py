"""A test double for the engine's scheduler: drives one worker with random step plans.

Chunks of odd sizes, any mix of prefill and decode in a step, blocks in random order, those behind sliding windows given to
others, decode rows that go on, pause and are listed again, and preemptions (finished, and new again with the tokens so far,
sometimes in the same plan). Of requests with the same tokens one is computed, and the others fork from it.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from millrace.executor.wire.messages import (
    NO_TOKEN,
    NULL_BLOCK,
    ModelFacts,
    NewSequence,
    RowSampling,
    SeqId,
    StepId,
    StepPlan,
    StepResult,
    StepRow,
    WorkerConfig,
    record_bytes,
)
from millrace.worker.input_batch import StepBatch
from millrace.worker.linear.packed import RowMasks
from millrace.worker.rank import Rank

GREEDY = RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [])
BLOCK_SIZE = 4
NUM_BLOCKS = 200


def start_worker(model: Path, **options: object) -> Rank:
    """A rank with its KV pool, ready for steps of epoch 1."""
    settings = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "max_num_seqs": 4, "device": "cpu"} | options
    worker = Rank(0, 1, 1, WorkerConfig(model=str(model), **settings))  # type: ignore[arg-type]
    worker.start(lambda _: None)
    worker.initialize_cache(*worker.determine_num_available_blocks())
    return worker


def num_sequences(worker: Rank) -> int:
    """Sequences whose state the rank holds."""
    return len(worker.runner._sequences._sequences) if worker.runner is not None else 0


def pool_bytes(worker: Rank) -> int:
    """Bytes of the KV pool on the device."""
    return worker._pool.num_bytes() if worker._pool is not None else 0


def host_tier_bytes(worker: Rank) -> int:
    return worker._pool.host.num_bytes() if worker._pool is not None and worker._pool.host is not None else 0


@dataclass
class Request:
    seq_id: SeqId
    prompt: list[int]
    sampling: RowSampling
    output: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    """Per output token, the logits [V] that it was drawn from."""
    records: list[bytes] = field(default_factory=list)
    """Per output token its log-probability record, if the request wants them."""
    prompt_records: bytearray = field(default_factory=bytearray)
    """The records of the prompt's tokens but the first."""
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_known: bool = False
    goes_on: bool = False
    """Whether its decode row goes on, as far as the worker knows."""
    failure: str | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Steps(Protocol):
    """What runs steps: a worker, or a group of ranks."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...


class Group(Steps, Protocol):
    """What a driver needs of a group of ranks."""

    facts: list[ModelFacts]


def execute(worker: Steps, plan: StepPlan) -> StepResult:
    """Run one step."""
    worker.launch(plan)
    return worker.collect()


class Driver:
    """Owns the free blocks and the requests' progress."""

    def __init__(
        self,
        worker: Rank | Group,
        seed: int,
        *,
        preempts: bool = True,
        num_blocks: int = NUM_BLOCKS,
        keeps_logits: bool = True,
    ) -> None:
        """`keeps_logits`: a worker's steps are eager then, since those of graphs show no logits."""
        self._worker = worker
        self._random = random.Random(seed)
        self._preempts = preempts
        self._step_id = 0
        self._layout = (worker._model.facts if isinstance(worker, Rank) else worker.facts[0]).kv_layout
        self._free = list(range(1, num_blocks))
        self._random.shuffle(self._free)
        self._users: Counter[int] = Counter()
        """Block tables that hold a block."""
        self.num_preemptions = self.num_forks = 0
        self._members: list[Request] = []
        """Those with a decode row that goes on, in the order of the rows."""
        self._captured: list[tuple[SeqId, Tensor]] = []
        if isinstance(worker, Rank) and keeps_logits:
            self._capture_logits(worker)

    def run(
        self, prompts: list[list[int]], max_tokens: int, sampling: list[RowSampling] | None = None
    ) -> list[Request]:
        """Generate `max_tokens` for each prompt."""
        given = sampling or [GREEDY] * len(prompts)
        requests = [Request(SeqId(i), prompt, given[i]) for i, prompt in enumerate(prompts)]
        while running := [r for r in requests if len(r.output) < max_tokens and r.failure is None]:
            self._step(running)
        self.execute(StepPlan(self._next_id(), 1, 1, 0, 0, finished=[r.seq_id for r in requests if r.is_known]))
        return requests

    def execute(self, plan: StepPlan) -> StepResult:
        return execute(self._worker, plan)

    def _step(self, running: list[Request]) -> None:
        chosen = self._random.sample(running, self._random.randint(1, len(running)))
        chosen = [r for r in chosen if r.is_known or all(r.tokens != one.tokens for one in running[: running.index(r)])]
        finished = [self._preempt(r) for r in running if self._preempts and r.is_known and self._random.random() < 0.05]
        paused = [r for r in self._members if r.is_known and (r not in chosen or self._random.random() < 0.3)]
        for request in paused:
            request.goes_on = False
        going_on = [r for r in self._members if r.goes_on and r in chosen]
        listed = [request for request in chosen if request not in going_on]
        new: list[NewSequence] = []
        for request in listed:
            if not request.is_known:
                request.is_known = True
                new.append(NewSequence(request.seq_id, request.tokens, len(request.prompt), request.sampling))
        new_blocks = [(r.seq_id, block_id) for r in going_on for block_id in self._feed(r, 1)]
        rows: list[StepRow] = []
        copy: list[tuple[int, int]] = []
        sampled = list(going_on)
        for request in listed:
            rows.append(self._row(request))
            if request.num_computed == len(request.tokens):
                forks = [each for each in running if not each.is_known and each.tokens == request.tokens]
                sampled += [request, *forks]
                new += [NewSequence(each.seq_id, each.tokens, len(each.prompt), each.sampling) for each in forks]
                rows += [self._fork(each, request, copy) for each in forks]
        plan = StepPlan(
            self._next_id(),
            1,
            1,
            len(going_on) + sum(row.num_tokens for row in rows),
            len(sampled),
            rows,
            new,
            finished,
            [request.seq_id for request in paused],
            new_blocks,
            copy=copy,
        )
        result = self.execute(plan)
        by_id = {request.seq_id: request for request in running}
        self._keep_prompt_records(result, [(by_id[row.seq_id], row) for row in rows])
        self._apply(result, sampled)

    def _row(self, request: Request) -> StepRow:
        start = request.num_computed
        count = self._random.randint(1, min(len(request.tokens) - start, 13))
        return StepRow(request.seq_id, start, count, self._feed(request, count))

    def _fork(self, request: Request, source: Request, copy: list[tuple[int, int]]) -> StepRow:
        num_full = len(request.tokens) // self._layout.block_size * self._layout.num_groups
        request.blocks = source.blocks[:num_full]
        self._users.update(request.blocks)
        for block_id in source.blocks[num_full:]:
            request.blocks.append(self._take())
            copy.append((block_id, request.blocks[-1]))
        request.num_computed, request.is_known = len(request.tokens), True
        self.num_forks += 1
        return StepRow(request.seq_id, request.num_computed, 0, list(request.blocks))

    def _take(self) -> int:
        block_id = self._free.pop()
        self._users[block_id] += 1
        return block_id

    def _give_back(self, blocks: list[int]) -> None:
        for block_id in blocks:
            self._users[block_id] -= 1
            if block_id != NULL_BLOCK and self._users[block_id] == 0:
                self._free.append(block_id)

    def _feed(self, request: Request, count: int) -> list[int]:
        """Count tokens as computed. Return the new blocks that they need."""
        layout = self._layout
        for group, window in enumerate(layout.windows):
            if window is not None:
                for column in range(layout.num_hidden_columns(window, request.num_computed)):
                    entry = column * layout.num_groups + group
                    self._give_back([request.blocks[entry]])
                    request.blocks[entry] = NULL_BLOCK
        self._random.shuffle(self._free)
        request.num_computed += count
        num_new = layout.num_columns(request.num_computed) * layout.num_groups - len(request.blocks)
        new_blocks = [self._take() for _ in range(num_new)]
        request.blocks += new_blocks
        return new_blocks

    def _preempt(self, request: Request) -> SeqId:
        self.num_preemptions += 1
        self._give_back(request.blocks)
        self._random.shuffle(self._free)
        request.blocks = []
        request.num_computed = 0
        request.is_known = request.goes_on = False
        return request.seq_id

    def _keep_prompt_records(self, result: StepResult, rows: list[tuple[Request, StepRow]]) -> None:
        wanted = [
            (request, row, record_bytes(request.sampling.prompt_logprobs))
            for request, row in rows
            if request.sampling.prompt_logprobs is not None and row.start < len(request.prompt) - 1
        ]
        for (request, row, size), records in zip(wanted, result.prompt_logprobs, strict=True):
            assert len(records) == size * min(row.num_tokens, len(request.prompt) - 1 - row.start)
            request.prompt_records[row.start * size : row.start * size + len(records)] = records

    def _apply(self, result: StepResult, sampled: list[Request]) -> None:
        by_id = {request.seq_id: request for request in sampled}
        for failure in result.failures:
            by_id[failure.seq_id].failure = failure.kind
        scored = [request for request in sampled if request.sampling.logprobs is not None]
        for request, record in zip(scored, result.logprobs, strict=True):
            request.records.append(record)
        for request, token_id in zip(sampled, result.token_ids, strict=True):
            if token_id != NO_TOKEN:
                request.output.append(token_id)
            request.goes_on = True
        self._members = sampled
        for seq_id, logits in self._captured:
            by_id[seq_id].logits.append(logits)
        self._captured.clear()

    def _next_id(self) -> StepId:
        self._step_id += 1
        return StepId(self._step_id)

    def _capture_logits(self, worker: Rank) -> None:
        runner = worker.runner
        assert runner is not None
        runner._graphs = None
        compute = type(runner).compute_logits

        def compute_and_keep(batch: StepBatch) -> Tensor:
            logits = compute(runner, batch)
            kept = logits.detach().float().cpu().clone()
            self._captured += [(seq_id, kept[i]) for i, seq_id in enumerate(batch.sampled.seq_ids)]
            return logits

        runner.compute_logits = compute_and_keep  # type: ignore[method-assign]
        decoder = runner.decoder
        if decoder is None:
            return
        run, argmax = decoder.run, decoder.argmax

        def run_and_keep(batch: StepBatch, received: Tensor | None = None) -> Tensor:
            self._batch = batch
            return run(batch, received)

        def check_argmax(hidden: Tensor, masks: RowMasks | None = None) -> tuple[Tensor, Tensor]:
            """A greedy step stores no logits."""
            peaks, token_ids = argmax(hidden, masks)
            logits = decoder.logits(hidden)
            if masks is not None:
                bits = masks.bits.unsqueeze(-1) >> torch.arange(8) & 1
                logits[masks.rows] += bits.flatten(1)[:, : logits.shape[1]].log()
            kept = logits.detach().float().cpu().clone()
            assert torch.equal(peaks.cpu(), kept.amax(dim=-1)) and torch.equal(token_ids.cpu(), kept.argmax(dim=-1))
            self._captured += [(seq_id, kept[i]) for i, seq_id in enumerate(self._batch.sampled.seq_ids)]
            return peaks, token_ids

        decoder.run, decoder.argmax = run_and_keep, check_argmax  # type: ignore[method-assign]
