from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.sentinel import Sentinel

from millrace import AsyncClient, Client, results
from millrace.embedded import EmbeddedServer, find_server
from millrace.results.connection import connect
from millrace.results.errors import InvalidRedisURL, RedisUnavailable, ServerUnsuitable
from millrace.results.queue import JobQueue
from millrace.results.server_check import check_server
from millrace.results.transport import Transport
from tests.millrace.cli.command import run_main
from tests.processes import wait_until


class Pretender:
    """A client of a server that tells what it is told to tell."""

    def __init__(self, **info: Any) -> None:
        self._info = info
        self.connection_pool = connect("redis://pretender").connection_pool

    def info(self) -> dict[str, Any]:
        return self._info


def check(**info: Any) -> list[str]:
    return check_server(Pretender(**info), "key")  # type: ignore[arg-type]


def test_a_server_that_evicts_is_refused() -> None:
    with EmbeddedServer(options={"maxmemory-policy": "allkeys-lru"}) as server:
        client = connect(server.url)
        with pytest.raises(ServerUnsuitable, match=r"allkeys-lru.*noeviction"):
            JobQueue(client).check_server()
        client.close()


def test_a_server_without_aof_is_warned_of() -> None:
    with EmbeddedServer() as server:
        client = connect(server.url)
        (warning,) = JobQueue(client).check_server()
        assert "no AOF" in warning
        client.close()


def test_a_server_with_all_that_is_needed_is_fine() -> None:
    with EmbeddedServer(appendonly=True) as server:
        client = connect(server.url)
        assert JobQueue(client).check_server() == []
        client.close()


def test_a_server_that_does_not_permit_the_question_is_warned_of() -> None:
    with EmbeddedServer() as server:
        client = connect(server.url)
        Transport(client).send(("ACL SETUSER", "default", "-info"))
        (warning,) = JobQueue(client).check_server()
        assert "does not permit INFO" in warning
        client.close()


@pytest.mark.parametrize(
    "versions",
    [{"redis_version": "6.0.16"}, {"redis_version": "5.0"}, {"redis_version": "7.2.4", "valkey_version": "7.0.1"}],
)
def test_a_server_that_is_too_old_is_refused(versions: dict[str, str]) -> None:
    with pytest.raises(ServerUnsuitable, match="is needed"):
        check(**versions, maxmemory_policy="noeviction", aof_enabled=1)


@pytest.mark.parametrize(
    "versions",
    [{"redis_version": "6.2.0"}, {"redis_version": "8.0.1"}, {"redis_version": "7.2.4", "valkey_version": "7.2.0"}],
)
def test_a_server_that_is_new_enough_is_fine(versions: dict[str, str]) -> None:
    assert check(**versions, maxmemory_policy="noeviction", aof_enabled=1) == []


def test_a_policy_that_is_not_told_is_warned_of() -> None:
    assert "maxmemory-policy" in check(redis_version="7.0.0", aof_enabled=1)[0]


@pytest.mark.parametrize("name", ["redis_mode", "server_mode"])
def test_a_sentinel_is_refused_by_what_it_calls_itself(name: str) -> None:
    with pytest.raises(
        InvalidRedisURL, match=r"is a Sentinel, which does not hold the data: give the URL of the master"
    ):
        check(redis_version="7.0.0", **{name: "sentinel"})


@pytest.mark.parametrize("name", ["redis_mode", "server_mode"])
def test_a_node_of_a_cluster_is_refused_without_a_client_for_clusters(name: str) -> None:
    with pytest.raises(InvalidRedisURL, match=r"is a node of a Redis Cluster: write redis\+cluster://"):
        check(redis_version="7.0.0", **{name: "cluster"})


@pytest.fixture(scope="module")
def sentinel_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a Sentinel with a master, `mymaster`."""
    with EmbeddedServer(tcp=True) as master:
        port = free_port()
        configuration = tmp_path_factory.mktemp("sentinel") / "sentinel.conf"  # it writes there
        watched = f"sentinel monitor mymaster 127.0.0.1 {master.url.split(':')[2].split('/')[0]} 1"
        configuration.write_text(f"port {port}\nbind 127.0.0.1\nlogfile {configuration}.log\n{watched}\n")
        with subprocess.Popen([find_server(), configuration, "--sentinel"]) as process:
            try:
                wait_until(lambda: is_listening(port), what="the Sentinel")
                yield port
            finally:
                process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_url_of_a_sentinel_is_an_invalid_one(sentinel_port: int) -> None:
    with pytest.raises(InvalidRedisURL, match="is a Sentinel"):
        JobQueue(connect(f"redis://127.0.0.1:{sentinel_port}/0")).check_server()


@pytest.mark.parametrize(
    ("verb", "database"),
    [
        (("stats",), 0),
        (("stats",), 1),
        (("queues",), 0),
        (("wait", "a"), 0),
        (("wait", "a", "b"), 0),
        (("tail", "a"), 0),
        (("gateway", "rq", "--queues", "a"), 0),
        (("gateway", "rq", "--queues", "a", "--check"), 0),
    ],
)
def test_a_verb_at_a_sentinel_ends_with_one_line(sentinel_port: int, verb: tuple[str, ...], database: int) -> None:
    ran = run_main(*verb, "--redis", f"redis://127.0.0.1:{sentinel_port}/{database}")
    assert (ran.status, ran.out) == (2, "")
    (line,) = [line for line in ran.err.splitlines() if line.startswith("millrace: ")]
    assert "a Sentinel, which does not hold the data: give the URL of the master" in line
    assert "Traceback" not in ran.err


async def test_the_async_client_of_a_sentinel_has_the_same_error(sentinel_port: int) -> None:
    async with AsyncClient(f"redis://127.0.0.1:{sentinel_port}/0") as client:
        with pytest.raises(InvalidRedisURL, match="a Sentinel, which does not hold the data"):
            await client.stats()


def test_a_client_of_redis_py_for_the_master_works(sentinel_port: int) -> None:
    sentinel: Any = Sentinel([("127.0.0.1", sentinel_port)])  # type: ignore[no-untyped-call]
    master = sentinel.master_for("mymaster", socket_timeout=15)
    with Client(master, queue="behind-sentinel") as client:
        assert client.cancel(client.submit("x")) == "cancelled"
    master.close()


def test_a_server_that_is_away_cannot_be_checked() -> None:
    with pytest.raises(RedisUnavailable, match="Cannot connect to Redis"):
        JobQueue(connect("redis://127.0.0.1:1")).check_server()


def test_no_script_hands_redis_a_negated_number() -> None:
    """Of 0 that is -0 in Lua, which Redis 6.2 writes as "-0" and then takes for no integer; `0 - number` is never that."""
    wrong = [
        f"{path.name}: {line.strip()}"
        for path in sorted(Path(results.__file__).with_name("lua").rglob("*.lua"))
        for line in path.read_text().splitlines()
        if re.search(r"[(,=]\s*-[a-z#(]", line.partition("-- ")[0])
    ]
    assert wrong == []
