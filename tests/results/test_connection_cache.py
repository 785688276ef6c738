"""Single calls over held connections, and servers that take a call and do not answer."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from millrace import AsyncClient, Client, RedisUnavailable, WaitTimeout
from millrace.results import connection, connection_cache
from millrace.results.connection import connect
from millrace.results.messages import EngineId
from tests.processes import wait_until
from tests.results.full_queue import FullQueue


@pytest.fixture
def client(redis_url: str, queue_name: str) -> Iterator[Client]:
    with Client(redis_url, queue=queue_name) as client:
        yield client


class _Mute:
    """A server that accepts whoever comes and never says a word."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.accepted: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.accepted.append(self._listener.accept()[0])

    def close(self) -> None:
        self._listener.close()
        for accepted in self.accepted:
            accepted.close()


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Mute]:
    for options in (connection._OPTIONS, connection._ASYNC_OPTIONS):
        monkeypatch.setitem(options, "socket_timeout", 0.2)
    server = _Mute()
    yield server
    server.close()


@pytest.mark.parametrize("call", ["submit", "get", "wait", "stats"])
def test_a_server_that_does_not_answer_is_asked_twice_and_given_up(mute: _Mute, call: str) -> None:
    arguments = [] if call == "stats" else ["a-job"]
    with Client(mute.url) as client, pytest.raises(RedisUnavailable, match="does not answer in time"):
        getattr(client, call)(*arguments)
    assert len(mute.accepted) == 2


def test_a_client_that_is_to_send_nothing_again_does_not(mute: _Mute) -> None:
    queue = FullQueue(connect(mute.url, blocking=True))
    with pytest.raises(RedisUnavailable, match="does not answer in time"):
        queue.stats()
    with pytest.raises(RedisUnavailable, match="does not answer in time"):
        queue.wait_for_signal(EngineId("e"), 1, include_wake=True)
    assert len(mute.accepted) == 2


@pytest.mark.parametrize("call", ["submit", "get"])
def test_a_borrowed_client_tries_again_as_it_was_told_to(mute: _Mute, call: str) -> None:
    """Not also as ours do: that would be so many times as long."""
    borrowed = redis.Redis.from_url(mute.url, socket_timeout=10, retry=Retry(NoBackoff(), 2), protocol=2)
    with Client(borrowed) as client:
        borrowed.connection_pool.connection_kwargs["socket_timeout"] = 0.2
        with pytest.raises(RedisUnavailable, match="does not answer in time"):
            getattr(client, call)("a-job")
    by_itself = redis.Redis.from_url(mute.url, socket_timeout=0.2, retry=Retry(NoBackoff(), 2), protocol=2)
    num_accepted = len(mute.accepted)
    with pytest.raises(redis.TimeoutError):
        by_itself.get("a-job")
    assert num_accepted == len(mute.accepted) - num_accepted


async def test_a_server_that_does_not_answer_is_given_up_under_asyncio(mute: _Mute) -> None:
    async with AsyncClient(mute.url) as client:
        with pytest.raises(RedisUnavailable, match="does not answer in time"):
            await client.submit("a prompt")
        with pytest.raises(RedisUnavailable, match="does not answer in time"):
            await client.wait("a-job", timeout_s=0.1)
    assert len(mute.accepted) == 4


