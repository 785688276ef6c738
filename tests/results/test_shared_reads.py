"""Blocking reads that share connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis

from millrace.results import commands, replies
from millrace.results.connection import connect_async
from millrace.results.errors import QueueError
from millrace.results.shared_reads import _MAX_READS
from millrace.results.transport import AsyncTransport
from tests.processes import LIMIT_S


@pytest.fixture
async def transport(redis_url: str) -> AsyncIterator[AsyncTransport]:
    transport = AsyncTransport(connect_async(redis_url))
    yield transport
    await transport.close()


class Streams:
    """Streams of a test, and the connections that wait for entries of them."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._client = client
        self._name = name

    def key(self, number: int) -> str:
        return f"{{{self._name}}}:{number}"

    def add(self, number: int, value: str) -> None:
        self._client.xadd(self.key(number), {"value": value})

    def num_reads(self) -> int:
        return sum(one["cmd"] == "xread" and "b" in one["flags"] for one in self._client.client_list())


@pytest.fixture
def streams(redis_client: redis.Redis, queue_name: str) -> Streams:
    return Streams(redis_client, queue_name)


async def until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_true():
            await asyncio.sleep(0.005)


async def read(transport: AsyncTransport, key: str, after: str = "0-0", block_ms: int = 5000) -> list[Any]:
    return replies.stream_entries((await transport.send_many([commands.read_stream(key, after, 10, block_ms)]))[0])


async def follow(transport: AsyncTransport, key: str, count: int) -> list[str]:
    values: list[str] = []
    after = "0-0"
    while len(values) < count:
        for entry_id, fields in await read(transport, key, after):
            after = entry_id.decode()
            values.append(fields[b"value"].decode())
    return values


async def test_many_readers_share_few_connections_and_each_has_its_own_entries(
    transport: AsyncTransport, streams: Streams
) -> None:
    following = []
    for number in range(100):
        following.append(asyncio.create_task(follow(transport, streams.key(number), 5)))
        await asyncio.sleep(0.001 * (number % 3))  # some come together, some alone
    await until(streams.num_reads)
    for turn in range(5):
        for number in range(turn, 100):
            streams.add(number, f"{number} {turn}")
            await asyncio.sleep(0)
        for number in range(turn):
            streams.add(number, f"{number} {turn}")
        assert streams.num_reads() <= _MAX_READS
    for number, values in enumerate(await asyncio.gather(*following)):
        assert values == [f"{number} {turn}" for turn in range(5)]
    await until(lambda: not streams.num_reads())


async def test_one_that_comes_while_all_reads_block_is_read_at_once(
    transport: AsyncTransport, streams: Streams
) -> None:
    waiting = []
    for number in range(4 * _MAX_READS):
        waiting.append(asyncio.create_task(read(transport, streams.key(number), block_ms=5000)))
        await until(lambda: 1 <= streams.num_reads() <= _MAX_READS)
        await asyncio.sleep(0.03)
    assert streams.num_reads() == _MAX_READS
    for number in reversed(range(4 * _MAX_READS)):
        streams.add(number, str(number))
        ((_, fields),) = await waiting[number]
        assert fields == {b"value": str(number).encode()}


async def test_each_reader_waits_for_its_own_time(transport: AsyncTransport, streams: Streams) -> None:
    began_s = time.monotonic()
    long = asyncio.create_task(read(transport, streams.key(0), block_ms=5000))
    short = [read(transport, streams.key(number), block_ms=50) for number in range(1, 9)]
    assert await asyncio.gather(*short) == [[]] * 8
    assert time.monotonic() - began_s >= 0.05
    assert not long.done()
    streams.add(0, "x")
    assert len(await long) == 1


async def test_two_readers_of_a_stream_may_have_read_different_parts(
    transport: AsyncTransport, streams: Streams
) -> None:
    streams.add(0, "a")
    ((first, _),) = await read(transport, streams.key(0))
    rest = asyncio.create_task(read(transport, streams.key(0), first.decode()))
    await until(streams.num_reads)
    assert len(await read(transport, streams.key(0))) == 1
    streams.add(0, "b")
    assert [fields for _, fields in await rest] == [{b"value": b"b"}]


async def test_readers_that_give_up_leave_nothing_behind(transport: AsyncTransport, streams: Streams) -> None:
    readers = [asyncio.create_task(read(transport, streams.key(number))) for number in range(20)]
    await until(streams.num_reads)
    for reader in readers[1:]:
        reader.cancel()
    await asyncio.wait(readers[1:])
    streams.add(0, "x")
    assert len(await readers[0]) == 1
    last = asyncio.create_task(read(transport, streams.key(1)))
    await until(streams.num_reads)
    last.cancel()
    await asyncio.wait([last])
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await until(lambda: not streams.num_reads())


async def test_a_key_that_is_no_stream_costs_no_other_reader(
    transport: AsyncTransport, streams: Streams, redis_client: redis.Redis
) -> None:
    redis_client.set(streams.key(0), "no stream")
    bad, *good = [asyncio.create_task(read(transport, streams.key(number))) for number in range(5)]
    with pytest.raises(QueueError, match="WRONGTYPE"):
        await bad
    for number in range(1, 5):
        streams.add(number, "x")
    assert [len(entries) for entries in await asyncio.gather(*good)] == [1] * 4


async def test_a_lost_connection_is_made_again(
    transport: AsyncTransport, streams: Streams, redis_client: redis.Redis
) -> None:
    readers = [asyncio.create_task(read(transport, streams.key(number))) for number in range(20)]
    await until(streams.num_reads)
    for one in redis_client.client_list():
        if one["cmd"] == "xread":
            redis_client.client_kill_filter(_id=one["id"])
    for number in range(20):
        streams.add(number, "x")
    assert [len(entries) for entries in await asyncio.gather(*readers)] == [1] * 20
