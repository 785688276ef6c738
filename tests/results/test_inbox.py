from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from millrace.results.connection import connect
from millrace.results.messages import JobError, JobId
from millrace.results.queue import JobQueue
from millrace.results.replies import Outcome
from tests.processes import wait_until
from tests.results.engines import Engine, outcomes, submission, submit

ERROR = JobError(kind="invalid_request", message="prompt: must not be empty", field="prompt")


def post(client: redis.Redis, queue: JobQueue, body: bytes) -> str:
    entry_id = client.xadd(queue.keys.inbox, {"job": body})
    assert isinstance(entry_id, bytes)
    return entry_id.decode()


def the_rejected(client: Any, queue: JobQueue) -> dict[bytes, bytes]:
    """The fields of the one rejected entry."""
    ((_, fields),) = client.xrange(queue.keys.rejected)
    return dict(fields)


def test_the_inbox_is_read_in_order_and_from_a_place(queue: JobQueue, redis_client: redis.Redis) -> None:
    first, second = (post(redis_client, queue, body) for body in (b"1", b"2"))
    redis_client.xadd(queue.keys.inbox, {"something": "else"})
    assert [(entry.entry_id, entry.raw) for entry in queue.read_inbox("0", 2)] == [(first, b"1"), (second, b"2")]
    assert [entry.raw for entry in queue.read_inbox(first, 10)] == [b"2", b""]
    assert queue.read_inbox(queue.read_inbox(first, 10)[-1].entry_id, 10, block_ms=1) == []


def test_an_accepted_entry_becomes_a_job_once(queue: JobQueue, engine: Engine, redis_client: redis.Redis) -> None:
    entry_id = post(redis_client, queue, b"{}")
    assert (queue.stats().inbox, queue.stats().queued) == (1, 0)
    assert [queue.accept(entry_id, submission("a")), queue.accept(entry_id, submission("a"))] == outcomes(
        ["created", "taken"]
    )
    assert (queue.stats().inbox, queue.stats().queued) == (0, 1)
    assert queue.wait_for_signal(engine.id, 1, include_wake=True) == "wake"
    assert engine.claim_ids() == ["a"]


def test_an_entry_that_another_engine_had_becomes_no_job(queue: JobQueue, redis_client: redis.Redis) -> None:
    entry_id = post(redis_client, queue, b"{}")
    redis_client.xdel(queue.keys.inbox, entry_id)
    submit(queue, "known")
    for job in (submission("new"), submission("known")):
        assert queue.accept(entry_id, job) == Outcome("taken")
    assert not redis_client.exists(queue.keys.job("new"), queue.keys.body("new"), queue.keys.rejected)
    assert queue.stats().queued == 1


def test_an_entry_of_a_known_job_is_that_job(queue: JobQueue, redis_client: redis.Redis) -> None:
    submit(queue, "a")
    assert queue.accept(post(redis_client, queue, b"{}"), submission("a")) == Outcome("exists")
    assert redis_client.xlen(queue.keys.rejected) == 0


def test_an_entry_with_the_id_of_another_job_stays_and_leaves_that_job_alone(
    queue: JobQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "a")
    entry_id = post(redis_client, queue, b"{}")
    assert queue.accept(entry_id, submission("a", body=b'{"prompt":"other"}')) == Outcome("conflict")
    assert [entry.entry_id for entry in queue.read_inbox("0", 64)] == [entry_id]
    assert engine.claim_ids() == ["a"]


def test_a_malformed_entry_with_an_id_fails_under_that_id(queue: JobQueue, redis_client: redis.Redis) -> None:
    entry_id = post(redis_client, queue, b"broken")
    assert queue.reject(entry_id, JobId("a"), b"broken", ERROR) == "failed"
    assert queue.reject(entry_id, JobId("a"), b"broken", ERROR) == "taken"
    job = queue.get("a")
    assert (job.state, job.error, job.finish_reason, job.text) == ("failed", ERROR, "error", "")
    assert queue.reject(post(redis_client, queue, b"broken"), JobId("a"), b"broken", ERROR) == "exists"
    assert redis_client.xlen(queue.keys.inbox) == 0


