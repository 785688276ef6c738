"""Large jobs are prepared beside all others: whom that delays, and what becomes of them meanwhile."""

from __future__ import annotations

import itertools
import json
import queue as queues
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import tokenizers

from millrace.engine_service.core.scheduler import SchedulerConfig
from millrace.engine_service.engine import Engine
from millrace.engine_service.serving.admission import Admission
from millrace.engine_service.serving.capacity import Capacity, ClaimBudget
from millrace.engine_service.serving.intake import LARGE_BODY_BYTES, Intake
from millrace.engine_service.serving.jobs import Lost, PendingJob
from millrace.engine_service.serving.leases import Leases, new_engine_id
from millrace.engine_service.serving.output import Output
from millrace.engine_service.serving.preparation import Preparation
from millrace.engine_service.serving.service import Service
from millrace.engine_service.text import Tokenizer
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.wire.messages import WorkerConfig
from millrace.producer import GenerationRequest
from millrace.results import commands
from millrace.results.connection import connect
from millrace.results.messages import Checkpoint, ClaimedJob, JobId, Lease, Submission
from millrace.results.writer import Writer
from tests.processes import wait_until
from tests.results.engines import FINGERPRINT, outcomes, submission
from tests.results.full_queue import FullQueue
from tests.results.invariants import check_queue

SMALL = b'{"prompt_token_ids":[1,2,3],"max_tokens":2}'
LARGE = msgspec.json.encode({"prompt_token_ids": [1] * LARGE_BODY_BYTES, "max_tokens": 2})


# --- the order -----------------------------------------------------------------------------------------------------

leases = itertools.count(1)


def pending(name: str) -> PendingJob:
    """The first character names the tenant."""
    return PendingJob(
        ClaimedJob(
            job_id=JobId(name),
            lease=Lease(next(leases)),
            attempt=1,
            body=b"",
            seed=1,
            cost=1,
            crash_count=0,
            checkpoints=[Checkpoint([], 0)],
            is_watched=False,
            created_ms=0,
            tenant=name[0],
        )
    )


class Bench:
    """A preparation that says what it prepares, and waits until it may go on."""

    def __init__(self) -> None:
        self.begun: queues.SimpleQueue[str] = queues.SimpleQueue()
        self.may_go_on = threading.Semaphore(0)
        self.preparation = Preparation(self.prepare)
        self.preparation.thread.start()

    def prepare(self, job: PendingJob) -> None:
        self.begun.put(job.claimed.job_id)
        self.may_go_on.acquire()

    def put(self, *names: str) -> None:
        for name in names:
            self.preparation.put(pending(name))

    def next(self) -> str:
        return self.begun.get(timeout=60)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.preparation.stop()
    bench.may_go_on.release(100)
    bench.preparation.thread.join()


