"""What the server can do to us: forget its scripts, run out of memory, be replaced, be away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis
import redis.asyncio
from redis._parsers import BaseParser

from millrace import AsyncClient, Client
from millrace.embedded import EmbeddedServer
from millrace.results import commands
from millrace.results.connection import connect, connect_async
from millrace.results.errors import QueueError, RedisUnavailable
from millrace.results.messages import Event
from millrace.results.replies import Outcome
from millrace.results.scripts import SOURCES
from millrace.results.server_errors import as_unavailable
from millrace.results.transport import AsyncTransport, Transport
from tests.results.engines import Engine, append_of, finish_of, submission, submit
from tests.results.full_queue import FullQueue
from tests.results.invariants import check_queue
from tests.results.refused import check_unavailable


@pytest.fixture
def small_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(options={"maxmemory": "8mb"}) as server:
        yield server


def test_scripts_that_the_server_forgot_are_loaded_again(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    redis_client.script_flush()
    submit(queue, "a")
    redis_client.script_flush()
    assert engine.claim_ids() == ["a"]


def test_forgotten_scripts_in_a_pipeline_keep_the_order_of_each_job(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    """`finish` is known again while `append` is not: the text must still come before the end."""
    submit(queue, "a", "b")
    a, b = engine.claim()
    event = Event(offset=0, token_ids=[1], text="x")
    redis_client.script_flush()
    redis_client.script_load(SOURCES["finish"])
    append = append_of(a, 0, [1], event)
    assert queue.write([append, finish_of(b), finish_of(a)]) == ["ok", "ok", "ok"]
    assert queue.get("a").text == "x"


async def test_forgotten_scripts_are_loaded_again_under_asyncio(
    queue: FullQueue, redis_url: str, redis_client: redis.Redis
) -> None:
    submit(queue, "a")
    transport = AsyncTransport(connect_async(redis_url))
    redis_client.script_flush()
    assert await transport.send(commands.cancel(queue.keys, "a")) == b"cancelled"
    redis_client.script_flush()
    replies = await transport.send_many([commands.stats(queue.keys), commands.cancel(queue.keys, "a")])
    assert replies[1] == b"cancelled"
    await transport.close()


def fill(queue: FullQueue) -> None:
    for i in range(1000):
        queue.submit([submission(f"filler-{i}", body=b"x" * 100_000)])


def test_out_of_memory_no_job_comes_in_and_all_that_are_in_go_on_to_their_end(small_server: EmbeddedServer) -> None:
    client = connect(small_server.url)
    queue = FullQueue(client, "full")
    submit(queue, *(f"j{i}" for i in range(8)))
    engine = Engine(queue)
    first, second, third = engine.claim(3)
    doomed = Engine(queue, "doomed")
    doomed.claim(1)
    doomed.die()
    with pytest.raises(RedisUnavailable, match="out of memory"):
        fill(queue)
    assert engine.show(first, 0, [1], "x") == "ok"
    assert engine.finish(first, Event(offset=1, token_ids=[2], text="y")) == "ok"
    assert engine.release(second, 0, [1]) == "ok"
    assert queue.cancel(third.job_id) == "cancelling"
    assert engine.beat().cancelled == [third.job_id]
    assert [one.num_jobs for one in queue.recover()] == [1]
    assert len(engine.claim(2)) == 2
    assert queue.cancel("j7") == "cancelled"
    assert queue.deregister(engine.id) == 3
    assert queue.get("j0").text == "xy"
    check_queue(client, "full")
    client.close()


def test_out_of_memory_an_inbox_entry_waits(small_server: EmbeddedServer) -> None:
    client = connect(small_server.url)
    queue = FullQueue(client, "full")
    entry_id = cast(bytes, client.xadd(queue.keys.inbox, {"job": "{}"})).decode()
    client.config_set("maxmemory", 1)
    with pytest.raises(RedisUnavailable, match="out of memory"):
        queue.accept(entry_id, submission("a"))
    client.config_set("maxmemory", 0)
    assert queue.accept(entry_id, submission("a")) == Outcome("created")
    client.close()


def test_a_read_only_replica_is_told_from_a_dead_server(server: EmbeddedServer) -> None:
    with EmbeddedServer(tcp=True) as primary, EmbeddedServer() as replica:
        port = primary.url.split(":")[2].split("/")[0]
        client = connect(replica.url)
        Transport(client).send(("REPLICAOF", "127.0.0.1", port))
        with pytest.raises(RedisUnavailable, match="read-only replica"):
            FullQueue(client).submit([submission()])
        client.close()


def test_a_server_that_is_away_is_named_without_its_password() -> None:
    queue = FullQueue(connect("redis://user:secret@127.0.0.1:1/3"))
    with pytest.raises(
        RedisUnavailable,
        match=r"^Cannot connect to Redis at redis://user:\*\*\*@127.0.0.1:1/3: connection refused. Start a Redis there, or",
    ) as caught:
        queue.stats()
    assert "secret" not in str(caught.value)


def test_a_command_at_fault_is_an_error_of_its_own(queue: FullQueue, redis_url: str, redis_client: redis.Redis) -> None:
    with pytest.raises(QueueError, match="refused a command"):
        Transport(redis_client).send(("NO-SUCH-COMMAND",))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("LOADING Redis is loading the dataset in memory", "is still loading its data"),
        ("MISCONF Redis is configured to save RDB snapshots", "cannot do this now: MISCONF"),
        ("NOREPLICAS Not enough good replicas to write.", "cannot do this now: NOREPLICAS"),
        ("UNBLOCKED force unblock from blocking operation, instance state changed", "cannot do this now: UNBLOCKED"),
        ("MOVED 3999 127.0.0.1:6381", "is a node of a Redis Cluster: write redis+cluster://"),
        ("ASK 3999 127.0.0.1:6381", "is a node of a Redis Cluster: write redis+cluster://"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", "moves the keys to another node"),
        ("CLUSTERDOWN The cluster is down", "is a cluster that cannot serve this now"),
        ("NOSCRIPT No matching script.", "has lost the scripts again"),
        ("ERR Error running script: -OOM command not allowed", "is out of memory"),
        ("DB index is out of range", "has no such database"),
        ("unknown command 'EVALSHA', with args beginning with: 'x'", "seems to be a Sentinel"),
        ("unknown command `EVALSHA`, with args beginning with: `x`", "seems to be a Sentinel"),
        ("unknown command 'WAITAOF', with args beginning with: '1'", None),
        ("ERR wrong number of arguments", None),
        ("ACL failure in script: User app has no permissions", "does not permit this"),
    ],
)
def test_states_of_the_server_are_told_from_commands_at_fault(answer: str, words: str | None) -> None:
    error = BaseParser.parse_error(answer)  # type: ignore[no-untyped-call]
    told = as_unavailable(error, "redis://here")
    assert (told is None) == (words is None)
    assert words is None or words in str(told)


@pytest.mark.parametrize(
    ("scheme", "error", "words"),
    [
        ("rediss", "Timeout connecting to server", "does this port speak TLS"),
        ("rediss", "Timeout reading from socket", "is it overloaded"),
        ("redis", "Timeout connecting to server", "is it overloaded"),
    ],
)
def test_only_who_gets_no_tls_connection_is_asked_about_it(scheme: str, error: str, words: str) -> None:
    assert words in str(as_unavailable(redis.TimeoutError(error), f"{scheme}://here"))


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", r"check host and port in the URL \(.*\"H\""),
        (b"\x15\x03\x01\x00\x02\x02\x46", "it speaks TLS: write rediss://"),
    ],
)
async def test_what_does_not_speak_the_protocol_is_told_so(answer: bytes, remedy: str) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        expected = f"^what answers at {url} does not speak Redis's protocol: {remedy}"
        with pytest.raises(RedisUnavailable, match=expected):
            await asyncio.to_thread(Client(url).stats)
        async with AsyncClient(url) as client:
            with pytest.raises(RedisUnavailable, match=expected):
                await client.stats()


def test_a_server_that_takes_no_more_clients_says_so() -> None:
    with EmbeddedServer(options={"maxclients": "1"}) as server:
        first, second = connect(server.url), connect(server.url, blocking=True)
        first.ping()
        with pytest.raises(RedisUnavailable, match="maxclients"):
            FullQueue(second).stats()
        first.close()


@pytest.mark.timeout(60)
async def test_a_server_that_takes_no_more_clients_says_so_to_asyncio_too() -> None:
    with EmbeddedServer(options={"maxclients": "1"}) as server, connect(server.url) as first:
        first.ping()
        async with AsyncClient(server.url) as client:
            with pytest.raises(RedisUnavailable, match="maxclients"):
                await client.stats()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://127.0.0.1:1", r"connection refused\. Start a Redis there, or check"),
        ("unix:///nowhere.sock", r"no such file or directory\. Start a Redis there, or check"),
        ("redis://nowhere.invalid", r"Name or service not known\. Check"),
    ],
)
async def test_a_server_that_is_not_there_is_named_with_the_reason_and_nothing_else(url: str, reason: str) -> None:
    expected = rf"^Cannot connect to Redis at {url}[^ ]*: {reason} --redis or MILLRACE_REDIS_URL\.$"
    await check_unavailable(url, expected, is_outage=True)


async def test_what_no_other_attempt_mends_is_no_outage() -> None:
    with EmbeddedServer(tcp=True) as server:
        address = server.url.removeprefix("redis://").partition("/")[0]
        await check_unavailable(f"redis://user:wrong@{address}", "refuses the login", is_outage=False)
        await check_unavailable(f"redis://{address}/99", "has no such database", is_outage=False)
        with connect(server.url) as admin, Client(server.url) as client:
            admin.config_set("maxmemory", 1)
            with pytest.raises(RedisUnavailable, match="is out of memory") as caught:
                client.submit("x")
            assert not caught.value.is_outage


_FULL_POOL = r"^All connections of this client to Redis at .* are in use, .* raise max_connections, or .* Blocking"


def test_a_full_pool_is_told_from_a_server_that_is_away(redis_url: str) -> None:
    url = f"{redis_url}{'&' if '?' in redis_url else '?'}max_connections=1"
    blocking = redis.BlockingConnectionPool.from_url(url, timeout=0.01, socket_timeout=10)
    for given in (url, redis.Redis(connection_pool=blocking)):
        with Client(given) as client:
            pool: Any = client._transport._client.connection_pool
            taken = pool.get_connection()
            with pytest.raises(RedisUnavailable, match=_FULL_POOL) as caught:
                client.stats()
            assert not caught.value.is_outage
            pool.release(taken)
            client.stats()
    blocking.disconnect()


async def test_a_full_pool_is_told_so_under_asyncio(redis_url: str) -> None:
    url = f"{redis_url}{'&' if '?' in redis_url else '?'}max_connections=1"
    blocking = redis.asyncio.BlockingConnectionPool.from_url(url, timeout=0.01, socket_timeout=10)
    for given in (url, redis.asyncio.Redis(connection_pool=blocking)):
        async with AsyncClient(given) as client:
            pool: Any = client._transport._client.connection_pool
            taken = await pool.get_connection()
            with pytest.raises(RedisUnavailable, match=_FULL_POOL) as caught:
                await client.stats()
            assert not caught.value.is_outage
            await pool.release(taken)
            await client.stats()
    await blocking.disconnect()


@pytest.mark.parametrize(
    "text",
    [
        "Event loop is closed",
        "Task <Task pending> got Future <Future pending> attached to a different loop",
        "unable to perform operation on <TCPTransport closed=True reading=False 0x55>; the handler is closed",  # uvloop
    ],
)
def test_another_event_loop_is_known_by_what_it_says(text: str, redis_client: redis.Redis) -> None:
    expected = "belongs to another event loop: make one for each"
    with pytest.raises(QueueError, match=expected), Transport(redis_client)._guard:
        raise RuntimeError(text)
