"""A client over a connection that the program has already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

from millrace import AsyncClient, Client
from millrace.results.errors import QueueError
from millrace.results.messages import Event
from millrace.results.queue import JobQueue
from tests.results.engines import Engine


def test_a_connection_of_the_program_is_used_and_left_open(redis_url: str, queue_name: str) -> None:
    with redis.Redis.from_url(redis_url, socket_timeout=10) as existing:
        engine = Engine(JobQueue(existing, queue_name))
        with Client(existing, queue=queue_name) as client:
            job_id = client.submit("x", batch="b", meta={"a": 1})
            engine.finish(engine.claim_one(), Event(offset=0, token_ids=[1], text="y"))
            job = client.wait(job_id, 60)
            assert (job.text, job.token_ids, job.meta) == ("y", [1], {"a": 1})
            assert [event.text for event in client.stream(job_id)] == ["y", ""]
            assert [job.id for job in client.as_completed([job_id], 5)] == [job_id]
            assert client.batch_status("b").finished == client.stats().finished == 1
            client.close()
            with pytest.raises(QueueError, match="this client is closed"):
                client.stats()
        assert existing.ping()


async def test_the_same_under_asyncio(redis_url: str, queue_name: str) -> None:
    async with redis.asyncio.Redis.from_url(redis_url, socket_timeout=10) as existing:
        async with AsyncClient(existing, queue=queue_name) as client:
            job_id = await client.submit("x")
            assert await client.cancel(job_id) == "cancelled"
            assert [event.state async for event in client.stream(job_id)] == ["cancelled"]
            await client.close()
            with pytest.raises(QueueError, match="this client is closed"):
                await client.stats()
        assert await existing.ping()


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"decode_responses": True, "socket_timeout": None}, "decode_responses=False; or give its URL"),
        ({"protocol": 3, "socket_timeout": 30}, "protocol=2"),
        ({"legacy_responses": False, "socket_timeout": 30}, "legacy_responses=True"),
        ({"socket_timeout": 4}, "socket_timeout=10 or more, not 4"),
    ],
)
def test_a_connection_that_would_break_in_use_is_refused_at_once(
    redis_url: str, options: dict[str, Any], needed: str
) -> None:
    with redis.Redis.from_url(redis_url, **options) as existing, pytest.raises(QueueError, match=needed):
        Client(existing)
    with pytest.raises(QueueError, match=needed):
        AsyncClient(redis.asyncio.Redis.from_url(redis_url, **options))


_SENTINEL: Any = redis.sentinel.Sentinel
_ASYNC_SENTINEL: Any = redis.asyncio.sentinel.Sentinel
SYNC: dict[str, Callable[..., redis.Redis]] = {
    "url": lambda **options: redis.Redis.from_url("redis://h", **options),
    "tls": lambda **options: redis.Redis.from_url("rediss://h", **options),
    "unix": lambda **options: redis.Redis.from_url("unix:///socket", **options),
    "pool": lambda **options: redis.Redis(connection_pool=redis.ConnectionPool(host="h", **options)),
    "host": lambda **options: redis.Redis("h", **options),
    "sentinel": lambda **options: _SENTINEL([("h", 1)]).master_for("m", **options),
}
ASYNC: dict[str, Callable[..., redis.asyncio.Redis | redis.asyncio.RedisCluster]] = {
    "url": lambda **options: redis.asyncio.Redis.from_url("redis://h", **options),
    "tls": lambda **options: redis.asyncio.Redis.from_url("rediss://h", **options),
    "unix": lambda **options: redis.asyncio.Redis.from_url("unix:///socket", **options),
    "pool": lambda **options: redis.asyncio.Redis(connection_pool=redis.asyncio.ConnectionPool(host="h", **options)),
    "host": lambda **options: redis.asyncio.Redis(host="h", **options),
    "sentinel": lambda **options: _ASYNC_SENTINEL([("h", 1)]).master_for("m", **options),
    "cluster": lambda **options: redis.asyncio.RedisCluster("h", **options),
}


@pytest.mark.skipif(redis.VERSION < (8,), reason="without the option, connections of older versions have no limit")
def test_the_limit_that_redis_py_sets_by_itself_is_refused_too() -> None:
    for make in SYNC.values():
        with pytest.raises(QueueError, match=r"make it with socket_timeout=10 or more, not 5; or give its URL$"):
            Client(make())
    for make_async in ASYNC.values():
        with pytest.raises(QueueError, match=r"make it with socket_timeout=10 or more, not 5; or give its URL$"):
            AsyncClient(make_async())


@pytest.mark.parametrize("timeout_s", [10, 15.0, None])
def test_a_connection_with_a_long_limit_or_none_is_accepted(timeout_s: float | None) -> None:
    for make in SYNC.values():
        Client(make(socket_timeout=timeout_s))
    for make_async in ASYNC.values():
        AsyncClient(make_async(socket_timeout=timeout_s))


def test_a_connection_of_the_other_kind_is_refused(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as existing, pytest.raises(QueueError, match=r"redis\.asyncio\.Redis or"):
        AsyncClient(existing)
    with pytest.raises(QueueError, match=r"a redis\.Redis or a redis\.RedisCluster is needed, not Redis"):
        Client(redis.asyncio.Redis.from_url(redis_url))  # type: ignore[arg-type]
