"""Batches, places in the queue, redriven jobs, records that outlive results, and producers newer than the engine."""

from __future__ import annotations

import time

import msgspec
import pytest
import redis

from millrace.results import commands
from millrace.results.errors import BatchNotFound, CannotRedrive, JobNotFound
from millrace.results.messages import Event, JobError
from tests.results.engines import Engine, listed, outcomes, submission, submit
from tests.results.full_queue import FullQueue


def test_a_batch_counts_its_jobs_by_state(queue: FullQueue, engine: Engine) -> None:
    submit(queue, *(f"j{i}" for i in range(6)), batch="nightly")
    submit(queue, "late", batch="nightly", delay_ms=3_600_000)
    submit(queue, "other", batch="another")
    jobs = engine.claim(4)
    engine.finish(jobs[0])
    engine.finish(jobs[1], state="failed")
    queue.cancel("j5")
    status = queue.batch_status("nightly")
    assert (status.queued, status.delayed, status.running) == (1, 1, 2)
    assert (status.finished, status.failed, status.cancelled) == (1, 1, 1)
    assert (status.total, status.num_open, status.is_done) == (7, 4, False)
    assert queue.get("j0").batch == "nightly"
    assert queue.get("other").batch == "another"


def test_the_same_job_again_is_counted_once_and_stays_in_its_batch(queue: FullQueue) -> None:
    assert queue.submit([submission("a", batch="b"), submission("a", batch="b")]) == outcomes(["created", "exists"])
    assert queue.submit([submission("a", batch="c")]) == outcomes(["exists"])
    assert queue.batch_status("b").total == 1
    with pytest.raises(BatchNotFound, match="'c'"):
        queue.batch_status("c")


def test_a_batch_that_has_ended_goes_with_its_records_and_opens_again_for_more(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "a", batch="b")
    engine.finish(engine.claim_one())
    assert queue.batch_status("b").is_done
    assert queue.batch_status("b").eta_s == 0
    assert redis_client.ttl(queue.keys.prefix + "batch:b") > 0
    assert redis_client.ttl(queue.keys.members("b")) > 0
    submit(queue, "b", batch="b")
    assert redis_client.ttl(queue.keys.prefix + "batch:b") == -1
    assert queue.batch_status("b").total == 2


# --- places --------------------------------------------------------------------------------------------------------


def test_a_place_counts_who_comes_first(queue: FullQueue, engine: Engine) -> None:
    submit(queue, *(f"x{i}" for i in range(10)), tenant="x")
    submit(queue, "urgent", tenant="x", priority=-1)
    assert queue.position("x0").num_ahead == 1
    assert queue.position("urgent").num_ahead == 0
    assert queue.position("x0").eta_s is None, "nothing has ended yet"
    submit(queue, *(f"y{i}" for i in range(3)), tenant="y")
    assert queue.position("x5").num_ahead == 6 + 3, "the other tenant is served as much, and has no more"
    assert queue.position("y2").num_ahead == 2 + 2
    engine.finish(engine.claim_one())
    place = queue.position("x9")
    assert place.eta_s is not None
    assert place.eta_s >= 0
    assert queue.position("urgent").num_ahead is None
    with pytest.raises(JobNotFound):
        queue.position("nobody")


def test_a_delayed_job_begins_when_it_is_due_and_a_paused_queue_never(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "late", delay_ms=3_600_000)
    place = queue.position("late")
    assert (place.state, place.num_ahead) == ("delayed", None)
    assert place.eta_s == pytest.approx(3600, abs=60)
    submit(queue, "a", "b")
    engine.finish(engine.claim_one())
    queue.pause(True)
    assert queue.position("b").eta_s is None


def test_a_batch_takes_as_long_as_what_is_in_front_of_it_and_as_its_delays(queue: FullQueue, engine: Engine) -> None:
    queue.submit([submission(f"x{i}") for i in range(200)])
    submit(queue, "b1", "b2", batch="b")
    submit(queue, "late", batch="later", delay_ms=3_600_000)
    assert queue.batch_status("b").eta_s is None, "nothing has ended yet"
    for job in engine.claim(20):
        engine.finish(job)
    in_front, own = queue.position("b2").eta_s, queue.batch_status("b").eta_s
    assert in_front is not None
    assert own is not None
    assert own >= 0.9 * in_front > 0
    assert queue.batch_status("later").eta_s == pytest.approx(3600, abs=60)
    queue.pause(True)
    assert queue.batch_status("b").eta_s is None


def test_jobs_that_end_in_one_moment_have_taken_their_time(queue: FullQueue, engine: Engine) -> None:
    queue.submit([submission(f"x{i}") for i in range(40)])
    jobs = engine.claim(8)
    time.sleep(0.4)
    for job in jobs:
        engine.finish(job)
    eta_s = queue.position("x39").eta_s
    assert eta_s is not None
    assert eta_s >= 0.4 * 31 / 8


