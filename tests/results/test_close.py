"""A closed client: it sends nothing more, its readers end, and none of its connections is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from millrace import AsyncClient, Client, GenerationRequest
from millrace.results import waiting
from millrace.results.errors import QueueError
from tests.processes import wait_until

CLOSED = "^this client is closed$"
CALLS: list[Callable[[Any], Any]] = [
    lambda client: client.submit("x"),
    lambda client: client.submit("x", durability="disk"),
    lambda client: client.submit_many([GenerationRequest(prompt="x")]),
    lambda client: client.get("a"),
    lambda client: client.wait("a"),
    lambda client: client.settings(),
]
READERS: list[Callable[[Any], Any]] = [
    lambda client: client.wait("a"),
    lambda client: last(client.stream("a")),
    lambda client: last(client.as_completed(["a"])),
]


def last(events: Any) -> Any:
    """Read to the end, also under asyncio."""

    async def read_all(events: AsyncIterator[object]) -> None:
        async for _ in events:
            pass

    return read_all(events) if isinstance(events, AsyncIterator) else list(events)


@pytest.fixture
def url(redis_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL whose connections the server lists under the queue's name. Readers wake up often."""
    monkeypatch.setattr(waiting, "BLOCK_LIMIT_S", 0.3)
    return f"{redis_url}{'&' if '?' in redis_url else '?'}client_name={queue_name}"


@pytest.fixture
def commands_of_clients(redis_client: redis.Redis, queue_name: str) -> Iterator[Callable[[], list[str]]]:
    """Return the last command of each connection that `url` has opened."""

    def commands() -> list[str]:
        listed: Any = redis_client.client_list()
        return [one["cmd"] for one in listed if one["name"] == queue_name]

    yield commands
    wait_until(lambda: commands() == [])  # the server sees the end a moment later


def test_a_closed_client_refuses_every_call(
    url: str, queue_name: str, commands_of_clients: Callable[[], list[str]]
) -> None:
    client = Client(url, queue=queue_name)
    client.submit("x", job_id="a", delay_s=100)
    events = client.stream("a")
    client.close()
    client.close()
    for call in CALLS:
        with pytest.raises(QueueError, match=CLOSED):
            call(client)
    with pytest.raises(QueueError, match=CLOSED):
        next(events)


async def test_the_same_under_asyncio(url: str, queue_name: str, commands_of_clients: Callable[[], list[str]]) -> None:
    client = AsyncClient(url, queue=queue_name)
    await client.submit("x", job_id="a", delay_s=100)
    events = client.stream("a")
    await client.close()
    await client.close()
    for call in CALLS:
        with pytest.raises(QueueError, match=CLOSED):
            await call(client)
    with pytest.raises(QueueError, match=CLOSED):
        await anext(events)


def test_close_ends_the_readers(url: str, queue_name: str, commands_of_clients: Callable[[], list[str]]) -> None:
    client = Client(url, queue=queue_name)
    client.submit("x", job_id="a", delay_s=100)
    with ThreadPoolExecutor() as threads:
        readers = [threads.submit(read, client) for read in READERS]
        wait_until(lambda: commands_of_clients() == ["xread"] * len(READERS))
        client.close()
        for reading in readers:
            with pytest.raises(QueueError, match=CLOSED):
                reading.result(10)


async def test_close_ends_the_readers_under_asyncio(
    url: str, queue_name: str, commands_of_clients: Callable[[], list[str]]
) -> None:
    client = AsyncClient(url, queue=queue_name)
    await client.submit("x", job_id="a", delay_s=100)
    readers = [asyncio.create_task(read(client)) for read in READERS]
    while commands_of_clients() != ["xread"] * len(READERS):
        await asyncio.sleep(0.01)
    await client.close()
    for reading in readers:
        with pytest.raises(QueueError, match=CLOSED):
            await asyncio.wait_for(reading, 10)
