from __future__ import annotations

import redis

from millrace.results.messages import JobId, Lease
from tests.results.engines import Engine, submit
from tests.results.full_queue import FullQueue


def test_a_heartbeat_finds_nothing_wrong_where_nothing_is(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    engine.claim(1)
    news = engine.beat()
    assert (news.lost, news.cancelled, news.watched) == ([], [], [])
    assert queue.stats().engines == 1


def test_a_heartbeat_tells_of_cancelled_and_watched_jobs(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "a", "b", "c")
    submit(queue, "d", is_streamed=True)
    engine.claim()
    queue.cancel("a")
    redis_client.set(queue.keys.prefix + "watched:b", "1")
    news = engine.beat()
    assert (news.lost, news.cancelled, news.watched) == ([], ["a"], ["b", "d"])


def test_leases_that_are_not_the_engines_are_lost(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    job = engine.claim_one()
    engine.held = {job.job_id: Lease(job.lease - 1), JobId("never-heard-of"): Lease(1)}
    assert engine.beat().lost == ["a", "never-heard-of"]


def test_a_job_that_the_engine_has_ended_is_not_lost(queue: FullQueue, engine: Engine) -> None:
    """The heartbeat may have been on its way when the end was written."""
    submit(queue, "a")
    job = engine.claim_one()
    engine.finish(job)
    engine.held[job.job_id] = job.lease
    assert engine.beat().lost == []


def test_a_lease_that_the_engine_does_not_know_goes_back_at_the_second_heartbeat(
    queue: FullQueue, engine: Engine
) -> None:
    """The claim's reply was lost. Once is no proof: it may only be on its way."""
    submit(queue, "a")
    engine.claim(1)
    engine.held.clear()
    engine.beat()
    assert queue.get("a").state == "running"
    engine.beat()
    job = queue.get("a")
    assert (job.state, job.attempt) == ("queued", 0)


def test_a_lease_missing_once_and_then_held_stays(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    job = engine.claim_one()
    for _ in range(3):
        engine.held.clear()
        engine.beat()
        engine.held[job.job_id] = job.lease
        engine.beat()
    assert queue.get("a").state == "running"


def test_the_same_job_claimed_anew_is_not_taken_for_the_lease_missed_before(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    job = engine.claim_one()
    engine.held.clear()
    engine.beat()
    engine.release(job)
    engine.claim(1)
    engine.held.clear()
    engine.beat()
    assert queue.get("a").state == "running"


def test_an_engine_that_leaves_gives_everything_back(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", "b")
    engine.claim()
    assert queue.deregister(engine.id) == 2
    stats = queue.stats()
    assert (stats.engines, stats.queued, stats.running) == (0, 2, 0)
    assert queue.get("a").attempt == 0


def test_a_heartbeat_makes_up_for_a_lost_wake_up(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    queue.wait_for_signal(engine.id, 1, include_wake=True)  # by an engine that then died
    engine.beat()
    assert queue.wait_for_signal(engine.id, 1, include_wake=True) == "wake"


def test_engines_with_a_longer_limit_hear_of_a_new_one(queue: FullQueue, engine: Engine) -> None:
    """So that the next heartbeat tells them when the new one's time may be over."""
    engine.beat(60_000)
    same, shorter = Engine(queue), Engine(queue)
    for other, ttl_ms in ((same, 60_000), (shorter, 30_000)):
        queue.deregister(other.id)
        other.beat(ttl_ms)
        other.beat(ttl_ms)
    for told in (engine, same):
        assert queue.wait_for_signal(told.id, 1, include_wake=False) == "beat"
        assert queue.wait_for_signal(told.id, 0.01, include_wake=False) is None, "once"
    assert 0 < engine.beat(60_000).next_beat_ms <= 30_000