def test_what_ended_before_jobs_waited_says_nothing_about_the_pace(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "old")
    engine.finish(engine.claim_one())
    ended_ms = queue.get("old").timings.ended_ms
    assert ended_ms is not None
    while redis_client.time()[0] * 1000 + redis_client.time()[1] // 1000 <= ended_ms:  # the next millisecond
        pass
    submit(queue, "a", "b", "c", batch="b")
    assert queue.position("c").eta_s is None, "the engines may have been idle"
    assert queue.batch_status("b").eta_s is None
    engine.finish(engine.claim_one())
    place = queue.position("b")
    assert (place.num_ahead, queue.batch_status("b").eta_s is None) == (0, False)
    assert place.eta_s, "it begins when another job ends"


def test_the_pace_is_known_longer_than_the_records(queue: FullQueue, engine: Engine, redis_client: redis.Redis) -> None:
    queue.submit([submission(f"x{i}") for i in range(40)])
    for job in engine.claim(2):
        engine.finish(job)
        time.sleep(0.2)
    redis_client.delete(queue.keys.job("x0"), queue.keys.job("x1"))  # as their record TTL does
    eta_s = queue.position("x39").eta_s
    assert eta_s is not None
    assert eta_s >= 0.4 * 37 / 2


def test_many_cancellations_do_not_hide_the_pace(queue: FullQueue, engine: Engine) -> None:
    queue.submit([submission(f"x{i}") for i in range(602)])
    engine.finish(engine.claim_one())
    for number in range(1, 601):
        queue.cancel(f"x{number}")
    assert queue.position("x601").eta_s is not None


# --- redrive -------------------------------------------------------------------------------------------------------


def failed(queue: FullQueue, engine: Engine, job_id: str) -> None:
    error = JobError(kind="internal", message="no luck")
    (job,) = [job for job in engine.claim() if job.job_id == job_id]
    engine.finish(job, state="failed", reason="error", error=error)