def test_a_malformed_entry_without_an_id_is_put_aside_with_the_reason(
    queue: JobQueue, redis_client: redis.Redis
) -> None:
    raw = b"\xff" * 100_000
    assert queue.reject(post(redis_client, queue, raw), None, raw, ERROR) == "rejected"
    fields = the_rejected(redis_client, queue)
    assert fields[b"raw"] == raw[:4096]
    assert b"must not be empty" in fields[b"error"]


def test_a_malformed_entry_with_the_id_of_a_job_leaves_that_job_alone(
    queue: JobQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "a")
    assert queue.reject(post(redis_client, queue, b"broken"), JobId("a"), b"broken", ERROR) == "rejected"
    assert queue.get("a").state == "queued"
    assert engine.claim_ids() == ["a"]


def test_the_rejected_entries_are_bounded(queue: JobQueue, redis_client: redis.Redis) -> None:
    for _ in range(1300):
        queue.reject(post(redis_client, queue, b"x"), None, b"x", ERROR)
    assert redis_client.xlen(queue.keys.rejected) == 1000


def test_the_rejected_entries_are_bounded_in_bytes_and_in_time(queue: JobQueue, redis_client: redis.Redis) -> None:
    long_error = JobError(kind="invalid_request", message="x" * 5000)
    for _ in range(1200):
        queue.reject(post(redis_client, queue, b"x"), None, b"x" * 4096, long_error)
    assert (redis_client.memory_usage(queue.keys.rejected, samples=0) or 0) < 6 * 1024 * 1024
    assert 6 * 86_400_000 < redis_client.pttl(queue.keys.rejected) <= 7 * 86_400_000


def test_a_read_of_the_inbox_is_bounded_in_bytes(queue: JobQueue, redis_client: redis.Redis) -> None:
    ids = [post(redis_client, queue, b"%d" % number * 1_000_000) for number in range(9)]
    entries = queue.read_inbox("0", 64)
    assert [entry.entry_id for entry in entries] == ids[:5]
    assert [entry.raw[:1] for entry in queue.read_inbox(ids[4], 64)] == [b"5", b"6", b"7", b"8"]


def test_the_body_of_an_oversized_entry_is_not_sent(queue: JobQueue, redis_client: redis.Redis) -> None:
    post(redis_client, queue, b"x" * 100)
    post(redis_client, queue, b"y" * 8_000_000)
    post(redis_client, queue, b"z" * 100)
    entries = queue.read_inbox("0", 64, max_body_bytes=5000)
    entries += queue.read_inbox(entries[-1].entry_id, 64, max_body_bytes=5000)
    assert [(entry.num_bytes, entry.raw) for entry in entries] == [
        (100, b"x" * 100),
        (8_000_000, b"y" * 4096),
        (100, b"z" * 100),
    ]


@pytest.mark.parametrize("num_bytes", [3, 50_000_000])
def test_a_reader_that_waits_gets_an_entry_when_it_comes_and_no_oversized_body(
    num_bytes: int, queue: JobQueue, redis_client: redis.Redis, redis_url: str
) -> None:
    waiting = JobQueue(connect(redis_url, blocking=True), queue.keys.queue)
    with ThreadPoolExecutor(1) as pool:
        entries = pool.submit(waiting.read_inbox, "0-0", 1, 5000)
        wait_until(lambda: any(client["cmd"] == "xread" for client in redis_client.client_list()))
        before = redis_client.info("stats")["total_net_output_bytes"]
        post(redis_client, queue, b"x" * num_bytes)
        ((entry,),) = (entries.result(),)
        sent = redis_client.info("stats")["total_net_output_bytes"] - before
    waiting.close()
    assert (entry.num_bytes, entry.raw) == (num_bytes, b"x" * min(num_bytes, 4096))
    assert sent < 1_000_000