def test_many_large_jobs_of_one_tenant_delay_another_tenant_by_one_at_most(bench: Bench) -> None:
    bench.put("a1", "a2", "a3", "a4")
    assert bench.next() == "a1"
    bench.put("b1", "b2", "c1")
    bench.may_go_on.release(7)
    assert [bench.next() for _ in range(6)] == ["b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_withdrawn_job_is_not_prepared(bench: Bench) -> None:
    bench.put("a1")
    withdrawn = pending("b1")
    bench.preparation.put(withdrawn)
    withdrawn.is_withdrawn = True
    bench.put("c1")
    bench.may_go_on.release(3)
    assert [bench.next(), bench.next()] == ["a1", "c1"]


def test_a_preparation_that_is_stopped_waits_for_nothing_and_begins_nothing(bench: Bench) -> None:
    bench.put("a1", "a2")
    assert bench.next() == "a1"
    bench.preparation.stop()
    bench.may_go_on.release(2)
    bench.preparation.thread.join()
    assert bench.begun.empty()


# --- the capacity --------------------------------------------------------------------------------------------------


def test_large_jobs_that_would_fill_the_pool_leave_the_others_a_way_in() -> None:
    capacity = Capacity(max_open=100, capacity_tokens=1000)
    capacity.open(5000, is_alone=False, is_slow=True)
    assert capacity.wait_for_budget(0) == ClaimBudget(max_jobs=15, kv_token_budget=1000)
    capacity.open(300, is_alone=False)
    assert capacity.wait_for_budget(0) == ClaimBudget(max_jobs=15, kv_token_budget=700)
    capacity.end_preparation(5000)
    assert capacity.wait_for_budget(0) is None, "it is on its way into the pool"


def test_an_engine_does_not_claim_all_large_jobs_that_there_are() -> None:
    capacity = Capacity(max_open=100, capacity_tokens=1000)
    for _ in range(16):
        capacity.open(500, is_alone=False, is_slow=True)
    assert capacity.wait_for_budget(0) is None
    capacity.end_preparation(500)
    capacity.arrive(500)
    capacity.close(is_alone=False)
    assert capacity.wait_for_budget(0) == ClaimBudget(max_jobs=1, kv_token_budget=1000)


# --- a whole service -----------------------------------------------------------------------------------------------


class Gate:
    """Holds up whoever tokenizes a large request until it is opened."""

    def __init__(self, admission: Admission) -> None:
        self._prompt_token_ids = admission.prompt_token_ids
        self._is_open = threading.Event()
        self.num_held = 0
        admission.prompt_token_ids = self.hold  # type: ignore[method-assign]

    def hold(self, request: GenerationRequest, *args: Any, **options: Any) -> list[int]:
        if len(request.prompt_token_ids or []) < LARGE_BODY_BYTES:
            return self._prompt_token_ids(request, *args, **options)
        self.num_held += 1
        assert self._is_open.wait(60)
        return [1, 2, 3]

    def open(self) -> None:
        self._is_open.set()


class Serving:
    """An engine service on a queue, its loop in a thread."""

    def __init__(self, connect_queue: Callable[[], FullQueue]) -> None:
        executor = UniprocExecutor(
            WorkerConfig(model="", num_blocks=64, block_size=4), worker_module="tests.executor.stub"
        )
        self.engine = Engine(executor, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64))
        facts = self.engine.start()
        self.queue = connect_queue()
        self.capacity = Capacity(8, self.engine.scheduler.free_tokens)
        self.writer = Writer(connect_queue(), on_stale=lambda job_id, lease: self.service.post(Lost(job_id, lease)))
        self.leases = Leases(
            connect_queue(),
            new_engine_id(),
            0.4,
            pending=self.writer.pending,
            on_news=lambda news: self.service.post_reconciliation(news),
            sleep_level=lambda: self.engine.sleep_level,
        )
        self.service = Service(
            self.engine,
            self.capacity,
            Output(self.writer.put, FINGERPRINT),
            self.writer,
            is_held=self.leases.holds,
            on_over=self.leases.drop,
            on_sleep_change=self.leases.beat_soon,
        )
        self.admission = Admission(facts, None, [])
        self.gate = Gate(self.admission)
        self.intake = Intake(
            connect_queue,
            self.leases,
            self.capacity,
            self.admission,
            model_names=("stub",),
            fingerprint=FINGERPRINT,
            post=self.service.post,
        )
        self.loop = threading.Thread(target=self.service.serve, daemon=True)
        self.leases.start()
        self.intake.start()
        self.loop.start()

    def submit(self, *submissions: Submission) -> None:
        assert self.queue.submit(submissions) == outcomes(["created"] * len(submissions))

    def wait_for(self, job_id: str, state: str) -> None:
        wait_until(lambda: self.queue.get(job_id).state == state, what=f"{job_id} {state}")

    def wait_for_held(self, num_jobs: int = 1) -> None:
        wait_until(lambda: self.gate.num_held == num_jobs, what="the preparation")

    def check_accounts(self) -> None:
        """Nothing is held any more, and all capacity is free."""
        free_tokens = self.engine.scheduler.free_tokens
        wait_until(lambda: self.service.metrics().num_open == 0)
        assert self.capacity.wait_for_budget(0) == ClaimBudget(max_jobs=8, kv_token_budget=free_tokens)
        assert (self.capacity._num_open, self.capacity._tokens_on_the_way, self.capacity._tokens_preparing) == (0, 0, 0)
        assert self.leases._held == {}

    def drain(self) -> None:
        """As the service's process does it at SIGTERM."""
        self.service.drain()
        self.loop.join()
        self.intake.stop()
        self.service.finish_running(10.0)

    def leave(self) -> None:
        if self.loop.is_alive():
            self.drain()
        self.gate.open()
        self.service.release_all()
        assert self.writer.close()
        self.leases.stop()
        for thread in self.intake.threads:
            thread.join()
        self.engine.shutdown()


@pytest.fixture
def serving(
    redis_url: str, queue_name: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Serving]:
    monkeypatch.setattr("millrace.engine_service.serving.intake._BLOCK_S", 0.05)
    monkeypatch.setattr("millrace.engine_service.serving.service._IDLE_S", 0.05)
    queues: list[FullQueue] = []

    def connect_queue() -> FullQueue:
        queues.append(FullQueue(connect(redis_url), queue_name))
        return queues[-1]

    serving = Serving(connect_queue)
    yield serving
    serving.leave()
    for queue in queues:
        queue.close()
    check_queue(redis_client, queue_name)


def test_other_jobs_are_served_while_a_large_one_is_tokenized(serving: Serving) -> None:
    """Also when its estimated cost is more than the whole pool."""
    serving.submit(submission("large", body=LARGE, cost=5000, tenant="a"))
    serving.wait_for_held()
    serving.submit(submission("other", body=SMALL, tenant="b"), submission("small", body=SMALL, tenant="a"))
    serving.wait_for("other", "finished")
    serving.wait_for("small", "finished")
    assert serving.queue.get("large").state == "running"
    serving.gate.open()
    serving.wait_for("large", "finished")
    serving.check_accounts()