def test_a_failed_job_runs_again_as_a_new_one_that_both_records_name(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    options = {"tenant": "t", "priority": 3, "batch": "b", "meta": b'{"a":1}', "deadline_ms": 60_000, "max_retries": 5}
    submit(queue, "a", body=b'{"prompt":"same"}', **options)
    failed(queue, engine, "a")
    assert redis_client.zrange(queue.keys.dead, 0, -1) == [b"a"]
    assert queue.redrive("a") == queue.redrive("a") == "a.r1"
    assert redis_client.zcard(queue.keys.dead) == 0
    old, new = queue.get("a"), queue.get("a.r1")
    assert (old.state, old.redriven_as, new.state, new.redrive_of) == ("failed", "a.r1", "queued", "a")
    assert (new.batch, new.meta) == ("b", {"a": 1})
    assert new.timings.deadline_ms == new.timings.created_ms + 60_000
    assert queue.batch_status("b").total == 2
    job = engine.claim_one()
    assert (job.job_id, job.body, job.seed, job.attempt) == ("a.r1", b'{"prompt":"same"}', 7, 1)
    engine.finish(job, state="failed")
    assert queue.redrive("a.r1") == "a.r2"


def test_only_what_has_ended_badly_can_be_redriven(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", "b")
    with pytest.raises(CannotRedrive, match="'a' is queued"):
        queue.redrive("a")
    job = engine.claim_one()
    with pytest.raises(CannotRedrive, match="'a' is running"):
        queue.redrive("a")
    engine.finish(job)
    with pytest.raises(CannotRedrive, match="'a' is finished"):
        queue.redrive("a")
    queue.cancel("b")
    assert queue.redrive("b") == "b.r1"
    with pytest.raises(JobNotFound):
        queue.redrive("nobody")


def test_what_never_was_a_request_cannot_be_redriven(queue: FullQueue, redis_client: redis.Redis) -> None:
    entry_id = redis_client.xadd(queue.keys.inbox, {"job": "{"}).decode()  # type: ignore[union-attr]
    queue.reject(entry_id, submission("a").job_id, b"{", JobError(kind="invalid_request", message="no"))
    with pytest.raises(CannotRedrive, match="never had a valid request"):
        queue.redrive("a")
    submit(queue, "x" * 127)
    queue.cancel("x" * 127)
    with pytest.raises(CannotRedrive, match="too long for"):
        queue.redrive("x" * 127)


def test_an_id_that_looks_like_a_redrive_is_left_alone(queue: FullQueue) -> None:
    submit(queue, "a.r1", "a")
    queue.cancel("a")
    queue.cancel("a.r1")
    assert queue.redrive("a") == "a.r2"
    assert queue.redrive("a.r1") == "a.r1.r1"


# --- what is kept, and for how long --------------------------------------------------------------------------------


def test_a_record_can_outlive_its_result(queue: FullQueue, engine: Engine, redis_client: redis.Redis) -> None:
    redis_client.hset(queue.keys.settings, mapping={"result_ttl_ms": 60_000, "record_ttl_ms": 600_000})
    submit(queue, "a", meta=b'{"k":"v"}')
    engine.finish(engine.claim_one(), Event(offset=0, token_ids=[1], text="x"))
    assert redis_client.ttl(queue.keys.result("a")) <= 60
    assert all(redis_client.ttl(queue.keys.prefix + kind + ":a") > 60 for kind in ("job", "body", "meta"))
    assert queue.get("a").has_result
    redis_client.rename(queue.keys.result("a"), queue.keys.result("moved"))  # as if its time had passed
    job = queue.get("a")
    assert (job.state, job.text, job.has_result, job.meta) == ("finished", "", False, {"k": "v"})
    redis_client.rename(queue.keys.result("moved"), queue.keys.result("a"))


def test_the_list_of_failed_jobs_loses_old_ones_a_few_at_a_time_and_expires_after_the_last_record(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    dead = queue.keys.dead
    redis_client.zadd(dead, {f"old{number}": number for number in range(600)})
    for record_ttl_ms, num_left in ((600_000, 345), (60_000, 90), (600_000, 3)):
        redis_client.hset(queue.keys.settings, mapping={"result_ttl_ms": 1000, "record_ttl_ms": record_ttl_ms})
        submit(queue, f"a{num_left}")
        engine.finish(engine.claim_one(), state="failed")
        assert redis_client.zcard(dead) == num_left
        assert 500 < redis_client.ttl(dead) <= 600


def test_a_short_record_ttl_never_cuts_the_result(queue: FullQueue, engine: Engine, redis_client: redis.Redis) -> None:
    redis_client.hset(queue.keys.settings, mapping={"result_ttl_ms": 60_000, "record_ttl_ms": 1})
    submit(queue, "a")
    engine.finish(engine.claim_one())
    assert queue.get("a").state == "finished"


def test_a_job_of_a_newer_producer_is_told_from_ours_given_back_and_kept_as_it_was(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "new", "old")
    redis_client.hset(queue.keys.job("new"), mapping={"v": "2", "colour": "red"})
    new, old = engine.claim()
    assert (new.protocol, old.protocol) == (2, 1)
    assert engine.release(new, delay_ms=60_000) == "ok"
    assert queue.get("new").state == "delayed"
    assert queue.get("new").attempt == 0
    redis_client.zadd(f"{queue.keys.prefix}delayed", {"new": 1})
    again = engine.claim_one()
    assert msgspec.structs.replace(again, lease=new.lease) == new
    engine.finish(again)
    assert redis_client.hmget(queue.keys.job("new"), "v", "colour") == [b"2", b"red"]


def test_a_redriven_job_of_a_newer_version_stays_one(queue: FullQueue, redis_client: redis.Redis) -> None:
    submit(queue, "a")
    redis_client.hset(queue.keys.job("a"), "v", 2)
    queue.cancel("a")
    assert redis_client.hget(queue.keys.job(queue.redrive("a")), "v") == b"2"


def test_a_job_is_listed_though_many_have_ended_since(queue: FullQueue) -> None:
    engine = Engine(queue)
    submit(queue, "a")
    queue.cancel("a")
    submit(queue, *(f"x{number}" for number in range(1200)))
    for job in engine.claim(1200):
        engine.finish(job)
    assert listed(queue, "cancelled", 1) == ["a"]
    assert len(listed(queue, "finished", 1100)) == 1100
    assert listed(queue, "ended", 2000)[-1] == "a"


def test_jobs_that_ended_are_listed_once_if_they_have_a_record(queue: FullQueue, engine: Engine) -> None:
    submit(queue, *(f"x{number}" for number in range(200)))
    for job in engine.claim(200):
        engine.finish(job, state="failed" if job.job_id == "x7" else "finished")
    for number in range(100, 198):
        queue._send(commands.delete(queue.keys, f"x{number}"))
    assert listed(queue, "ended", 4) == ["x7", "x199", "x198", "x99"]
    queue.redrive("x7")
    assert listed(queue, "ended", 200) == ["x199", "x198", *(f"x{number}" for number in range(99, -1, -1))]


def test_failed_jobs_are_listed_however_many_others_have_ended_since(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", "b")
    for job in engine.claim():
        engine.finish(job, state="failed")
    queue.redrive("b")
    assert listed(queue, "failed") == ["a", "b"]
    engine.finish(engine.claim_one())
    for number in range(0, 1100, 100):
        queue.submit([submission(f"x{i}") for i in range(number, number + 100)])
        for job in engine.claim(100):
            engine.finish(job)
    assert listed(queue, "failed") == ["a", "b"]
