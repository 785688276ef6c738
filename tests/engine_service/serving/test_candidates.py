"""A job with several candidates: they run side by side, go on after their own checkpoints, and end in one record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from millrace.engine_service.core.scheduler import SchedulerConfig
from millrace.engine_service.engine import Engine as LlmEngine
from millrace.engine_service.engine import Progress
from millrace.engine_service.serving.admission import Admission
from millrace.engine_service.serving.capacity import Capacity, ClaimBudget
from millrace.engine_service.serving.intake import Intake
from millrace.engine_service.serving.jobs import Abort, Arrived, Refused, ServedJob, Watch
from millrace.engine_service.serving.leases import Leases
from millrace.engine_service.serving.output import CHECKPOINT_TOKENS, Output
from millrace.engine_service.serving.service import Service
from millrace.engine_service.worker_group import TOO_LARGE, SequenceFailure
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.wire.messages import WorkerConfig
from millrace.producer.wire import parse_body
from millrace.results.messages import ClaimedJob, JobId
from millrace.results.writer import Writer
from tests.engine_service.core.integrity import check_scheduler
from tests.engine_service.core.sequences import stub_output
from tests.results.engines import FINGERPRINT, Engine, submit
from tests.results.full_queue import FullQueue
from tests.results.invariants import check_queue

PROMPT = [7, 8, 9, 10, 11, 12]
BLOCK_SIZE = 4


def body_of(n: int, max_tokens: int) -> bytes:
    return json.dumps({"prompt_token_ids": PROMPT, "max_tokens": max_tokens, "n": n}).encode()


class Serving:
    """A service whose loop the test runs by hand."""

    def __init__(self, queue: FullQueue) -> None:
        executor = UniprocExecutor(
            WorkerConfig(model="", num_blocks=64, block_size=BLOCK_SIZE), worker_module="tests.executor.stub"
        )
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
        self.llm = LlmEngine(executor, config)
        facts = self.llm.start()
        self.queue = queue
        self.engine = Engine(queue)
        self.admission = Admission(facts, None, [])
        self.capacity = Capacity(8, self.llm.scheduler.free_tokens)
        self.budgets: list[ClaimBudget | None] = []
        """What a claim could take when the engine needed a lease no longer, by lease."""
        self.writer = Writer(queue, on_stale=lambda job_id, lease: None)
        self.service = Service(
            self.llm,
            self.capacity,
            Output(self.writer.put, FINGERPRINT),
            self.writer,
            is_held=lambda job_id: True,
            on_over=lambda job_id, lease: self.budgets.append(self.capacity.wait_for_budget(0)),
            on_sleep_change=lambda: None,
        )

    def claim(self) -> ClaimedJob:
        claimed = self.engine.claim_one()
        self.capacity.open(claimed.cost, len(claimed.checkpoints), is_alone=False)
        return claimed

    def start(self, claimed: ClaimedJob) -> ServedJob:
        request = parse_body(claimed.body)
        outputs = [checkpoint.token_ids for checkpoint in claimed.checkpoints]
        generations = self.admission.admit(PROMPT, request.sampling, drawn_seed=claimed.seed, outputs=outputs)
        job = ServedJob(claimed, generations, due_s=0.0)
        self.service.post(Arrived(job))
        self.service._process_events()
        return job

    def run(self, num_steps: int | None = None) -> None:
        while self.llm.has_work and num_steps != 0:
            self.service._step()
            num_steps = num_steps and num_steps - 1
        assert self.writer.flush(60)

    def close(self) -> None:
        assert self.service.metrics().num_open == 0
        assert not self.llm.has_work
        check_scheduler(self.llm.scheduler)
        assert self.capacity.wait_for_budget(0) == ClaimBudget(8, self.llm.scheduler.pool.capacity_tokens)
        assert self.writer.close()
        self.llm.shutdown()


@pytest.fixture
def queue(redis_client: redis.Redis, queue_name: str) -> Iterator[FullQueue]:
    yield FullQueue(redis_client, queue_name)
    check_queue(redis_client, queue_name)


@pytest.fixture
def serving(queue: FullQueue) -> Iterator[Serving]:
    serving = Serving(queue)
    yield serving
    serving.close()


def test_claims_know_what_jobs_need_that_have_arrived_and_what_is_free_when_one_ends(serving: Serving) -> None:
    for job_id, max_tokens in (("short", 1), ("long", 40)):
        submit(serving.queue, job_id, body=body_of(1, max_tokens))
        serving.start(serving.claim())
    assert serving.capacity.wait_for_budget(0) == ClaimBudget(6, serving.llm.scheduler.free_tokens)
    serving.run(1)
    assert serving.budgets == [ClaimBudget(6, serving.llm.scheduler.free_tokens)]
    serving.run()


def test_what_comes_before_its_job_is_done_when_the_job_is_there(serving: Serving) -> None:
    """A job is on its way from the claim to the loop while its prompt is tokenized."""
    read, cancelled, both = (JobId(job_id) for job_id in ("read", "cancelled", "both"))
    for job_id in (read, cancelled, both):
        submit(serving.queue, job_id, body=body_of(1, 40))
    claims = {claimed.job_id: claimed for claimed in (serving.claim(), serving.claim(), serving.claim())}
    for event in (Watch(read), Abort(cancelled, "cancelled"), Abort(both, "cancelled"), Watch(both)):
        serving.service.post(event)
    serving.service._process_events()
    assert serving.start(claims[read]).is_watched
    for job_id in (cancelled, both):
        serving.start(claims[job_id])
    assert list(serving.service._jobs.served) == [read]
    serving.run()
    assert [serving.queue.get(job_id).state for job_id in claims] == ["finished", "cancelled", "cancelled"]
    assert not serving.service._early


@pytest.mark.parametrize("is_watched", [False, True])
def test_all_candidates_run_and_the_job_ends_once(serving: Serving, is_watched: bool) -> None:
    submit(serving.queue, "a", body=body_of(3, 10), n=3, is_streamed=is_watched)
    serving.start(serving.claim())
    serving.run()
    job = serving.queue.get("a")
    expected = stub_output(PROMPT, 10)
    assert [(one.index, one.token_ids, one.finish_reason) for one in job.outputs] == [
        (index, expected, "length") for index in range(3)
    ]
    assert (job.state, job.finish_reason) == ("finished", "length")
    assert job.usage is not None
    assert (job.usage.prompt_tokens, job.usage.completion_tokens, job.usage.cached_tokens) == (len(PROMPT), 30, 0)


def test_candidates_share_the_full_blocks_of_the_prompt(serving: Serving) -> None:
    submit(serving.queue, "a", body=body_of(3, 10), n=3)
    job = serving.start(serving.claim())
    serving.run(1)
    tables = [generation.sequence.block_ids for generation in job.generations]
    num_shared = len(PROMPT) // BLOCK_SIZE
    assert all(table[:num_shared] == tables[0][:num_shared] for table in tables)
    assert len({block_id for table in tables for block_id in table[num_shared:]}) == 3, "one of its own for each"
    assert serving.llm.scheduler.stats().pool.num_hit_tokens == 2 * len(PROMPT)
    serving.run()


def test_each_candidate_goes_on_after_its_own_checkpoint_and_an_ended_one_does_not_run(serving: Serving) -> None:
    expected = stub_output(PROMPT, 10)
    submit(serving.queue, "a", body=body_of(3, 10), n=3)
    dead = Engine(serving.queue, "dead")
    claimed = dead.claim_one()
    dead.append(claimed, 0, expected[:4], index=0)
    dead.append(claimed, 0, expected, index=2)
    dead.die()
    serving.queue.recover()
    job = serving.start(serving.claim())
    assert [generation.finish_reason for generation in job.generations] == [None, None, "length"]
    assert serving.llm.scheduler.stats().num_waiting == 2
    serving.run()
    assert [one.token_ids for one in serving.queue.get("a").outputs] == [expected] * 3


def test_a_job_whose_candidates_had_all_ended_ends_at_once(serving: Serving) -> None:
    expected = stub_output(PROMPT, 5)
    submit(serving.queue, "a", body=body_of(2, 5), n=2)
    dead = Engine(serving.queue, "dead")
    claimed = dead.claim_one()
    for index in range(2):
        dead.append(claimed, 0, expected, index=index)
    dead.die()
    serving.queue.recover()
    serving.start(serving.claim())
    serving.run()
    assert [one.token_ids for one in serving.queue.get("a").outputs] == [expected] * 2


def test_candidates_that_cannot_run_together_take_turns(serving: Serving) -> None:
    """The pool holds three of them to their ends, and a step at most eight. So no `n` is impossible."""
    submit(serving.queue, "a", body=body_of(16, 60), n=16, cost=len(PROMPT) + 16 * 60)
    budget = serving.capacity.wait_for_budget(0)
    assert budget is not None
    assert budget.kv_token_budget < 16 * 60
    (claimed,) = serving.engine.claim(1, budget=budget.kv_token_budget, num_held=0)
    serving.capacity.open(claimed.cost, 16, is_alone=False)
    serving.start(claimed)
    serving.run()
    assert [one.token_ids for one in serving.queue.get("a").outputs] == [stub_output(PROMPT, 60)] * 16
    assert serving.llm.scheduler.stats().num_preemptions > 0


def test_a_failing_candidate_ends_the_whole_job_in_one_record(serving: Serving) -> None:
    submit(serving.queue, "a", body=body_of(3, 10), n=3)
    job = serving.start(serving.claim())
    serving.run(2)
    last = job.generations[2]
    serving.service._apply(Progress(last, None, SequenceFailure("nan_logits", "not a number")), 0.0)
    assert not serving.llm.has_work, "the others are stopped"
    serving.service._apply(Progress(job.generations[0], None), 0.0)  # of the same step
    serving.run()
    ended = serving.queue.get("a")
    assert ended.error is not None
    assert (ended.state, ended.error.kind) == ("failed", "nan_logits")
    expected = stub_output(PROMPT, 2)
    assert [(one.token_ids, one.finish_reason) for one in ended.outputs] == [(expected, "error")] * 3


def test_a_cancelled_job_ends_all_its_candidates(serving: Serving) -> None:
    submit(serving.queue, "a", body=body_of(2, 100), n=2)
    serving.start(serving.claim())
    serving.run(3)
    serving.queue.cancel("a")
    serving.service.post(Abort(serving.queue.get("a").id, "cancelled"))  # type: ignore[arg-type]  # a JobId
    serving.service._process_events()
    serving.run()
    job = serving.queue.get("a")
    assert [one.finish_reason for one in job.outputs] == ["cancelled"] * 2
    assert [len(one.token_ids) for one in job.outputs] == [3, 3]


def test_a_job_that_no_longer_fits_is_released_with_the_output_of_all_candidates(serving: Serving) -> None:
    submit(serving.queue, "a", body=body_of(2, 50), n=2)
    job = serving.start(serving.claim())
    serving.run(3)
    serving.service._apply(Progress(job.generations[0], None, SequenceFailure(TOO_LARGE, "too large")), 0.0)
    serving.run()
    assert serving.queue.get("a").state == "delayed"


def test_a_candidate_that_ends_before_the_others_is_saved_and_shown(serving: Serving) -> None:
    submit(serving.queue, "a", body=body_of(2, 30), n=2)
    dead = Engine(serving.queue, "dead")
    claimed = dead.claim_one()
    dead.append(claimed, 0, stub_output(PROMPT, 28), index=1)
    dead.die()
    serving.queue.recover()
    serving.start(serving.claim())
    serving.service.post(Watch(claimed.job_id))
    serving.service._process_events()
    serving.run(2)
    outputs = serving.queue.get("a").outputs
    assert outputs[1].token_ids == stub_output(PROMPT, 30), "its end is shown without delay"
    serving.run()


def test_one_write_checkpoints_all_candidates(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    num_writes = 0
    write = serving.queue.write

    def count(writes: Any) -> list[str]:
        nonlocal num_writes
        num_writes += len(writes)
        return write(writes)

    monkeypatch.setattr(serving.queue, "write", count)
    submit(serving.queue, "a", body=body_of(3, CHECKPOINT_TOKENS + 1), n=3)
    serving.start(serving.claim())
    serving.run()
    assert num_writes == 2, "a checkpoint and the end"


def test_a_drained_engine_gives_the_job_back_with_the_output_of_all_candidates(serving: Serving) -> None:
    submit(serving.queue, "a", body=body_of(2, 50), n=2)
    serving.start(serving.claim())
    serving.run(3)
    serving.service.release_all()
    assert serving.writer.flush(60)
    claimed = Engine(serving.queue, "heir").claim_one()
    assert [checkpoint.token_ids for checkpoint in claimed.checkpoints] == [stub_output(PROMPT, 3)] * 2


def test_a_job_counts_with_all_its_candidates_until_it_ends(serving: Serving) -> None:
    submit(serving.queue, "a", body=body_of(3, 5), n=3)
    claimed = serving.claim()
    budget = serving.capacity.wait_for_budget(0)
    assert budget is not None
    assert budget.max_jobs == 5
    serving.start(claimed)
    serving.run()


@pytest.mark.parametrize(("in_request", "in_record"), [(2, 1), (1, 2), (3, 2)])
def test_a_request_with_another_n_than_its_record_is_refused(serving: Serving, in_request: int, in_record: int) -> None:
    submit(serving.queue, "a", body=body_of(in_request, 5), n=in_record)
    claimed = serving.claim()
    leases: Leases = None  # type: ignore[assignment]  # not used
    intake = Intake(
        lambda: serving.queue,
        leases,
        serving.capacity,
        serving.admission,
        model_names=("stub",),
        fingerprint=FINGERPRINT,
        post=serving.service.post,
    )
    refused = intake._admit(claimed, serving.admission)
    serving.service.post(refused)
    serving.service._process_events()
    assert isinstance(refused, Refused)
    assert (refused.error.kind, refused.error.field) == ("invalid_request", "n")
    assert refused.error.message.startswith(f"n: is {in_request} in the request, but the job's record has {in_record};")
