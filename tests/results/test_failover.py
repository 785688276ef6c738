"""A planned failover: the primary becomes a replica, and its name leads to the new one. No connection is closed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from rq import Queue

from millrace import AsyncClient, Client
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.errors import RedisUnavailable
from millrace.results.queue import JobQueue
from millrace.results.writer import Writer
from tests.chaos.proxy import Proxy
from tests.processes import wait_until
from tests.producer.rq.parts import GatewayProcess, enqueue
from tests.results.engines import Engine, append_of, submit


class Pair:
    """A primary and its replica behind one name."""

    def __init__(self, name: Proxy, primary: EmbeddedServer, replica: EmbeddedServer) -> None:
        self.url = name.url
        self._name = name
        self._replica = replica
        self.new_url = replica.url
        self._old, self.new = connect(primary.url), connect(replica.url)
        self._follow(self.new, primary)
        wait_until(lambda: self.new.info("replication")["master_link_status"] == "up")

    def fail_over(self) -> None:
        self._old.wait(1, 10_000)
        self.new.replicaof("NO", "ONE")
        self._name.lead_to(self._replica.url, cut=False)
        self._follow(self._old, self._replica)

    def close(self) -> None:
        self._old.close()
        self.new.close()

    def _follow(self, client: redis.Redis, primary: EmbeddedServer) -> None:
        client.replicaof("127.0.0.1", primary.url.split(":")[2].split("/")[0])


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        at_once = {"repl-diskless-sync-delay": "0"}  # the copy for a replica begins without waiting for others
        primary, replica = (stack.enter_context(EmbeddedServer(tcp=True, options=at_once)) for _ in range(2))
        pair = Pair(stack.enter_context(Proxy(primary.url)), primary, replica)
        stack.callback(pair.close)
        yield pair


@pytest.mark.parametrize("is_borrowed", [False, True])
def test_a_client_finds_the_new_primary(pair: Pair, is_borrowed: bool) -> None:
    own = connect(pair.url)
    with Client(own if is_borrowed else pair.url) as client:
        client.submit("x", job_id="before")
        pair.fail_over()
        with pytest.raises(RedisUnavailable, match="read-only replica"):
            client.submit("x", job_id="a")
        client.submit("x", job_id="a")
        assert client.stats().queued == 2
    own.close()


async def test_an_async_client_finds_the_new_primary(pair: Pair) -> None:
    async with AsyncClient(pair.url) as client:
        await client.submit("x", job_id="before")
        pair.fail_over()
        with pytest.raises(RedisUnavailable, match="read-only replica"):
            await client.submit("x", job_id="a")
        await client.submit("x", job_id="a")
        assert (await client.stats()).queued == 2


def test_an_engine_finds_the_new_primary(pair: Pair) -> None:
    """Its claims, and its writer with what it could not write."""
    queue = JobQueue(connect(pair.url))
    engine = Engine(queue)
    submit(queue, "a", "b")
    (job,) = engine.claim(1)
    writing = JobQueue(connect(pair.url))
    writer = Writer(writing, lambda job_id, lease: None)
    writer.put(append_of(job, 0, [1]))
    assert writer.flush(10)  # so it has a connection to the old primary
    pair.fail_over()
    writer.put(append_of(job, 1, [2]))
    assert writer.flush(10)
    with pytest.raises(RedisUnavailable, match="read-only replica"):
        engine.claim_ids()
    engine.beat()
    assert engine.claim_ids() == ["b"]
    writer.close()
    writing.close()
    queue.close()


def test_an_rq_gateway_finds_the_new_primary(pair: Pair, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "gateway.log", pair.url, "generate", "default") as gateway:
        gateway.wait_until_serving()
        pair.fail_over()
        enqueue(Queue("generate", connection=pair.new, serializer="json"))
        new = JobQueue(connect(pair.new_url))
        wait_until(lambda: new.stats().queued == 1)
        new.close()
