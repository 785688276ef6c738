from __future__ import annotations

import redis

from millrace.results.messages import Checkpoint, JobId, Signal
from millrace.results.queue import JobQueue
from tests.results.engines import FINGERPRINT, Engine, submit
from tests.results.full_queue import FullQueue


def half_done(queue: JobQueue, *, is_published: bool, fingerprint: str = FINGERPRINT) -> None:
    """Job "a" with three tokens of one model, queued again."""
    submit(queue, "a")
    engine = Engine(queue, "first", fingerprint=fingerprint)
    job = engine.claim_one()
    if is_published:
        engine.show(job, 0, [1, 2], "xy")
    engine.append(job, 2 if is_published else 0, [1, 2, 3][2 if is_published else 0 :])
    engine.release(job)


def test_an_engine_with_the_same_model_goes_on(queue: JobQueue, engine: Engine) -> None:
    half_done(queue, is_published=True)
    assert engine.claim_one().checkpoints[0].token_ids == [1, 2, 3]


def test_an_engine_with_another_model_starts_over_while_nobody_has_seen_anything(queue: JobQueue) -> None:
    half_done(queue, is_published=False)
    other = Engine(queue, "other", fingerprint="model-b")
    job = other.claim_one()
    assert job.checkpoints == [Checkpoint([], 0)]
    assert other.append(job, 0, [9]) == "ok"
    other.release(job)
    assert Engine(queue, fingerprint="model-b").claim_one().checkpoints[0].token_ids == [9]


def test_what_was_seen_waits_for_an_engine_with_its_model(queue: FullQueue, engine: Engine) -> None:
    half_done(queue, is_published=True)
    submit(queue, "b")
    other = Engine(queue, "other", fingerprint="model-b")
    assert other.claim_ids() == ["b"]
    assert queue.get("a").state == "delayed"
    assert queue.position("a").needs_model
    assert queue.wait_for_signal(other.id, 1, include_wake=False) == Signal(kind="mismatch", job_id=JobId("a"))
    got: list[str] = []
    while not got:
        got = engine.claim_ids()
    assert got == ["a"]
    assert not queue.position("a").needs_model


def test_what_no_engine_can_go_on_with_fails_in_the_end_and_keeps_its_text(
    queue: JobQueue, redis_client: redis.Redis
) -> None:
    redis_client.hset(queue.keys.settings, "mismatch_wait_ms", 0)
    half_done(queue, is_published=True)
    other = Engine(queue, "other", fingerprint="model-b")
    assert other.claim_ids() == []
    job = queue.get("a")
    assert (job.state, job.text, job.token_ids) == ("failed", "xy", [1, 2])
    assert job.error is not None
    assert job.error.kind == "fingerprint_mismatch"
    expected = Signal(kind="mismatch_failed", job_id=JobId("a"))
    assert queue.wait_for_signal(other.id, 1, include_wake=False) == expected


def test_it_is_put_off_for_another_time_each_time(queue: JobQueue, redis_client: redis.Redis) -> None:
    """Idle engines claim once a second. If the job were due again after a second, whoever put it off would be the first to
    find it, each time, and the engine that it waits for never."""
    half_done(queue, is_published=True)
    other = Engine(queue, "other", fingerprint="model-b")
    delayed, waits_ms = f"{queue.keys.prefix}delayed", []
    for _ in range(30):
        assert other.claim_ids() == []
        seconds, microseconds = redis_client.time()
        waits_ms.append((redis_client.zscore(delayed, "a") or 0.0) - seconds * 1000 - microseconds / 1000)
        redis_client.zadd(delayed, {"a": 1})
    assert min(waits_ms) < 100 < max(waits_ms) <= 1024


def test_many_of_them_keep_neither_their_tenant_nor_others_from_their_turn(queue: JobQueue) -> None:
    first = Engine(queue, "first")
    submit(queue, *(f"seen{i}" for i in range(100)), tenant="a")
    for job in first.claim(100):
        first.show(job, 0, [1], "x")
        first.release(job)
    for tenant in ("a", "b"):
        submit(queue, *(f"{tenant}{i}" for i in range(20)), tenant=tenant)
    claimed = [job_id[0] for job_id in Engine(queue, "other", fingerprint="model-b").claim_ids(20)]
    assert (claimed.count("a"), claimed.count("b")) == (10, 10)
