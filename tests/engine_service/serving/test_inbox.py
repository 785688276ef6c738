"""The inbox at the limits of the queue: which entries wait, which ones they delay, and in which order they are taken."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest
import redis

from millrace.engine_service.serving.inbox import Inbox
from millrace.producer.request import GenerationRequest
from millrace.producer.wire import parse_body
from millrace.results.connection import connect
from tests.processes import wait_until
from tests.results.engines import submit
from tests.results.full_queue import FullQueue


@pytest.fixture
def queue(redis_url: str, queue_name: str) -> Iterator[FullQueue]:
    queue = FullQueue(connect(redis_url), queue_name)
    yield queue
    queue.close()


@pytest.fixture
def inbox(redis_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inbox]:
    """Not started, with a connection of its own."""
    monkeypatch.setattr("millrace.engine_service.serving.inbox._BLOCK_MS", 50)
    for module in ("results.outage", "engine_service.serving.inbox"):
        monkeypatch.setattr(f"millrace.{module}.RETRY_S", 0.05)
    queue = FullQueue(connect(redis_url), queue_name)
    inbox = Inbox(queue)
    yield inbox
    inbox.stop()
    if inbox.thread.ident is not None:
        inbox.thread.join()
    queue.close()


def post(client: redis.Redis, queue: FullQueue, *names: str) -> None:
    """Into the inbox, each as a job of the tenant that its name begins with."""
    for name in names:
        client.xadd(queue.keys.inbox, {"job": f'{{"id":"{name}","prompt":"x","tenant":"{name[0]}"}}'})


@pytest.mark.parametrize("limit", ["tenant_max_queued_jobs", "tenant_max_queued_tokens", "max_queued_tokens"])
def test_what_has_to_wait_in_the_inbox_keeps_nobody_else_out(
    limit: str, inbox: Inbox, queue: FullQueue, redis_client: redis.Redis
) -> None:
    num_waiting = 150
    redis_client.hset(queue.keys.settings, limit, 1 if limit.endswith("jobs") else 40)
    submit(queue, "x", tenant="x", cost=10)
    for i in range(num_waiting):
        redis_client.xadd(queue.keys.inbox, {"job": b'{"id":"x%d","prompt":"x","tenant":"x","max_tokens":35}' % i})
    inbox.start()
    redis_client.xadd(queue.keys.inbox, {"job": b'{"id":"bad","prompt":""}'})
    redis_client.xadd(queue.keys.inbox, {"job": b'{"id":"y","prompt":"y","tenant":"y","max_tokens":8}'})
    wait_until(lambda: redis_client.hget(queue.keys.job("y"), "state") == b"queued")
    assert queue.get("bad").state == "failed"
    assert redis_client.xlen(queue.keys.inbox) == num_waiting
    redis_client.hdel(queue.keys.settings, limit)
    wait_until(lambda: redis_client.xlen(queue.keys.inbox) == 0)
    assert queue.stats().queued == num_waiting + 2


@pytest.mark.parametrize("fields", [{"data": '{"id":"a","prompt":"x"}'}, {"job": ""}])
def test_an_entry_without_a_request_is_rejected_by_the_name_of_the_field(
    fields: dict[str, str], inbox: Inbox, queue: FullQueue, redis_client: redis.Redis
) -> None:
    redis_client.xadd(queue.keys.inbox, cast(Any, fields))
    inbox.start()
    wait_until(lambda: redis_client.xlen(queue.keys.rejected) == 1)
    ((_, entry),) = cast(Any, redis_client.xrange(queue.keys.rejected))
    assert json.loads(entry[b"error"])["message"].startswith("job: is missing or empty")


def test_an_entry_with_the_id_of_another_job_is_rejected_as_it_came(
    inbox: Inbox, queue: FullQueue, redis_client: redis.Redis
) -> None:
    for raw in (b'{"id":"a","prompt":"x"}', b'{ "deadline_s":60, "id":"a", "prompt":"other", "temperature":1.0}'):
        redis_client.xadd(queue.keys.inbox, {"job": raw})
    inbox.start()
    wait_until(lambda: redis_client.xlen(queue.keys.rejected) == 1)
    ((_, entry),) = cast(Any, redis_client.xrange(queue.keys.rejected))
    assert (entry[b"id"], entry[b"raw"]) == (b"a", raw)
    assert json.loads(entry[b"error"])["field"] == "id"
    assert queue.get("a").state == "queued" and redis_client.xlen(queue.keys.inbox) == 0


def test_a_long_line_in_the_inbox_is_not_looked_at_again_and_again(
    inbox: Inbox, queue: FullQueue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: Counter[bytes] = Counter()

    def count(raw: bytes) -> GenerationRequest:
        looks[raw] += 1
        return parse_body(raw)

    monkeypatch.setattr("millrace.engine_service.serving.inbox.parse_body", count)
    monkeypatch.setattr("millrace.engine_service.serving.inbox._REST", 1_000_000)
    monkeypatch.setattr("millrace.engine_service.serving.inbox._MAX_REST_S", 1_000_000)
    redis_client.hset(queue.keys.settings, "tenant_max_queued_jobs", 1)
    submit(queue, "x", tenant="x")
    line = [b'{"id":"x%d","prompt":"x","tenant":"x"}' % number for number in range(300)]
    for raw in line:
        redis_client.xadd(queue.keys.inbox, {"job": raw})
    inbox.start()
    wait_until(lambda: looks[line[-1]])
    for number in range(5):  # the first goes as soon as there is room, and so does who comes last
        redis_client.xadd(queue.keys.inbox, {"job": f'{{"id":"y{number}","prompt":"y","tenant":"y{number}"}}'})
        queue.cancel(f"x{number - 1}" if number else "x")
        for name in (f"x{number}", f"y{number}"):
            wait_until(partial(redis_client.exists, queue.keys.job(name)))
    assert looks[line[10]] > 5
    assert {looks[raw] for raw in line[100:]} == {1}


def test_room_is_found_for_one_in_the_middle_of_a_long_line(
    inbox: Inbox, queue: FullQueue, redis_client: redis.Redis
) -> None:
    redis_client.hset(queue.keys.settings, "tenant_max_queued_jobs", 1)
    submit(queue, "x", tenant="x")
    submit(queue, "y", tenant="y")
    for tenant in "x" * 100 + "y" + "x" * 100 + "z":
        redis_client.xadd(queue.keys.inbox, {"job": f'{{"id":"{tenant}-waits","prompt":"x","tenant":"{tenant}"}}'})
    inbox.start()
    wait_until(partial(redis_client.exists, queue.keys.job("z-waits")))
    queue.cancel("y")
    wait_until(partial(redis_client.exists, queue.keys.job("y-waits")))


def test_nobody_is_overtaken_by_newer_jobs_of_the_same_tenant(
    inbox: Inbox, queue: FullQueue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.engine_service.serving.inbox._REST", 1_000_000)
    monkeypatch.setattr("millrace.engine_service.serving.inbox._MAX_REST_S", 0.3)
    redis_client.hset(queue.keys.settings, "tenant_max_queued_jobs", 1)
    submit(queue, "x", tenant="x")
    submit(queue, "y", tenant="y")
    for tenant, name in [("x", f"x{n}") for n in range(100)] + [("y", "y0"), ("y", "y1"), ("z", "z")]:
        redis_client.xadd(queue.keys.inbox, {"job": f'{{"id":"{name}","prompt":"x","tenant":"{tenant}"}}'})
    inbox.start()
    wait_until(partial(redis_client.exists, queue.keys.job("z")))
    came = ["y"]
    for number in range(3):
        redis_client.xadd(queue.keys.inbox, {"job": f'{{"id":"y{number + 2}","prompt":"x","tenant":"y"}}'})
        queue.cancel(came[-1])
        wait_until(lambda: redis_client.exists(queue.keys.prefix + "ready:y"))
        members: Any = redis_client.zrange(queue.keys.prefix + "ready:y", 0, -1)
        came += [member.decode().rpartition(":")[2] for member in members]
    assert came == ["y", "y0", "y1", "y2"]


def test_who_meets_the_queues_limit_goes_on_as_soon_as_there_is_room(
    inbox: Inbox, queue: FullQueue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody's entries are skipped behind the one at which a look has stopped, so none of its tenant overtakes it."""
    monkeypatch.setattr("millrace.engine_service.serving.inbox._REST", 1_000_000)
    redis_client.hset(queue.keys.settings, mapping={"tenant_max_queued_jobs": 2, "max_queued_jobs": 3})
    submit(queue, "first", "second", tenant="x")
    post(redis_client, queue, *(f"x{number}" for number in range(100)), "z0", "z1", "z2", "z3")
    for number in range(4):
        inbox._take_all(queue.read_inbox("0", 64))
        assert queue.cancel(f"z{number}") == "cancelled"


