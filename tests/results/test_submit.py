from __future__ import annotations

import redis

from results.messages import Submission
from results.queue import JobQueue
from tests.results.engines import Engine, submission, submit


def test_a_new_job_is_queued_with_what_the_queue_has_to_know(queue: JobQueue, engine: Engine) -> None:
    job = submission("a", body=b'{"prompt":"x"}', cost=12, seed=2**63 - 1, is_streamed=True)
    assert queue.submit([job]) == ["created"]
    assert queue.get("a").state == "queued"
    claimed = engine.claim_one()
    assert (claimed.body, claimed.cost, claimed.seed) == (b'{"prompt":"x"}', 12, 2**63 - 1)
    assert (claimed.attempt, claimed.crash_count, claimed.token_ids, claimed.num_published) == (1, 0, [], 0)
    assert claimed.is_watched


def test_the_same_job_again_is_the_same_job_at_every_stage(queue: JobQueue, engine: Engine) -> None:
    job = submission("a")
    assert queue.submit([job, job]) == ["created", "exists"]
    claimed = engine.claim_one()
    assert queue.submit([job]) == ["exists"]
    engine.finish(claimed)
    assert queue.submit([job]) == ["exists"]
    assert queue.stats().queued == 0


def test_an_id_with_another_body_is_a_conflict_and_changes_nothing(queue: JobQueue, engine: Engine) -> None:
    other = submission("a", body=b'{"prompt":"other"}')
    assert queue.submit([submission("a"), other, submission("b")]) == ["created", "conflict", "created"]
    assert [job.body for job in engine.claim()] == [b'{"prompt":"hi"}'] * 2


def test_an_empty_submission_is_nothing(queue: JobQueue) -> None:
    assert queue.submit([]) == []


def test_the_wake_list_stays_short(queue: JobQueue, redis_client: redis.Redis) -> None:
    queue.submit([submission() for _ in range(500)])
    assert redis_client.llen(queue.keys.wake) == 64


def test_bodies_of_any_bytes_come_back_as_they_were(queue: JobQueue, engine: Engine) -> None:
    body = bytes(range(256)) * 100
    submit(queue, "a", body=body)
    assert engine.claim_one().body == body


def test_records_stay_small(queue: JobQueue, redis_client: redis.Redis) -> None:
    """In the compact form of Redis a record takes a third of the memory."""
    job = Submission(job_id=submission().job_id, body=b"{}", digest="f" * 64, cost=2**31, seed=2**63 - 1)
    queue.submit([job])
    assert redis_client.object("encoding", queue.keys.job(job.job_id)) == b"listpack"
