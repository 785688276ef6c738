from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from millrace import results
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.errors import RedisUnavailable, ServerUnsuitable
from millrace.results.queue import JobQueue
from millrace.results.server_check import check_server
from millrace.results.transport import Transport


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
