"""Damage to one job in Redis is that job's alone: it ends with a message or is dropped with a line in the log, and the other
jobs go on."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from rq import Queue, Retry
from rq.executions import ExecutionRegistry
from rq.job import Job
from rq.suspension import resume, suspend

from millrace.embedded import EmbeddedServer
from millrace.producer.rq.isolation import in_batches, is_outage
from millrace.results.errors import QueueError, RedisUnavailable
from millrace.results.messages import JobError
from tests.processes import wait_until
from tests.producer.rq.parts import (
    EchoEngine,
    GatewayProcess,
    answer_to,
    enqueue,
    enqueue_many,
    status_of,
    value_of,
    wait_for,
)

KEYS_OF_A_JOB: dict[str, Callable[[Job], str]] = {
    "hash": lambda job: job.key,
    "executions": lambda job: ExecutionRegistry.key_template.format(job.id),
    "dependents": lambda job: job.dependents_key,
    "dependencies": lambda job: job.dependencies_key,
    "results": lambda job: f"rq:results:{job.id}",
}
MAX_LINE = 500


class Served(NamedTuple):
    """An RQ queue with a gateway and an engine behind it."""

    queue: Queue
    engine: EchoEngine
    gateway: GatewayProcess

    @property
    def connection(self) -> redis.Redis:
        return self.queue.connection


@pytest.fixture
def served(rq_queue: Queue, engine: EchoEngine, gateway: GatewayProcess) -> Iterator[Served]:
    yield Served(rq_queue, engine, gateway)
    assert "Traceback" not in gateway.text()


def _unsent(queue: Queue, prompt: str = "hello", **options: Any) -> Job:
    """A job that is in Redis and in no queue."""
    job = queue.create_job("millrace.generate", kwargs={"prompt": prompt, "max_tokens": 8}, **options)
    job.save()
    return job


def _push(queue: Queue, *jobs: Job) -> None:
    """Put the jobs into the queue at once."""
    queue.connection.rpush(queue.key, *(job.id for job in jobs))


def _break(connection: redis.Redis, key: str) -> None:
    """Give the key another type."""
    connection.delete(key)
    connection.set(key, "damaged")


def _reason(job: Job) -> str:
    wait_for("failed", job)
    result = job.latest_result()
    assert result is not None
    reason = str(result.exc_string)
    assert len(reason) < MAX_LINE
    assert reason.isprintable()
    return reason


def _assert_right(*jobs: Job) -> None:
    wait_for("finished", *jobs)
    for job in jobs:
        assert value_of(job)["text"].startswith(answer_to("hello"))


def _assert_takes_jobs(served: Served) -> None:
    _assert_right(*enqueue_many(served.queue, 3))
    assert served.connection.llen(served.queue.intermediate_queue_key) == 0
    wait_until(lambda: _record(served) == {}, what="the end of all jobs")
    assert max(map(len, served.gateway.text().splitlines())) < MAX_LINE + 60  # with date, level and name


def _record(served: Served) -> dict[bytes, bytes]:
    """What the gateway has in its record of taken jobs."""
    found: dict[bytes, bytes] = {}
    for key in served.connection.keys(f"millrace:gateway:rq:taken:*:{served.queue.name}"):
        record: Any = served.connection.hgetall(key)
        found |= record
    return found


# --- keys of a wrong type ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["executions", "dependents", "results"])
@pytest.mark.parametrize("moment", ["queued", "started"])
def test_a_job_with_a_key_of_a_wrong_type_fails_and_the_others_finish(served: Served, name: str, moment: str) -> None:
    served.engine.hold()
    jobs = [_unsent(served.queue, retry=Retry(max=3)) for _ in range(10)]
    damaged, *others = jobs
    key = KEYS_OF_A_JOB[name](damaged)
    if moment == "queued":
        _break(served.connection, key)
        _push(served.queue, *jobs)
    else:
        _push(served.queue, *jobs)
        wait_until(lambda: len(served.engine.held) == 10, what="the claims")
        _break(served.connection, key)
    served.engine.let_go()
    _assert_right(*others)
    wait_for("failed", damaged)
    assert f"{key} is not a" in served.gateway.text()
    if name == "results":  # which is where the reason would be
        served.connection.delete(key)
    else:
        assert _reason(damaged).startswith(f"{key} is not a ")
        assert "delete this key" in _reason(damaged)
    assert damaged.id in served.queue.failed_job_registry
    _assert_takes_jobs(served)


@pytest.mark.parametrize("moment", ["queued", "started"])
def test_a_job_whose_hash_is_something_else_is_dropped(served: Served, moment: str) -> None:
    served.engine.hold()
    damaged, *others = jobs = [_unsent(served.queue) for _ in range(10)]
    if moment == "queued":
        _break(served.connection, damaged.key)
        _push(served.queue, *jobs)
    else:
        _push(served.queue, *jobs)
        wait_until(lambda: len(served.engine.held) == 10, what="the claims")
        _break(served.connection, damaged.key)
    wait_until(lambda: f"{damaged.key} is not a hash" in served.gateway.text(), what="the line in the log")
    served.engine.let_go()
    _assert_right(*others)
    assert served.connection.get(damaged.key) == b"damaged"
    _assert_takes_jobs(served)


@pytest.mark.parametrize("name", ["queue", "intermediate", "finished", "failed", "wip", "scheduled"])
def test_a_damaged_key_of_one_queue_stops_no_other_queue(
    engine: EchoEngine, rq_queue: Queue, redis_url: str, tmp_path: Path, name: str
) -> None:
    connection = rq_queue.connection
    damaged = Queue(rq_queue.name + "-damaged", connection=connection, serializer="json")
    key = {"queue": damaged.key, "intermediate": damaged.intermediate_queue_key}.get(name, f"rq:{name}:{damaged.name}")
    _break(connection, key)
    names = f"{damaged.name},{rq_queue.name}"
    with GatewayProcess(tmp_path / "log", redis_url, names, engine.queue.keys.queue) as gateway:
        gateway.wait_until_serving()
        if name != "queue":
            _assert_right(*enqueue_many(damaged, 3))
        _assert_right(*enqueue_many(rq_queue, 3))
        engine.errors["fails"] = JobError(kind="internal", message="out of luck")
        assert _reason(enqueue(rq_queue, job_id="fails")) == "failed: internal: out of luck"
        if name == "queue":
            wait_until(lambda: f"intake-{damaged.name}: WRONGTYPE" in gateway.text(), what="the line in the log")
            connection.delete(key)
            _assert_right(*enqueue_many(damaged, 3))
        assert "Traceback" not in gateway.text()


# --- fields of RQ's hash -------------------------------------------------------------------------------------------

MEGABYTE = b"x" * 1_000_000
FAILS = [
    ("status", b"no-such-status"),
    ("status", b"\xff\xfe"),
    ("status", MEGABYTE),
    ("created_at", b"the day before yesterday"),
    ("created_at", b"\xff\n\x1b[31m"),
    ("timeout", b"soon"),
    ("timeout", MEGABYTE),
    ("result_ttl", b"a\nb"),
    ("ttl", b"{}"),
    ("retries_left", b"many"),
    ("retry_intervals", b"[1"),
    ("dependency_ids", b"5"),
    ("dependency_ids", b"[null]"),
    ("dependency_ids", b"{"),
    ("enqueue_at_front", b"perhaps"),
]
PAYLOADS = [b"\x00\x01", b"x\x9c\x00", MEGABYTE, zlib.compress(b"\xff" * 100), zlib.compress(b"[" * 1000)]
DOES_NO_HARM = [
    ("meta", b"\x80\x04\x95"),
    ("description", MEGABYTE),
    ("description", b"\xff"),
    ("dependency_ids", b'["a b:c", "\\u0000", "../\\ud83d\\ude42"]'),
    ("worker_name", b"\xff"),
    ("origin", b"\xff"),
    ("result", b"\xff"),
]


def test_a_malformed_field_fails_its_job_with_one_line_that_names_it(served: Served) -> None:
    fails = [(_unsent(served.queue, retry=Retry(max=3)), field, value) for field, value in FAILS]
    payloads = [(_unsent(served.queue), "data", value) for value in PAYLOADS]
    webhooks = [(_unsent(served.queue), "webhooks", value) for value in (b"{", b"\xff")]
    harmless = [(_unsent(served.queue), field, value) for field, value in DOES_NO_HARM]
    others = [_unsent(served.queue) for _ in range(10)]
    for job, field, value in [*fails, *payloads, *webhooks, *harmless]:
        served.connection.hset(job.key, field, value)
    _push(served.queue, *(job for job, _, _ in [*fails, *payloads, *webhooks, *harmless]), *others)
    _assert_right(*others, *(job for job, _, _ in harmless))
    for job, field, _ in fails:
        reason = _reason(job)
        assert f"field {field} of {job.key} is malformed" in reason
        assert "enqueue it again" in reason
    for job, _, _ in payloads:
        assert _reason(job).startswith("the payload ")
    for job, _, _ in webhooks:
        assert _reason(job).startswith("webhooks: the gateway does not run these")
    _assert_takes_jobs(served)


def test_a_job_whose_status_is_overwritten_while_it_runs_still_finishes(served: Served) -> None:
    served.engine.hold()
    garbage, binary, gone = jobs = enqueue_many(served.queue, 3)
    wait_until(lambda: len(served.engine.held) == 3, what="the claims")
    served.connection.hset(garbage.key, "status", b"no-such-status")
    served.connection.hset(binary.key, "status", b"\xff")
    served.connection.hdel(gone.key, "status")
    served.engine.let_go()
    wait_until(lambda: all(served.connection.hget(job.key, "status") == b"finished" for job in jobs), what="the ends")
    _assert_right(*jobs)
    _assert_takes_jobs(served)


# --- dependents ----------------------------------------------------------------------------------------------------


def test_a_dependent_that_was_deleted_and_enqueued_again_does_not_stop_its_parent(served: Served) -> None:
    parent = _unsent(served.queue)
    child = enqueue(served.queue, depends_on=parent)
    sibling = enqueue(served.queue, depends_on=parent)
    assert status_of(child) == "deferred"
    child.delete()
    served.engine.hold()
    child = enqueue(served.queue, job_id=child.id)
    _push(served.queue, parent)
    wait_until(lambda: len(served.engine.held) == 2, what="the claims")
    served.engine.let_go()
    _assert_right(parent, sibling, child)
    assert served.engine.runs[child.id] == 1
    _assert_takes_jobs(served)


@pytest.mark.parametrize(
    ("field", "value"),
    [("status", b"no-such-status"), ("timeout", b"soon"), ("dependency_ids", b"[7]"), ("created_at", MEGABYTE)],
)
def test_a_malformed_dependent_fails_and_its_siblings_are_enqueued(served: Served, field: str, value: bytes) -> None:
    parent = _unsent(served.queue)
    children = [enqueue(served.queue, depends_on=parent) for _ in range(3)]
    served.connection.hset(children[1].key, field, value)
    _push(served.queue, parent)
    _assert_right(parent, children[0], children[2])
    wait_until(lambda: served.connection.hget(children[1].key, "status") == b"failed", what="the failure")
    if field != "status":  # which has just been mended
        served.connection.hdel(children[1].key, field)
    assert f"field {field} of {children[1].key} is malformed" in _reason(children[1])
    assert children[1].id not in served.queue.deferred_job_registry
    assert served.engine.runs[children[1].id] == 0
    _assert_takes_jobs(served)


def test_dependents_with_damaged_keys_and_strange_ids_cost_their_siblings_nothing(served: Served) -> None:
    parent = _unsent(served.queue)
    other_parent = _unsent(served.queue)
    no_hash, no_dependencies, fine = (enqueue(served.queue, depends_on=parent) for _ in range(3))
    two_parents = enqueue(served.queue, depends_on=[parent, other_parent])
    _break(served.connection, no_hash.key)
    _break(served.connection, no_dependencies.dependencies_key)
    _break(served.connection, other_parent.key)
    served.connection.sadd(parent.dependents_key, b"\xff\xfe", b"a b:c", b"", b"gone", MEGABYTE)
    _push(served.queue, parent)
    _assert_right(parent, fine)
    assert no_dependencies.dependencies_key in _reason(no_dependencies)
    assert other_parent.key in _reason(two_parents)
    assert no_hash.key in served.gateway.text()
    _assert_takes_jobs(served)


def test_dependents_of_a_failed_job_are_isolated_as_well(served: Served) -> None:
    served.engine.errors["fails"] = JobError(kind="internal", message="out of luck")
    parent = _unsent(served.queue, job_id="fails")
    malformed = enqueue(served.queue, depends_on=parent)
    waits = enqueue(served.queue, depends_on=parent)
    served.connection.hset(malformed.key, "timeout", "soon")
    served.connection.sadd(parent.dependents_key, b"gone")
    _push(served.queue, parent)
    assert _reason(parent) == "failed: internal: out of luck"
    wait_until(lambda: served.connection.hget(malformed.key, "status") == b"failed", what="the failure")
    assert status_of(waits) == "deferred"
    _assert_takes_jobs(served)


def test_jobs_that_depend_on_each_other_run_once_each(served: Served) -> None:
    first, second, alone = (_unsent(served.queue) for _ in range(3))
    for parent, child in [(first, second), (second, first), (alone, alone)]:
        served.connection.sadd(parent.dependents_key, child.id)
        served.connection.sadd(child.dependencies_key, parent.id)
        served.connection.hset(child.key, "dependency_ids", f'["{parent.id}"]')
    served.connection.hset(second.key, "status", "deferred")
    _push(served.queue, first, alone)
    _assert_right(first, second, alone)
    _assert_takes_jobs(served)
    assert sum(served.engine.runs.values()) == 3 + 3


def test_a_parent_that_cannot_be_repeated_finishes_and_its_dependent_runs(served: Served) -> None:
    parent = _unsent(served.queue)
    child = enqueue(served.queue, depends_on=parent)
    served.connection.hset(parent.key, mapping={"repeats_left": "1", "repeat_intervals": '["x"]'})
    _push(served.queue, parent)
    _assert_right(parent, child)
    assert f"job {parent.id}: RQ's record of the job is malformed" in served.gateway.text()
    _assert_takes_jobs(served)


def test_a_dependent_with_a_parent_that_is_gone_runs_after_the_other_parent(served: Served) -> None:
    gone, parent = _unsent(served.queue), _unsent(served.queue)
    child = enqueue(served.queue, depends_on=[gone, parent])
    gone.delete()
    _push(served.queue, parent)
    _assert_right(parent, child)
    _assert_takes_jobs(served)


# --- at random -----------------------------------------------------------------------------------------------------

GARBAGE = [b"", b"\xff\xfe", b"-1", b"1.5", b"9" * 30, b"[]", b"{}", b"null", b'"x"', b"no\n" * 500, MEGABYTE]


def _damage_at_random(dice: random.Random, connection: redis.Redis, job: Job) -> str:
    """Damage one key or field of the job. Return which."""
    if dice.random() < 0.4:
        name = dice.choice(sorted(KEYS_OF_A_JOB))
        key = KEYS_OF_A_JOB[name](job)
        connection.delete(key)
        kind = dice.choice(["deleted", "string", "list", "set", "hash", "zset", "stream"])
        match kind:
            case "string":
                connection.set(key, "damaged")
            case "list":
                connection.rpush(key, "damaged")
            case "set":
                connection.sadd(key, "damaged", b"\xff")
            case "hash":
                connection.hset(key, "damaged", "damaged")
            case "zset":
                connection.zadd(key, {b"damaged": 1, b"\xff": 2})
            case "stream":
                connection.xadd(key, {"damaged": "damaged"})
        return f"{name}: {kind}"
    fields = [b"repeat_intervals", b"retries_left", b"retry_intervals", b"webhooks", b"dependency_ids", b"result_ttl"]
    field = dice.choice(sorted({*connection.hkeys(job.key), *fields}))
    if dice.random() < 0.2:
        connection.hdel(job.key, field)
        return f"field {field!r}: deleted"
    value = dice.choice(GARBAGE)
    connection.hset(job.key, field, value)
    return f"field {field!r}: {value[:20]!r}"


def _are_held(engine: EchoEngine, jobs: list[Job]) -> bool:
    return all(job.id in engine.held for job in jobs)


def _has_ended(connection: redis.Redis, job: Job) -> bool:
    if not connection.exists(job.key):  # deleted, as after a `result_ttl` of 0
        return True
    return connection.type(job.key) == b"hash" and connection.hget(job.key, "status") in (
        b"finished",
        b"failed",
        b"canceled",
    )


def test_whatever_is_damaged_nine_of_ten_jobs_finish(served: Served) -> None:
    connection, engine = served.connection, served.engine
    for seed in range(80):
        dice = random.Random(seed)
        jobs = [_unsent(served.queue, retry=dice.choice([None, Retry(max=1)])) for _ in range(10)]
        damaged = jobs.pop(dice.randrange(10))
        place = dice.randrange(10)
        pushed = [*jobs[:place], damaged, *jobs[place:]]
        if dice.random() < 0.5:
            what = _damage_at_random(dice, connection, damaged)
            _push(served.queue, *pushed)
        else:
            engine.hold()
            _push(served.queue, *pushed)
            wait_until(partial(_are_held, engine, pushed), what="the claims")
            what = _damage_at_random(dice, connection, damaged)
            engine.let_go()
        _assert_right(*jobs)
        wait_until(lambda: _record(served) == {}, what=f"the end of the damaged job: {seed}: {what}")
        assert _has_ended(connection, damaged) or damaged.id in served.gateway.text(), f"{seed}: {what}"
    _assert_takes_jobs(served)


# --- damage and outages --------------------------------------------------------------------------------------------


def test_a_server_without_memory_fails_no_job(tmp_path: Path) -> None:
    with EmbeddedServer() as server:
        connection = redis.Redis.from_url(server.url)
        queue = Queue("generate", connection=connection, serializer="json")
        with (
            EchoEngine(server.url, "memory") as engine,
            GatewayProcess(tmp_path / "log", server.url, "generate", "memory") as gateway,
        ):
            engine.hold()
            started = enqueue_many(queue, 20)
            wait_until(lambda: len(engine.held) == 20, what="the claims")
            waiting = [_unsent(queue) for _ in range(20)]
            suspend(connection)
            _push(queue, *waiting)
            connection.config_set("maxmemory", 1)
            resume(connection)
            gateway.wait_for_log("outage, seen by ")
            assert "maxmemory" in gateway.text()
            connection.config_set("maxmemory", 0)
            engine.let_go()
            _assert_right(*started, *waiting)
        connection.close()


@pytest.mark.parametrize(
    "error",
    [
        redis.ConnectionError("gone"),
        redis.TimeoutError("slow"),
        redis.BusyLoadingError("loading"),
        redis.ReadOnlyError("a replica"),
        redis.OutOfMemoryError("full"),
        redis.exceptions.NoPermissionError("no"),
        redis.exceptions.MasterDownError("down"),
        redis.ResponseError("MISCONF Redis is configured to save"),
        redis.exceptions.InvalidResponse("what?"),
        ConnectionResetError("reset"),
        RedisUnavailable("gone"),
    ],
)
def test_an_outage_is_the_servers(error: Exception) -> None:
    assert is_outage(error)


@pytest.mark.parametrize(
    "error",
    [
        redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
        redis.ResponseError("Command # 1 (HGETALL rq:job:OOM ) of pipeline caused error: WRONGTYPE Operation"),
        redis.ResponseError("wrong number of arguments for 'watch' command"),
        redis.DataError("Invalid input of type: 'NoneType'"),
        QueueError("Redis at x refused a command: WRONGTYPE"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        KeyError("x"),
    ],
)
def test_damage_is_one_jobs(error: Exception) -> None:
    assert not is_outage(error)


def test_one_bad_item_of_a_batch_is_found_and_an_outage_ends_the_batch() -> None:
    done: list[int] = []
    bad: list[int] = []

    def act(items: Any) -> None:
        if 300 in items:
            raise ValueError("300")
        if 900 in items:
            raise RedisUnavailable("gone")
        done.extend(items)

    in_batches(range(600), act, lambda item, error: bad.append(item))
    assert (sorted(done), bad) == ([i for i in range(600) if i != 300], [300])
    with pytest.raises(RedisUnavailable):
        in_batches(range(1000), act, lambda item, error: bad.append(item))