def test_a_large_job_can_be_cancelled_while_it_is_tokenized(serving: Serving) -> None:
    serving.submit(submission("large", body=LARGE, is_streamed=True))
    serving.wait_for_held()
    assert serving.queue.cancel("large") == "cancelling"
    serving.wait_for("large", "cancelled")
    serving.check_accounts()
    serving.gate.open()
    serving.submit(submission("next", body=LARGE))
    serving.wait_for("next", "finished")
    assert serving.queue.get("large").state == "cancelled"
    serving.check_accounts()
    assert serving.service.metrics().num_by_outcome["cancelled"] == 1


def test_a_large_job_is_live_for_a_reader_that_came_while_it_was_tokenized(serving: Serving) -> None:
    serving.submit(submission("large", body=LARGE))
    serving.wait_for_held()
    serving.queue._transport.send(commands.watch(serving.queue.keys, "large"))
    wait_until(lambda: "large" in serving.service._early)
    serving.gate.open()
    serving.wait_for("large", "finished")
    assert serving.queue.get("large").token_ids
    serving.check_accounts()
    assert not serving.service._early


def test_a_large_job_expires_while_it_is_tokenized(serving: Serving, redis_client: redis.Redis) -> None:
    serving.submit(submission("large", body=LARGE, deadline_ms=3_600_000))
    serving.wait_for_held()
    redis_client.hset(serving.queue.keys.job("large"), "deadline", 1)
    redis_client.zadd(f"{serving.queue.keys.prefix}deadlines", {"large": 1})
    serving.wait_for("large", "expired")
    serving.check_accounts()


def test_a_large_job_that_is_lost_while_it_is_tokenized_is_prepared_for_its_new_lease(serving: Serving) -> None:
    serving.submit(submission("large", body=LARGE))
    serving.wait_for_held()
    serving.queue.deregister(serving.leases.engine_id)
    wait_until(lambda: serving.service.metrics().num_by_outcome["lost"] == 1)
    serving.gate.open()
    serving.wait_for("large", "finished")
    serving.check_accounts()
    assert serving.gate.num_held == 2


def test_a_drain_gives_large_jobs_back_without_waiting_for_them(serving: Serving) -> None:
    serving.submit(submission("first", body=LARGE), submission("second", body=LARGE))
    serving.wait_for_held()
    serving.drain()
    for job_id in ("first", "second"):
        serving.wait_for(job_id, "queued")
        assert serving.queue.get(job_id).attempt == 0
    serving.check_accounts()


def test_an_engine_that_falls_asleep_gives_large_jobs_back_and_takes_them_again_when_awake(serving: Serving) -> None:
    serving.submit(submission("large", body=LARGE))
    serving.wait_for_held()
    serving.queue.sleep(1)
    serving.wait_for("large", "queued")
    serving.gate.open()
    wait_until(lambda: serving.engine.sleep_level == 1)
    assert serving.queue.get("large").state == "queued"
    serving.queue.sleep(0)
    serving.wait_for("large", "finished")
    serving.check_accounts()


def test_the_lease_of_a_large_job_is_held_as_long_as_it_is_tokenized(serving: Serving) -> None:
    serving.submit(submission("large", body=LARGE))
    serving.wait_for_held()
    beat_at_s = serving.leases._beat_at_s
    wait_until(lambda: serving.leases._beat_at_s > beat_at_s + 1.0)  # more than the limit of the heartbeat
    assert serving.queue.get("large").state == "running"
    serving.gate.open()
    serving.wait_for("large", "finished")
    assert serving.gate.num_held == 1


def test_a_panic_of_the_tokenizer_fails_its_job_only(serving: Serving, tmp_path: Path) -> None:
    """A panic in the tokenizer's Rust code raises what is no Exception, also in the thread that prepares large jobs."""
    panicking = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    content = json.loads(panicking.to_str())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "BAAAAAEAAAA="}  # without what it refers to
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    for admission in (serving.intake._admission, serving.intake._quick_admission):
        admission._tokenizer = Tokenizer(tmp_path)
    prompts = {"small": "a", "large": "a" * LARGE_BODY_BYTES}
    serving.gate.open()
    for job_id, prompt in prompts.items():
        serving.submit(submission(job_id, body=msgspec.json.encode({"prompt": prompt}), max_retries=0))
        serving.wait_for(job_id, "failed")
    serving.submit(submission("next", body=SMALL.replace(b"{", b'{"detokenize":false,')))
    serving.wait_for("next", "finished")
    assert all(thread.is_alive() for thread in serving.intake.threads)
    serving.check_accounts()
