"""How safe a job is when `submit` returns, and what is said when the server cannot make it so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from millrace import AsyncClient, Client, GenerationRequest, InvalidRequest, NotDurable
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.durability import _CONFIRMATIONS


@pytest.fixture(scope="module")
def durable() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(
        appendonly=True, tcp=True, options={"appendfsync": "always", "repl-diskless-sync-delay": "0"}
    ) as server:
        yield server


def requests(num_jobs: int) -> list[GenerationRequest]:
    return [GenerationRequest(prompt="x") for _ in range(num_jobs)]


def num_calls(client: redis.Redis, command: str) -> int:
    stats: Any = client.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {}).get("calls", 0))


@pytest.mark.new_redis
def test_jobs_are_on_disk_when_submit_returns(durable: EmbeddedServer) -> None:
    with Client(durable.url, "disk") as client, connect(durable.url) as server:
        client.submit("x", durability="disk")
        before = num_calls(server, "waitaof")
        assert len(client.submit_many(requests(1000), durability="disk")) == 1000
        assert num_calls(server, "waitaof") - before == 1, "once for many"
        server.script_flush()
        client.submit("x", durability="disk")
        assert client.stats().queued == 1002


def test_jobs_are_on_a_replica_when_submit_returns(durable: EmbeddedServer) -> None:
    with EmbeddedServer() as replica, connect(replica.url) as server, Client(durable.url, "replicated") as client:
        host, port = durable.url.removeprefix("redis://").split("/")[0].split(":")
        server.replicaof(host, port)
        client.submit("x", job_id="a", durability="replica")
        assert server.hget("millrace:{replicated}:job:a", "state") == b"queued"
        server.replicaof("NO", "ONE")


@pytest.mark.new_redis
@pytest.mark.parametrize(
    ("durability", "words"),
    [("disk", "needs an append-only file: set appendonly yes"), ("replica", "no replica has confirmed")],
)
def test_a_server_that_cannot_is_named_with_what_to_set_and_the_jobs_are_in(
    client: Client, durability: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_CONFIRMATIONS, "replica", ("WAIT", 1, 20))
    with pytest.raises(NotDurable, match=words) as caught:
        client.submit("x", job_id="a", durability=durability)
    assert caught.value.job_ids == ["a"]
    assert "The jobs are in the queue: a" in str(caught.value)
    assert client.get("a").state == "queued"


def test_a_server_that_is_too_old_is_told_so(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_CONFIRMATIONS, "disk", ("WAITAOF-NOT-THERE",))
    with pytest.raises(NotDurable, match=r"7\.2"):
        client.submit("x", durability="disk")


def test_an_unknown_durability_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"^durability: must be one of memory, disk, replica"):
        client.submit("x", durability="forever")  # type: ignore[arg-type]


@pytest.mark.new_redis
async def test_the_async_client_waits_too(durable: EmbeddedServer) -> None:
    async with AsyncClient(durable.url, "async") as client:
        with connect(durable.url) as server:
            server.script_flush()
        await client.submit_many(requests(300), durability="disk")
        assert (await client.stats()).queued == 300
