"""Delays, deadlines and retries: what time does to a job."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import redis

from millrace.results.messages import Checkpoint, Event, JobError, Signal
from tests.results.engines import Engine, finish_of, submission, submit
from tests.results.full_queue import FullQueue

LATER_MS = 3_600_000


@pytest.fixture
def keys_of(queue: FullQueue, redis_client: redis.Redis) -> Any:
    """Moves the times of a job into the past, so that nobody has to wait for them."""

    class Clock:
        def is_due(self, job_id: str) -> None:
            redis_client.zadd(f"{queue.keys.prefix}delayed", {job_id: 1}, xx=True)

        def is_past_deadline(self, job_id: str) -> None:
            redis_client.hset(queue.keys.job(job_id), "deadline", 1)
            redis_client.zadd(f"{queue.keys.prefix}deadlines", {job_id: 1}, xx=True)

    return Clock()


def test_a_delayed_job_waits_and_then_has_the_age_of_its_submission(
    queue: FullQueue, engine: Engine, keys_of: Any
) -> None:
    submit(queue, "later", delay_ms=LATER_MS)
    submit(queue, "now")
    job = queue.get("later")
    assert job.state == "delayed"
    assert job.timings.due_ms == job.timings.created_ms + LATER_MS
    assert queue.stats().delayed == 1
    submit(queue, "now-too")
    assert engine.claim_ids(1) == ["now"]
    keys_of.is_due("later")
    assert engine.claim_ids() == ["later", "now-too"]


def test_a_time_that_is_past_is_now(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", run_at_ms=1000)
    submit(queue, "b", run_at_ms=2**42)
    assert queue.get("b").timings.due_ms == 2**42
    assert engine.claim_ids() == ["a"]


def test_a_heartbeat_promotes_what_is_due_and_wakes_an_engine(queue: FullQueue, engine: Engine, keys_of: Any) -> None:
    submit(queue, "a", delay_ms=LATER_MS)
    keys_of.is_due("a")
    engine.beat()
    assert queue.wait_for_signal(engine.id, 1, include_wake=True) == "wake"
    assert engine.claim_ids() == ["a"]


def test_an_engine_looks_when_the_next_job_is_due(queue: FullQueue, engine: Engine, keys_of: Any) -> None:
    submit(queue, "late", delay_ms=LATER_MS)
    assert engine.beat().next_beat_ms > 15_000
    assert queue.wait_for_signal(engine.id, 0.01, include_wake=False) is None
    submit(queue, "soon", deadline_ms=4000)
    assert queue.wait_for_signal(engine.id, 1, include_wake=False) == "beat"
    assert 3000 < engine.beat().next_beat_ms <= 4000
    submit(queue, "after", deadline_ms=4900)
    assert queue.wait_for_signal(engine.id, 0.01, include_wake=False) is None, "the engine looks at 4000 anyway"
    submit(queue, "first", delay_ms=2000)
    assert queue.wait_for_signal(engine.id, 1, include_wake=False) == "beat"
    assert 1000 < engine.beat().next_beat_ms <= 2000


def test_more_due_jobs_than_one_call_handles_are_handled_soon(queue: FullQueue, engine: Engine, keys_of: Any) -> None:
    ids = [f"job-{number}" for number in range(600)]
    submit(queue, *ids, delay_ms=LATER_MS)
    for job_id in ids:
        keys_of.is_due(job_id)
    for num_left in (344, 88):
        assert engine.beat().next_beat_ms == 50
        assert queue.stats().delayed == num_left
    assert engine.beat().next_beat_ms > 5000
    assert len(engine.claim_ids(1000)) == 600


# --- deadlines -----------------------------------------------------------------------------------------------------


def test_queued_and_delayed_jobs_expire_at_their_deadline(queue: FullQueue, engine: Engine, keys_of: Any) -> None:
    submit(queue, "queued", deadline_ms=LATER_MS)
    submit(queue, "delayed", deadline_ms=2 * LATER_MS, delay_ms=LATER_MS)
    submit(queue, "neither")
    job = queue.get("queued")
    assert job.timings.deadline_ms == job.timings.created_ms + LATER_MS
    keys_of.is_past_deadline("queued")
    keys_of.is_past_deadline("delayed")
    assert engine.claim_ids() == ["neither"]
    for job_id in ("queued", "delayed"):
        job = queue.get(job_id)
        assert (job.state, job.finish_reason) == ("expired", "expired")
    assert queue.stats().expired == 2


def test_the_engine_of_a_running_job_is_told_of_its_deadline_and_ends_it(
    queue: FullQueue, engine: Engine, keys_of: Any
) -> None:
    submit(queue, "a", deadline_ms=LATER_MS)
    job = engine.claim_one()
    keys_of.is_past_deadline("a")
    Engine(queue, "another")
    assert queue.wait_for_signal(engine.id, 1, include_wake=False) == Signal(kind="expire", job_id=job.job_id)
    assert engine.beat().expired == ["a"]
    assert engine.beat().expired == ["a"], "until it has ended"
    event = Event(offset=0, token_ids=[1], text="so far")
    assert engine.finish(job, event, state="expired", reason="expired") == "ok"
    assert (queue.get("a").state, queue.get("a").text) == ("expired", "so far")


@pytest.mark.parametrize("way", ["release", "recover", "deregister", "retry"])
def test_a_job_that_goes_back_after_its_deadline_expires(
    queue: FullQueue, engine: Engine, keys_of: Any, way: str
) -> None:
    submit(queue, "a", deadline_ms=LATER_MS)
    job = engine.claim_one()
    engine.show(job, 0, [1], "x")
    keys_of.is_past_deadline("a")
    if way == "release":
        engine.release(job)
    elif way == "recover":
        engine.die()
        queue.recover()
    elif way == "deregister":
        queue.deregister(engine.id)
    else:
        assert engine.finish(job, state="failed", is_retryable=True) == "retrying"
    assert (queue.get("a").state, queue.get("a").text) == ("expired", "x")


def test_an_end_before_the_deadline_is_the_end(
    queue: FullQueue, engine: Engine, keys_of: Any, redis_client: redis.Redis
) -> None:
    submit(queue, "a", deadline_ms=LATER_MS)
    engine.finish(engine.claim_one())
    assert redis_client.zcard(f"{queue.keys.prefix}deadlines") == 0
    engine.beat()
    assert queue.get("a").state == "finished"


def test_a_sweep_is_bounded(queue: FullQueue, engine: Engine, redis_client: redis.Redis) -> None:
    queue.submit([submission(f"j{i}", deadline_ms=1) for i in range(600)])
    expired = [queue.stats().expired]
    while expired[-1] < 600:
        engine.beat()
        expired.append(queue.stats().expired)
    assert max(later - earlier for earlier, later in pairwise(expired)) <= 256


# --- retries -------------------------------------------------------------------------------------------------------


def fail_for_now(engine: Engine, kind: str = "internal") -> str:
    error = JobError(kind=kind, message="it may pass")
    return engine.finish(engine.claim_one(), state="failed", reason="error", error=error, is_retryable=True)


def test_a_failure_that_may_pass_is_tried_again_with_growing_pauses(
    queue: FullQueue, engine: Engine, keys_of: Any, redis_client: redis.Redis
) -> None:
    submit(queue, "a", max_retries=3)

    def now_ms() -> int:
        seconds, micros = redis_client.time()
        return seconds * 1000 + micros // 1000

    for number in range(3):
        before_ms = now_ms()
        assert fail_for_now(engine) == "retrying"
        after_ms = now_ms()
        job = queue.get("a")
        assert (job.state, job.num_retries, job.attempt) == ("delayed", number + 1, number + 1)
        assert job.timings.due_ms is not None
        assert before_ms + 500 * 2**number <= job.timings.due_ms <= after_ms + 1000 * 2**number
        keys_of.is_due("a")
    assert fail_for_now(engine) == "ok"
    job = queue.get("a")
    assert (job.state, job.error.message if job.error else "") == ("failed", "it may pass")


def test_without_a_word_a_job_has_two_retries_and_with_none_it_has_none(
    queue: FullQueue, engine: Engine, keys_of: Any
) -> None:
    submit(queue, "a")
    for expected in ("retrying", "retrying", "ok"):
        assert fail_for_now(engine) == expected
        keys_of.is_due("a")
    submit(queue, "b", max_retries=0)
    assert fail_for_now(engine) == "ok"


def test_a_failure_that_will_not_pass_is_final(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    assert engine.finish(engine.claim_one(), state="failed", reason="error") == "ok"
    assert queue.get("a").state == "failed"


def test_a_retry_goes_on_after_the_last_token_and_revises_nothing(
    queue: FullQueue, engine: Engine, keys_of: Any
) -> None:
    submit(queue, "a")
    job = engine.claim_one()
    engine.show(job, 0, [1, 2], "xy")
    engine.append(job, 2, [3])
    unseen = Event(offset=2, token_ids=[3, 4], text="zw")
    assert engine.finish(job, unseen, state="failed", is_retryable=True) == "retrying"
    assert queue.get("a").text == "xy"
    keys_of.is_due("a")
    again = engine.claim_one()
    assert again.checkpoints == [Checkpoint([1, 2, 3], 2)]
    engine.finish(again, Event(offset=2, token_ids=[3, 5], text="zv"))
    assert queue.get("a").text == "xyzv"


def test_a_job_whose_end_was_asked_for_is_not_tried_again_nor_a_dead_letter(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "a")
    job = engine.claim_one()
    queue.cancel("a")
    assert engine.finish(job, state="failed", is_retryable=True) == "ok"
    assert (queue.get("a").state, queue.get("a").num_retries) == ("cancelled", 0)
    assert redis_client.zcard(queue.keys.dead) == 0


def test_more_jobs_than_are_swept_at_once_expire_when_the_first_engine_comes(queue: FullQueue, engine: Engine) -> None:
    queue.submit([submission(f"late{i}", deadline_ms=1) for i in range(300)])
    submit(queue, "a")
    time.sleep(0.01)
    assert [job.job_id for job in engine.claim(300)] == ["a"]
    stats = queue.stats()
    assert (stats.expired, stats.queued, stats.waiting_tokens) == (300, 0, 0)


def test_many_overdue_jobs_of_one_tenant_keep_no_other_waiting(queue: FullQueue, engine: Engine) -> None:
    queue.submit([submission(f"late{i}", tenant="late", deadline_ms=1) for i in range(2000)])
    submit(queue, "a", tenant="other")
    time.sleep(0.01)
    assert engine.claim_ids(1) == ["a"]


def test_a_tenant_is_passed_over_only_where_a_claim_brings_nothing_of_it(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    """It has been charged for what it gave, and no longer stands in front."""
    for tenant, cost in (("a", 10), ("b", 15)):
        for i in range(60):
            submit(queue, f"{tenant}{i:02}", tenant=tenant, cost=cost)
    for i in [*range(15), 16]:
        redis_client.hset(queue.keys.job(f"a{i:02}"), "deadline", 1)
    claimed = "".join(job_id[0] for job_id in engine.claim_ids(40))
    assert claimed.count("a") * 10 == pytest.approx(claimed.count("b") * 15, abs=15)


def test_jobs_that_fail_together_come_back_apart(queue: FullQueue, engine: Engine) -> None:
    queue.submit([submission(f"j{i}") for i in range(50)])
    for _ in range(50):
        fail_for_now(engine)
    due = [queue.get(f"j{i}").timings.due_ms or 0 for i in range(50)]
    assert max(due) - min(due) > 100


def test_the_time_of_the_first_token_is_the_same_if_the_write_had_to_wait(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    finish = msgspec.structs.replace(finish_of(engine.claim_one()), first_token_s=time.monotonic())
    time.sleep(0.2)
    assert queue.write([finish]) == ["ok"]
    assert (queue.get("a").timings.decode_s or 0) >= 0.2