def test_nobody_is_overtaken_after_a_look_that_the_queues_limit_has_stopped(
    inbox: Inbox, queue: FullQueue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.engine_service.serving.inbox._REST", 1_000_000)
    monkeypatch.setattr("millrace.engine_service.serving.inbox._MAX_REST_S", 0)
    redis_client.hset(queue.keys.settings, "tenant_max_queued_jobs", 1)
    submit(queue, "x", tenant="x")
    submit(queue, "y", tenant="y")
    post(redis_client, queue, *(f"x{number}" for number in range(100)), "y0")
    assert not inbox._take_all(queue.read_inbox("0", 64))
    monkeypatch.setattr("millrace.engine_service.serving.inbox._MAX_REST_S", 1_000_000)
    redis_client.hset(queue.keys.settings, "max_queued_jobs", 2)
    assert not inbox._take_all(queue.read_inbox("0", 64))
    redis_client.hdel(queue.keys.settings, "max_queued_jobs")
    queue.cancel("y")
    post(redis_client, queue, "y1")
    assert inbox._take_all(queue.read_inbox("0", 64))
    assert (queue.get("y0").state, redis_client.exists(queue.keys.job("y1"))) == ("queued", 0)


def test_a_job_too_large_for_its_tenants_room_keeps_no_smaller_one_out(
    inbox: Inbox, queue: FullQueue, redis_client: redis.Redis
) -> None:
    redis_client.hset(queue.keys.settings, "tenant_max_queued_tokens", 40)
    submit(queue, "first", cost=10)
    for name, max_tokens in (("large", 35), ("small", 8)):
        body = f'{{"id":"{name}","prompt":"x","max_tokens":{max_tokens}}}'
        redis_client.xadd(queue.keys.inbox, {"job": body})
    inbox.start()
    wait_until(partial(redis_client.exists, queue.keys.job("small")))
    assert redis_client.xlen(queue.keys.inbox) == 1


def test_a_job_for_which_there_never_is_room_fails(inbox: Inbox, queue: FullQueue, redis_client: redis.Redis) -> None:
    redis_client.hset(queue.keys.settings, "max_queued_tokens", 40)
    redis_client.xadd(queue.keys.inbox, {"job": b'{"id":"large","prompt":"x","max_tokens":100}'})
    inbox.start()
    wait_until(partial(redis_client.exists, queue.keys.job("large")))
    job = queue.get("large")
    assert job.error is not None
    assert (job.state, job.error.kind, job.error.field) == ("failed", "invalid_request", "max_tokens")
    assert redis_client.xlen(queue.keys.inbox) == 0


def test_a_full_queue_leaves_the_inbox_as_it_is_until_there_is_room(
    inbox: Inbox, queue: FullQueue, redis_client: redis.Redis
) -> None:
    redis_client.hset(queue.keys.settings, "max_queued_jobs", 1)
    for name in "abc":
        redis_client.xadd(queue.keys.inbox, {"job": f'{{"id":"{name}","prompt":"x"}}'})
    inbox.start()
    for name in "abc":
        wait_until(partial(redis_client.exists, queue.keys.job(name)))
        assert queue.stats().queued == 1
        queue.cancel(name)


def test_an_oversized_entry_fails_under_its_id_with_the_limit(
    inbox: Inbox, queue: FullQueue, redis_client: redis.Redis
) -> None:
    redis_client.xadd(queue.keys.inbox, {"job": b'{"id":"large","prompt":"' + b"x" * 3_000_000 + b'"}'})
    redis_client.xadd(queue.keys.inbox, {"job": b'{"prompt":"' + b"x" * 3_000_000 + b'","meta":{"id":"y"}}'})
    post(redis_client, queue, "next")
    inbox.start()
    wait_until(partial(redis_client.exists, queue.keys.job("next")))
    job = queue.get("large")
    assert job.error is not None
    assert (job.state, job.error.kind, job.error.field) == ("failed", "invalid_request", "body")
    assert "3000026 bytes" in job.error.message
    assert "1048576" in job.error.message
    assert redis_client.xlen(queue.keys.rejected) == 1


def test_a_full_inbox_of_large_entries_takes_little_memory_of_the_engine(
    inbox: Inbox, queue: FullQueue, redis_client: redis.Redis
) -> None:
    for number in range(24):
        redis_client.xadd(queue.keys.inbox, {"job": b'{"id":"%d","prompt":"' % number + b"x" * 4_000_000 + b'"}'})
    tracemalloc.start()
    inbox.start()
    wait_until(lambda: redis_client.xlen(queue.keys.inbox) == 0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert queue.get("23").state == "failed"
    assert peak_bytes < 16_000_000
