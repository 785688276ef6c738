"""Records and arguments that somebody else has written: they cost nobody else, and their errors are short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from millrace import Client
from millrace.results import commands
from millrace.results.errors import QueueError
from tests.results.engines import Engine, submit
from tests.results.full_queue import FullQueue

GARBAGE = b"\xff\n'garbage'" * 100_000


@pytest.fixture
def queue(redis_client: redis.Redis, queue_name: str) -> FullQueue:
    """Not checked at the end: what a test has written does not agree."""
    return FullQueue(redis_client, queue_name)


def check_error(error: BaseException) -> None:
    assert isinstance(error, QueueError)
    assert len(str(error)) < 500
    assert str(error).isprintable()


@pytest.mark.parametrize("limit", [0, -1, 0.5, 10_001, "many"])
@pytest.mark.parametrize("state", ["queued", "delayed", "running"])
def test_a_list_of_no_jobs_is_refused(state: str, limit: Any, queue: FullQueue) -> None:
    submit(queue, "a", "b")
    with pytest.raises(QueueError, match="limit: must be an integer from 1 to 10000"):
        queue._send(commands.list_jobs(queue.keys, state, limit))


def test_a_list_of_what_has_ended_is_refused(queue: FullQueue) -> None:
    with pytest.raises(QueueError, match="state: must be queued, delayed or running"):
        queue._send(commands.list_jobs(queue.keys, "failed", 10))


@pytest.mark.parametrize("garbage", [GARBAGE, b"abc", b""])
@pytest.mark.parametrize(
    "field", ["state", "created", "ended", "attempt", "deadline", "retries", "trimmed", "batch", "redrive_of"]
)
def test_a_corrupt_record_is_a_short_error_for_each_reader(
    field: str, garbage: bytes, queue: FullQueue, engine: Engine, redis_client: redis.Redis, redis_url: str
) -> None:
    submit(queue, "a", batch="b")
    engine.finish(engine.claim_one(), state="failed")
    redis_client.hset(queue.keys.job("a"), field, garbage)
    with Client(redis_url, queue=queue.keys.queue) as client:
        calls: list[Callable[[], object]] = [
            lambda: queue.get("a"),
            lambda: queue.position("a"),
            lambda: queue.redrive("a"),
            lambda: queue.cancel("a"),
            lambda: client.wait("a", 0.01),
            lambda: client.list_jobs("failed"),
        ]
        if field != "state":
            calls.append(lambda: list(client.stream("a")))
        for call in calls:
            try:
                call()
            except Exception as error:
                check_error(error)


@pytest.mark.parametrize("entry", [{"offset": "x", "text": "t"}, {"offset": "0"}, {"offset": "0", "tokens": GARBAGE}])
def test_a_corrupt_event_is_a_short_error(
    entry: dict[Any, Any], queue: FullQueue, redis_client: redis.Redis, redis_url: str
) -> None:
    submit(queue, "a")
    redis_client.xadd(queue.keys.result("a"), entry)
    with Client(redis_url, queue=queue.keys.queue) as client:
        for read in (lambda: queue.get("a"), lambda: next(client.stream("a"))):
            with pytest.raises(QueueError, match="corrupt") as caught:
                read()
            check_error(caught.value)


@pytest.mark.parametrize("garbage", ["abc", ""])
@pytest.mark.parametrize(
    "field", ["base", "crashes", "false_starts", "deadline", "attempt", "priority", "serial", "cost", "published"]
)
def test_a_corrupt_record_keeps_no_other_job_from_an_engine(
    field: str, garbage: str, queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    """Neither in the recovery of dead engines, nor in heartbeats and claims."""
    other = Engine(queue)
    submit(queue, "a", "b")
    assert len(other.claim(2)) == 2
    redis_client.hset(queue.keys.job("a"), field, garbage)
    other.die()
    assert [one.num_jobs for one in queue.recover()] == [2]
    redis_client.hset(queue.keys.job("a"), "priority", "abc")
    redis_client.zadd(f"{queue.keys.prefix}deadlines", {"a": 1})
    engine.beat()
    assert "b" in engine.claim_ids()
    assert queue.deregister(engine.id) >= 1
