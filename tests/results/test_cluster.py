"""A queue in a Redis Cluster of two nodes: every key in one slot, redirections followed."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
import redis.asyncio

from millrace import AsyncClient, Client, GenerationRequest, RedisUnavailable
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.durability import _CONFIRMATIONS
from millrace.results.errors import InvalidRedisURL, NotDurable, QueueError
from millrace.results.messages import Event
from millrace.results.queue import JobQueue
from millrace.results.transport import Transport
from tests.results.engines import Engine

pytestmark = pytest.mark.new_redis  # its way of configuring nodes

DEPLOYMENT = (Path(__file__).resolve().parents[2] / "docs" / "deployment.md").read_text()
OPTIONS = {"cluster-enabled": "yes", "cluster-node-timeout": "2000", "appendfsync": "always"}
HALVES = ((0, 8191), (8192, 16383))


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[redis.Redis]]:
    """The two nodes."""
    with ExitStack() as stack:
        servers = [stack.enter_context(start_node()) for _ in HALVES]
        nodes = [stack.enter_context(connect(server.url)) for server in servers]
        for node, (first, last) in zip(nodes, HALVES, strict=True):
            node.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
        nodes[0].execute_command("CLUSTER MEET", "127.0.0.1", port_of(nodes[1]), bus_of(nodes[1]))
        limit_s = time.monotonic() + 60
        while not all(node.cluster("INFO")["cluster_state"] == "ok" for node in nodes):
            assert time.monotonic() < limit_s, "the nodes did not find each other"
            time.sleep(0.05)
        yield nodes


def start_node() -> EmbeddedServer:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        bus = str(probe.getsockname()[1])
    return EmbeddedServer(tcp=True, appendonly=True, options={**OPTIONS, "cluster-port": bus})


def bus_of(node: redis.Redis) -> int:
    return int(node.config_get("cluster-port")["cluster-port"] or 0)


def port_of(node: redis.Redis) -> int:
    return int(node.connection_pool.connection_kwargs["port"])


@pytest.fixture
def url(cluster: list[redis.Redis]) -> str:
    return f"redis+cluster://127.0.0.1:{port_of(cluster[0])}"


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])  # in slots of both nodes
def test_a_job_lives_in_a_cluster(url: str, name: str) -> None:
    queue = JobQueue(connect(url), name)
    assert queue.check_server() == []
    engine = Engine(queue)
    with Client(url, queue=name) as client:
        ids = client.submit_many([GenerationRequest(prompt="x") for _ in range(300)], durability="disk", batch="b")
        first, second = engine.claim(2)
        assert engine.show(first, 0, [1], "x") == "ok"
        assert engine.finish(first, Event(offset=1, token_ids=[2], text="y")) == "ok"
        assert client.wait(ids[0], 5).text == "xy"
        assert [event.text for event in client.stream(ids[0])] == ["x", "y", ""]
        assert engine.finish(second, state="failed") == "ok"
        assert {job.id for job in client.as_completed(ids[:2], 5)} == set(ids[:2])
        assert client.retry_all() == {ids[1]: f"{ids[1]}.r1"}
        assert client.batch_status("b").queued == 299
        assert len(client.cancel_batch("b")) == 301
    assert queue.wait_for_signal(engine.id, 0.01, include_wake=True) is not None
    queue.close()


def test_forgotten_scripts_are_loaded_on_the_node_that_needs_them(url: str, cluster: list[redis.Redis]) -> None:
    for name in ("a", "c"):
        for node in cluster:
            node.script_flush()
        with Client(url, queue=name) as client:
            client.submit("x", job_id="again")
            assert client.cancel("again") == "cancelled"


async def test_the_async_client_knows_clusters_too(url: str) -> None:
    async with AsyncClient(url, queue="async") as client:
        ids = await client.submit_many(GenerationRequest(prompt="x") for _ in range(300))
        assert set((await client.cancel_many(ids)).values()) == {"cancelled"}
        assert (await client.wait(ids[0], 5)).state == "cancelled"


def test_a_cluster_that_is_not_there_is_told_so() -> None:
    with pytest.raises(RedisUnavailable, match=r"the cluster at redis://127\.0\.0\.1:1/0 cannot be used"):
        Client("redis+cluster://127.0.0.1:1")


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
async def test_a_cluster_confirms_under_asyncio_too(
    url: str, cluster: list[redis.Redis], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_CONFIRMATIONS, "replica", ("WAIT", 1, 20))  # there is none to wait for
    for node in cluster:
        node.script_flush()
    async with AsyncClient(url, queue=f"safe-{name}") as client:
        await client.submit("x", durability="disk")
        ids = await client.submit_many((GenerationRequest(prompt="x") for _ in range(600)), durability="disk")
        assert len(ids) == 600
        assert (await client.stats()).queued == 601
        with pytest.raises(NotDurable, match="no replica has confirmed"):
            await client.submit("x", durability="replica")


def test_a_cluster_client_that_is_there_already_is_shared(cluster: list[redis.Redis]) -> None:
    with redis.RedisCluster("127.0.0.1", port_of(cluster[1]), socket_timeout=10) as existing:
        with Client(existing, queue="shared") as client:
            job_id = client.submit("x", durability="disk")
            assert client.cancel(job_id) == "cancelled"
            assert [event.state for event in client.stream(job_id)] == ["cancelled"]
        assert existing.get("not-there") is None


async def test_the_same_under_asyncio(cluster: list[redis.Redis]) -> None:
    async with redis.asyncio.RedisCluster("127.0.0.1", port_of(cluster[1]), socket_timeout=10) as existing:
        async with AsyncClient(existing, queue="shared-async") as client:
            job_id = await client.submit("x", durability="disk")
            assert await client.cancel(job_id) == "cancelled"
            assert [event.state async for event in client.stream(job_id)] == ["cancelled"]
        assert await existing.get("not-there") is None


async def test_close_ends_the_readers_of_a_cluster(url: str, cluster: list[redis.Redis]) -> None:
    client = AsyncClient(url, queue="closed")
    await client.submit("x", job_id="a", delay_s=100)
    reading = asyncio.create_task(client.wait("a"))
    while not any(node.info("clients")["blocked_clients"] for node in cluster):
        await asyncio.sleep(0.01)
    await client.close()
    with pytest.raises(QueueError, match="this client is closed"):
        await reading


def test_the_users_of_the_readme_need_two_rules_more(cluster: list[redis.Redis]) -> None:
    users = re.findall(r"^ACL SETUSER (\w+) (.*)$", DEPLOYMENT, re.MULTILINE)
    (more,) = re.findall(r"On a cluster add `(.*?)`", DEPLOYMENT)
    for node in cluster:
        for user, rules in users:
            Transport(node).send(("ACL", "SETUSER", user, *rules.split(), *more.split()))
    url_of = {user: f"redis+cluster://{user}:secret@127.0.0.1:{port_of(cluster[0])}" for user, _ in users}
    with Client(url_of["producer"]) as producer, Client(url_of["reader"]) as reader:
        job_id = producer.submit("x")
        engine = Engine(JobQueue(connect(url_of["engine"])))
        engine.finish(engine.claim_one(), Event(offset=0, token_ids=[1], text="x"))
        assert "".join(event.text for event in reader.stream(job_id)) == "x"


def test_a_url_of_one_node_is_told_to_name_the_cluster(cluster: list[redis.Redis]) -> None:
    servers = [f"redis://127.0.0.1:{port_of(node)}/0" for node in cluster]
    with pytest.raises(InvalidRedisURL, match=r"is a node of a Redis Cluster: write redis\+cluster://"):
        JobQueue(connect(servers[0])).check_server()
    for name in ("a", "b", "c", "d"):  # in slots of both nodes, so each node has answered MOVED
        told = [error for server in servers if (error := error_of_stats(server, name))]
        assert len(told) == 1
        assert "is a node of a Redis Cluster: write redis+cluster://" in str(told[0])


def error_of_stats(server: str, queue: str) -> InvalidRedisURL | None:
    with Client(server, queue=queue) as client:
        try:
            client.stats()
        except InvalidRedisURL as error:
            return error
    return None
