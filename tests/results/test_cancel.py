from __future__ import annotations

import threading

import pytest
import redis

from millrace.results.connection import connect
from millrace.results.errors import JobNotFound
from millrace.results.messages import Event, Signal
from tests.results.engines import Engine, submission, submit
from tests.results.full_queue import FullQueue


def test_a_queued_job_is_cancelled_at_once(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", "b")
    assert queue.cancel("a") == "cancelled"
    job = queue.get("a")
    assert (job.state, job.finish_reason, job.text, job.usage) == ("cancelled", "cancelled", "", None)
    assert engine.claim_ids() == ["b"]


def test_a_delayed_job_is_cancelled_at_once(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    engine.release(engine.claim_one(), delay_ms=60_000)
    assert queue.cancel("a") == "cancelled"
    assert queue.get("a").state == "cancelled"


def test_the_engine_of_a_running_job_is_told_and_ends_it(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    job = engine.claim_one()
    assert queue.cancel("a") == "cancelling"
    assert queue.wait_for_signal(engine.id, 1, include_wake=False) == Signal(kind="cancel", job_id=job.job_id)
    engine.finish(job, Event(offset=0, token_ids=[1], text="so far"), state="cancelled", reason="cancelled")
    cancelled = queue.get("a")
    assert (cancelled.state, cancelled.text) == ("cancelled", "so far")


def test_a_job_that_ends_before_its_engine_hears_of_the_cancellation_has_ended(
    queue: FullQueue, engine: Engine
) -> None:
    submit(queue, "a")
    job = engine.claim_one()
    queue.cancel("a")
    assert engine.finish(job) == "ok"
    assert queue.get("a").state == "finished"
    assert queue.cancel("a") == "finished"


def test_a_released_job_whose_cancellation_was_asked_for_ends_cancelled(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    job = engine.claim_one()
    queue.cancel("a")
    assert engine.release(job) == "ok"
    assert queue.get("a").state == "cancelled"


def test_cancelling_twice_is_cancelling_once(queue: FullQueue) -> None:
    submit(queue, "a")
    assert [queue.cancel("a"), queue.cancel("a")] == ["cancelled", "cancelled"]
    assert queue.stats().cancelled == 1


def test_an_unknown_job_cannot_be_cancelled(queue: FullQueue) -> None:
    with pytest.raises(JobNotFound, match="'nobody'"):
        queue.cancel("nobody")


def test_cancelling_races_with_completion_and_one_of_them_wins(
    queue: FullQueue, engine: Engine, redis_url: str, queue_name: str, redis_client: redis.Redis
) -> None:
    queue.submit([submission(f"j{i}") for i in range(200)])
    jobs = engine.claim()

    def cancel_all() -> None:
        own = FullQueue(connect(redis_url), queue_name)
        for job in reversed(jobs):
            own.cancel(job.job_id)
        own.close()

    canceller = threading.Thread(target=cancel_all)
    canceller.start()
    for job in jobs:
        if job.job_id in engine.beat().cancelled:
            engine.finish(job, state="cancelled", reason="cancelled")
        else:
            engine.finish(job)
    canceller.join()
    stats = queue.stats()
    assert stats.finished + stats.cancelled == 200
