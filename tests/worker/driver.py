"""A test double for the engine's scheduler: drives one worker with random step plans.

Chunks of odd sizes, any mix of prefill and decode in a step, blocks in random order, both ways of feeding a sampled
token, and preemptions (finished, and new again with the tokens so far, sometimes in the same plan).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from millrace.executor.wire.messages import (
    NO_TOKEN,
    NewSequence,
    RowSampling,
    SeqId,
    StepId,
    StepPlan,
    StepResult,
    StepRow,
    WorkerConfig,
)
from millrace.worker.input_batch import StepBatch
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


@dataclass
class Request:
    seq_id: SeqId
    prompt: list[int]
    sampling: RowSampling
    output: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    """Per output token, the logits [V] that it was drawn from."""
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_known: bool = False
    sampled_at: int | None = None
    """The step that sampled the last token, if the worker still has the sequence."""
    failure: str | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Steps(Protocol):
    """What a driver needs of a worker, or of a group of ranks."""

    def execute_model(self, plan: StepPlan) -> StepResult: ...


class Driver:
    """Owns the free blocks and the requests' progress."""

    def __init__(self, worker: Steps, seed: int, *, preempts: bool = True, num_blocks: int = NUM_BLOCKS) -> None:
        self._worker = worker
        self._random = random.Random(seed)
        self._preempts = preempts
        self._step_id = 0
        self._free = list(range(1, num_blocks))
        self._random.shuffle(self._free)
        self.num_preemptions = 0
        self._captured: list[tuple[SeqId, Tensor]] = []
        if isinstance(worker, Rank):
            self._capture_logits(worker)

    def run(
        self, prompts: list[list[int]], max_tokens: int, sampling: list[RowSampling] | None = None
    ) -> list[Request]:
        """Generate `max_tokens` for each prompt."""
        given = sampling or [GREEDY] * len(prompts)
        requests = [Request(SeqId(i), prompt, given[i]) for i, prompt in enumerate(prompts)]
        while running := [r for r in requests if len(r.output) < max_tokens and r.failure is None]:
            self._step(running)
        self.execute(StepPlan(self._next_id(), 1, 1, [], finished=[r.seq_id for r in requests if r.is_known]))
        return requests

    def execute(self, plan: StepPlan) -> StepResult:
        return self._worker.execute_model(plan)

    def _step(self, running: list[Request]) -> None:
        step_id = self._next_id()
        chosen = self._random.sample(running, self._random.randint(1, len(running)))
        finished = [self._preempt(r) for r in running if self._preempts and r.is_known and self._random.random() < 0.05]
        new: list[NewSequence] = []
        rows: list[StepRow] = []
        for request in chosen:
            if not request.is_known:
                request.is_known = True
                new.append(NewSequence(request.seq_id, request.tokens, len(request.prompt), request.sampling))
            rows.append(self._row(request, step_id))
        result = self.execute(StepPlan(step_id, 1, 1, rows, new, finished))
        self._apply(result, {request.seq_id: request for request in chosen})

    def _row(self, request: Request, step_id: StepId) -> StepRow:
        start = request.num_computed
        left = len(request.tokens) - start
        count = self._random.randint(1, min(left, 13))
        end = start + count
        num_new = -(-end // BLOCK_SIZE) - len(request.blocks)
        new_blocks = [self._free.pop() for _ in range(num_new)]
        request.blocks += new_blocks
        request.num_computed = end
        is_fed_back = request.sampled_at is not None and end == len(request.tokens)
        lag = step_id - request.sampled_at if is_fed_back and self._random.random() < 0.7 else 0  # type: ignore[operator]
        return StepRow(request.seq_id, start, count, lag if count == left else NO_TOKEN, new_blocks)

    def _preempt(self, request: Request) -> SeqId:
        self.num_preemptions += 1
        self._free += request.blocks
        self._random.shuffle(self._free)
        request.blocks = []
        request.num_computed = 0
        request.is_known = False
        request.sampled_at = None
        return request.seq_id

    def _apply(self, result: StepResult, by_id: dict[SeqId, Request]) -> None:
        for failure in result.failures:
            by_id[failure.seq_id].failure = failure.kind
        for seq_id, token_id in zip(result.seq_ids, result.token_ids, strict=True):
            by_id[seq_id].output.append(token_id)
            by_id[seq_id].sampled_at = result.step_id
        for seq_id, logits in self._captured:
            by_id[seq_id].logits.append(logits)
        self._captured.clear()

    def _next_id(self) -> StepId:
        self._step_id += 1
        return StepId(self._step_id)

    def _capture_logits(self, worker: Rank) -> None:
        runner = worker.runner
        assert runner is not None
        compute = type(runner).compute_logits

        def compute_and_keep(batch: StepBatch) -> Tensor:
            logits = compute(runner, batch)
            kept = logits.detach().cpu().clone()
            self._captured += [(row.seq_id, kept[i]) for i, row in enumerate(batch.sampled_rows)]
            return logits

        runner.compute_logits = compute_and_keep  # type: ignore[method-assign]
