"""The server is away for a while under verbs that wait: they continue, say so once each way, and submit nothing twice."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
import redis
from redis._parsers import BaseParser

from millrace import Client, RedisUnavailable
from millrace.cli.reconnecting_client import ReconnectingClient
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect, server_name
from millrace.results.queue import JobQueue
from millrace.results.server_errors import as_unavailable
from tests.chaos.proxy import Proxy
from tests.millrace.cli.command import Command, started
from tests.millrace.cli.conftest import EngineByHand
from tests.processes import LIMIT_S, wait_until


@pytest.fixture
def proxy(redis_url: str, client: Client) -> Iterator[Proxy]:
    client.stats()
    with Proxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
def client(millrace: Command, redis_url: str, queue_name: str) -> Iterator[Client]:
    """Not through the proxy."""
    with Client(redis_url, queue_name) as client:
        yield client


@pytest.fixture
def behind_proxy(proxy: Proxy, queue_name: str) -> Command:
    return Command(proxy.url, queue_name)


def assert_lost(process: Popen[str]) -> None:
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("millrace: Cannot connect to Redis at redis://127.0.0.1:"), line
    assert line.endswith("Trying again until the server answers.\n")


def assert_back(process: Popen[str], proxy: Proxy) -> str:
    """Wait for its end and return its output."""
    proxy.refuse(False)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (0, f"millrace: Redis at {proxy.url} answers again.\n")
    return out


def test_a_file_is_waited_for(
    behind_proxy: Command, proxy: Proxy, client: Client, engine: EngineByHand, tmp_path: Path
) -> None:
    (file := tmp_path / "jobs").write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "x"}\n')
    with started(*behind_proxy.line("submit", "--file", str(file), "--wait", "--batch", "b")) as process:
        wait_until(lambda: client.stats().queued == 2)
        first, second = engine.claim()
        engine.finish(first, "one")
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["text"] == "one"
        proxy.refuse()
        assert_lost(process)
        engine.finish(second, "two")
        assert json.loads(assert_back(process, proxy))["text"] == "two"


def test_a_file_is_submitted_once_although_the_reply_was_lost(
    behind_proxy: Command, proxy: Proxy, client: Client, tmp_path: Path
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    lines = [f'{{"id": "j{n}", "prompt": "x"}}\n' for n in range(510)]
    with started(*behind_proxy.line("submit", "--file", str(pipe), "--batch", "b")) as process:
        with pipe.open("w") as jobs:
            jobs.writelines(lines[:500])
            jobs.flush()
            wait_until(lambda: client.stats().queued == 500)
            catch = proxy.catch("submit", "hold-reply")
            jobs.writelines(lines[500:])
        catch.wait()
        wait_until(lambda: client.stats().queued == 510)
        proxy.refuse()
        assert_lost(process)
        assert assert_back(process, proxy).split() == [f"j{n}" for n in range(510)]
    assert client.stats().queued == 510


def test_a_job_may_be_in_the_queue_although_no_answer_came(behind_proxy: Command, proxy: Proxy) -> None:
    catch = proxy.catch("submit", "hold-reply")
    with started(*behind_proxy.line("submit", "x")) as process:
        catch.wait()
        proxy.refuse()
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (4, "")
    assert re.search(r"[^.]; job '\w+' may be in the queue; see: millrace get ", err), err


@pytest.mark.parametrize(
    "how", [("tail", "a"), ("submit", "x", "--id", "a", "--stream"), ("submit", "x", "--id", "a", "--wait")]
)
def test_one_job_is_followed(
    how: tuple[str, ...],
    behind_proxy: Command,
    proxy: Proxy,
    client: Client,
    engine: EngineByHand,
    redis_client: redis.Redis,
) -> None:
    client.submit("x", job_id="a", stream="--stream" in how)
    (job,) = engine.claim()
    with started(*behind_proxy.line(*how)) as process:
        wait_until(lambda: redis_client.info("clients")["blocked_clients"])
        proxy.refuse()
        assert_lost(process)
        engine.finish(job, "text")
        assert assert_back(process, proxy) == "text\n"


@pytest.mark.parametrize("how", [("wait", "a"), ("tail", "a"), ("submit", "x", "--id", "a", "--wait")])
def test_a_failover_is_waited_out(how: tuple[str, ...]) -> None:
    """The server becomes a replica, which ends the blocking command, and a primary again."""
    with EmbeddedServer() as server, connect(server.url) as redis_client, Client(server.url) as client:
        engine = EngineByHand(JobQueue(redis_client))
        client.submit("x", job_id="a")
        (job,) = engine.claim()
        with started(*Command(server.url, "default").line(*how)) as process:
            wait_until(lambda: redis_client.info("clients")["blocked_clients"])
            redis_client.replicaof("127.0.0.1", "1")
            assert process.stderr is not None
            line = process.stderr.readline()
            assert "instance state changed" in line or "read-only replica" in line
            assert line.endswith("Trying again until the server answers.\n")
            redis_client.replicaof("NO", "ONE")
            engine.finish(job, "text")
            out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (0, "text\n")
        assert err.endswith(f"millrace: Redis at {server_name(redis_client)} answers again.\n")


def test_a_wait_with_a_limit_gives_up(proxy: Proxy, queue_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with ReconnectingClient(proxy.url, queue_name) as client:
        client.stats()
        client.limit_waiting(0.0)
        proxy.refuse()
        with pytest.raises(RedisUnavailable):
            client.stats()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "error",
    [
        redis.AuthenticationError("invalid username-password pair"),
        redis.exceptions.NoPermissionError("this user has no permissions"),
        redis.OutOfMemoryError("command not allowed"),
        redis.ResponseError("MISCONF cannot write a snapshot"),
    ],
)
def test_what_waiting_does_not_mend_ends_a_verb(error: redis.RedisError) -> None:
    unavailable = as_unavailable(error, "redis://here:1/0")
    assert unavailable is not None
    assert not unavailable.is_outage


@pytest.mark.parametrize(
    "answer",
    [
        "READONLY You can't write against a read only replica.",
        "ERR Error running script (call to f_1): @user_script:1: -READONLY You can't write against a read only replica.",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
        "MASTERDOWN Link with MASTER is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "CLUSTERDOWN The cluster is down",
        "LOADING Redis is loading the dataset in memory",
    ],
)
def test_what_a_failover_answers_is_waited_out(answer: str) -> None:
    error = BaseParser.parse_error(answer)  # type: ignore[no-untyped-call]
    unavailable = as_unavailable(error, "redis://here:1/0")
    assert unavailable is not None
    assert unavailable.is_outage