def test_on_busy_cores_a_caller_sleeps_for_a_while_instead_of_polling(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[select.poll] = []
    poll = select.poll

    def counted() -> select.poll:
        polls.append(poll())
        return polls[-1]

    monkeypatch.setattr(connection_cache, "SPIN_S", 100.0)
    for _ in range(1 + connection_cache.MOST_CALLS_WITHOUT_SPIN):
        client.stats()  # what the first replies took, while the server got the script, is forgotten
    monkeypatch.setattr(select, "poll", counted)

    def polled(num_calls: int) -> list[int]:
        """How many calls have polled, after each call."""
        return [(client.stats(), len(polls))[1] for _ in range(num_calls)]

    monkeypatch.setattr(connection_cache, "SPIN_S", 0.0)  # every reply is late
    assert polled(6) == [1, 1, 2, 2, 2, 3]
    monkeypatch.setattr(connection_cache, "SPIN_S", 100.0)  # no reply is late
    assert polled(6) == [3, 3, 3, 3, 4, 5]
    monkeypatch.setattr(connection_cache, "SPIN_S", 0.0)
    assert polled(3) == [6, 6, 7]


def _num_connections(admin: redis.Redis, client: Client) -> int:
    name: Any = client._transport._client.connection_pool.connection_kwargs.get("client_name")
    listed: Any = admin.client_list()
    return sum(one["name"] == name for one in listed)


def test_a_client_needs_one_connection_whatever_it_calls(redis_url: str, queue_name: str) -> None:
    admin = connect(redis_url)
    separator = "&" if "?" in redis_url else "?"
    with Client(f"{redis_url}{separator}client_name={queue_name}", queue=queue_name) as client:
        for _ in range(3):
            job_id = client.submit("a prompt")
            assert client.get(job_id).state == "queued"
            assert client.cancel_many([job_id]) == {job_id: "cancelled"}
            client.retry(job_id)
        assert _num_connections(admin, client) == 1
    wait_until(lambda: _num_connections(admin, client) == 0)  # the server sees the end a moment later
    admin.close()


def test_a_held_connection_that_the_server_has_closed_is_replaced(client: Client, redis_client: redis.Redis) -> None:
    first = client.submit("a prompt", job_id="first")
    redis_client.client_kill_filter(_type="normal", skipme=True)
    assert client.submit("a prompt", job_id="first") == first


def test_threads_share_a_client_and_each_gets_its_own_reply(client: Client) -> None:
    wrong: list[str] = []

    def submit_some(name: str) -> None:
        for i in range(100):
            job_id = client.submit("a prompt", job_id=f"{name}-{i}", meta={"by": name})
            if job_id != f"{name}-{i}" or client.position(job_id).state != "queued":
                wrong.append(job_id)

    threads = [threading.Thread(target=submit_some, args=(f"thread{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert client.stats().queued == 800


def test_a_forked_child_leaves_its_parents_connection_alone(client: Client) -> None:
    client.submit("a prompt", job_id="before")
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            ids = [client.submit("a prompt", job_id=f"child-{i}") for i in range(100)]
            os._exit(0 if ids == [f"child-{i}" for i in range(100)] else 1)
        os._exit(2)
    ids = [client.submit("a prompt", job_id=f"parent-{i}") for i in range(100)]
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert ids == [f"parent-{i}" for i in range(100)]
    assert client.stats().queued == 201


class _Interrupted(BaseException):
    pass


def test_the_reply_to_an_interrupted_call_is_nobody_elses(client: Client, redis_client: redis.Redis) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Interrupted

    client.submit("a prompt", job_id="known")
    before = signal.signal(signal.SIGALRM, interrupt)
    redis_client.client_pause(400, all=True)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(_Interrupted):
            client.cancel("known")  # its reply would be "cancelled"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert client.submit("a prompt", job_id="new") == "new"
    assert client.get("known").state in ("cancelled", "queued")


@pytest.mark.parametrize("number", range(1, 8))
def test_after_an_interrupt_between_a_command_and_its_reply_the_next_call_has_its_own_reply(
    client: Client, queue: FullQueue, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A signal may come anywhere; here it comes before the reading of each of the first replies of a `wait`."""
    ended = client.submit("x", job_id="ended")
    client.cancel(ended)
    client.submit("x", job_id="waits")
    num_reads = itertools.count(1)
    read_response = redis.connection.AbstractConnection.read_response

    def interrupted(connection: Any, *arguments: Any, **options: Any) -> Any:
        if next(num_reads) == number:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return read_response(connection, *arguments, **options)

    monkeypatch.setattr(redis.connection.AbstractConnection, "read_response", interrupted)
    with pytest.raises((KeyboardInterrupt, WaitTimeout)):
        client.wait("waits", 0.3)
    monkeypatch.undo()
    assert client.get(ended).state == "cancelled"
    assert client.stats().queued == 1
    assert [job.id for job in client.list_jobs("queued")] == ["waits"]
