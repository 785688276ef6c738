"""The ways into Millrace, each with a generator of bad input for it.

`send` sends one bad input, made by `rng` alone, so that the same seed sends the same again (under another id). It returns
the ids of jobs that were accepted, and raises AssertionError when the answer is not one of those that are documented.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import socket
import tempfile
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import redis
from rq import Queue
from rq.serializers import JSONSerializer

from millrace import AsyncClient, Client, GenerationRequest, MillraceError, SamplingParams
from millrace.cli import main
from millrace.results.scripts import script_command
from millrace.results.transport import Transport
from tests.fuzz import values

MAX_MESSAGE = 500
EXIT_STATUSES = range(6)


def check_message(message: str) -> None:
    """Check that an error is one line, short, and printable."""
    assert message.strip(), "an error without a message"
    assert len(message) < MAX_MESSAGE, f"{len(message)} characters: {message[:200]!r}"
    wrong = [c for c in message if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert not wrong, f"not printable, {wrong[:5]!r}: {message[:200]!r}"


class EntryPoint(ABC):
    """One way in."""

    name: str
    weight: float

    @abstractmethod
    def send(self, rng: random.Random, job_id: str) -> list[str]:
        """Send one bad input. Returns the ids of jobs that must reach a terminal record."""

    def send_good(self, job_id: str) -> list[str]:
        """Send what `send` sends beside the bad input, without it."""
        return []

    def close(self) -> None:  # noqa: B027
        """Close connections."""


class Inbox(EntryPoint):
    """XADD to the inbox."""

    name, weight = "inbox", 8

    def __init__(self, connection: redis.Redis, queue: str) -> None:
        self._connection = connection
        self._inbox = f"millrace:{{{queue}}}:inbox"

    def send(self, rng: random.Random, job_id: str) -> list[str]:
        field = "job" if rng.random() < 0.95 else values.odd_text(rng)
        self._connection.xadd(self._inbox, {field: values.body(rng, job_id)})
        return []


class SyncClient(EntryPoint):
    """Calls of `Client` with arguments of every kind."""

    name, weight = "client", 6

    def __init__(self, url: str, queue: str) -> None:
        self._client = Client(url, queue=queue)

    def send(self, rng: random.Random, job_id: str) -> list[str]:
        name, arguments = bad_call(rng, job_id)
        with documented_errors():
            result = getattr(self._client, name)(**arguments)
            if name in ("stream", "as_completed"):
                result = list(zip(range(3), result, strict=False))
            return accepted(name, result)
        return []

    def close(self) -> None:
        self._client.close()


class AsyncioClient(EntryPoint):
    """The same calls of `AsyncClient`."""

    name, weight = "async client", 3

    def __init__(self, url: str, queue: str) -> None:
        self._url, self._queue = url, queue

    def send(self, rng: random.Random, job_id: str) -> list[str]:
        name, arguments = bad_call(rng, job_id)
        with documented_errors():
            return asyncio.run(self._call(name, arguments))
        return []

    async def _call(self, name: str, arguments: dict[str, Any]) -> list[str]:
        async with AsyncClient(self._url, queue=self._queue) as client:
            result = getattr(client, name)(**arguments)
            if isinstance(result, Coroutine):
                return accepted(name, await result)
            async for _ in result:
                break
            return []


def bad_call(rng: random.Random, job_id: str) -> tuple[str, dict[str, Any]]:
    """Return a public method of the clients, and bad arguments for it."""
    anything = values.python_value
    calls: list[Callable[[], tuple[str, dict[str, Any]]]] = [
        lambda: ("submit", {"job_id": job_id, **_keywords(values.fields(rng))}),
        lambda: ("submit", {"prompt": "3 + 4 =", rng.choice(values.FIELDS[2:]): anything(rng)}),
        lambda: ("submit", {"prompt": "x", rng.choice(["durability", "batch", "job_id", "sampling"]): anything(rng)}),
        lambda: ("submit_many", {"requests": anything(rng)}),
        lambda: ("submit_many", {"requests": [GenerationRequest(prompt="x"), anything(rng)]}),
        lambda: (rng.choice(["get", "cancel", "retry", "position"]), {"job_id": anything(rng)}),
        lambda: ("wait", {"job_id": rng.choice([job_id, anything(rng)]), "timeout_s": rng.choice([0, anything(rng)])}),
        lambda: ("stream", {"job_id": anything(rng)}),
        lambda: ("stream", {"job_id": "no-such-job", "after": rng.choice([anything(rng), "18446744073709551616-0"])}),
        lambda: ("as_completed", {"job_ids": anything(rng), "timeout_s": 0}),
        lambda: (rng.choice(["cancel_many", "delete_many"]), {"job_ids": anything(rng)}),
        lambda: (rng.choice(["batch_status", "cancel_batch", "delete_batch", "retry_batch"]), {"batch": anything(rng)}),
        lambda: ("list_jobs", {"state": rng.choice(["failed", anything(rng)]), "limit": anything(rng)}),
        lambda: ("sleep", {"level": rng.choice([3, "1", None, True, 1.0]), "engine_id": anything(rng)}),
    ]
    return rng.choice(calls)()


def _keywords(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name.isidentifier() and name != "id"}


def accepted(name: str, result: Any) -> list[str]:
    return [result] if name == "submit" else list(result) if name == "submit_many" else []


@contextlib.contextmanager
def documented_errors() -> Iterator[None]:
    """Suppress what the clients document, which is their own errors, and check the messages."""
    try:
        yield
    except MillraceError as error:
        check_message(str(error))


class Scripts(EntryPoint):
    """EVALSHA of what producers and readers may call, with bad arguments."""

    name, weight = "scripts", 5

    _SCRIPTS = (
        "submit",
        "cancel",
        "delete",
        "watch",
        "redrive",
        "get",
        "position",
        "batch",
        "list",
        "trimmed",
        "stats",
    )

    def __init__(self, connection: redis.Redis, queue: str) -> None:
        self._transport = Transport(connection)
        self._prefix = f"millrace:{{{queue}}}:"

    def send(self, rng: random.Random, job_id: str) -> list[str]:
        name = rng.choice(self._SCRIPTS)
        if rng.random() < 0.6:
            name = "submit"
        arguments = self._submission(rng, job_id) if name == "submit" else [self._argument(rng)]
        if rng.random() < 0.1:
            arguments = arguments[: rng.randrange(len(arguments) + 1)]
        with contextlib.suppress(MillraceError):
            outcomes = self._transport.send(script_command(name, self._prefix, *arguments))
            if name == "submit" and list(outcomes) == [b"created"]:
                return [bytes(arguments[0]).decode()]
        return []

    def _submission(self, rng: random.Random, job_id: str) -> list[bytes]:
        """id, digest, body, cost, seed, tenant, priority, streamed, options: good but for one or two."""
        good = [job_id, job_id, '{"prompt":"3 + 4 =","max_tokens":4}', "9", "7", "default", "0", "", ""]
        arguments = [text.encode() for text in good]
        for _ in range(rng.randint(1, 2)):
            arguments[rng.randrange(len(arguments))] = self._argument(rng)
        return arguments

    def _argument(self, rng: random.Random) -> bytes:
        kinds: list[Callable[[], bytes]] = [
            lambda: values.odd_text(rng).encode(),
            lambda: rng.randbytes(rng.randint(0, 20)),
            lambda: str(rng.choice(values.ODD_NUMBERS)).encode(),
            lambda: json.dumps(values.value(rng)).encode(),
            lambda: json.dumps(
                {rng.choice(["delay_ms", "deadline_ms", "meta", "batch", "n"]): values.value(rng)}
            ).encode(),
            lambda: b"x" * rng.choice([64, 65, 128, 129, 100_000]),
        ]
        return rng.choice(kinds)()


class SubmitFile(EntryPoint):
    """`millrace submit --file` with bad lines among good ones."""

    name, weight = "submit --file", 2

    def __init__(self, url: str, queue: str) -> None:
        self._place = ["--redis", url, "--queue", queue]

    def send(self, rng: random.Random, job_id: str) -> list[str]:
        good = _good_lines(job_id)
        lines = [line.encode() for line in good.values()]
        for n in range(rng.randint(1, 3)):
            lines.insert(rng.randrange(len(lines) + 1), values.body(rng, f"{job_id}-bad-{n}").replace(b"\n", b" "))
        submitted = self._submit(b"\n".join(lines) + rng.choice([b"", b"\n", b"\r\n", b"\n\n"]))
        assert good.keys() <= set(submitted), f"good lines were not submitted: {good.keys() - set(submitted)}"
        return submitted

    def send_good(self, job_id: str) -> list[str]:
        return self._submit("\n".join(_good_lines(job_id).values()).encode())

    def _submit(self, content: bytes) -> list[str]:
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            Path(file.name).write_bytes(content)
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = main(["submit", *self._place, "--file", file.name])
        assert status in EXIT_STATUSES, status
        for line in err.getvalue().splitlines():
            check_message(line)
        return out.getvalue().split()


def _good_lines(job_id: str) -> dict[str, str]:
    ids = [f"{job_id}-{n}" for n in range(2)]
    return {one: json.dumps({"id": one, "prompt": "3 + 4 =", "max_tokens": 2}) for one in ids}


class Http(EntryPoint):
    """Bytes to the port of /metrics and /health."""

    name, weight = "http", 2

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    def send(self, rng: random.Random, job_id: str) -> list[str]:
        path = rng.choice(["/metrics", "/health", "/", "/" + "x" * 70_000, "//" + values.odd_text(rng), "*"])
        method = rng.choice(["GET", "GET", "POST", "HEAD", "", "G\x00ET", values.odd_text(rng)])
        header = rng.choice(["", "Accept: " + "x" * 70_000, "Content-Length: -1", "Transfer-Encoding: chunked", "\x00"])
        request = f"{method} {path} HTTP/1.1\r\n{header}\r\n\r\n".encode("utf-8", "replace")
        if rng.random() < 0.3:
            request = rng.randbytes(rng.randint(0, 2_000))
        with contextlib.suppress(OSError), socket.create_connection(self._address, timeout=2) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65_536):
                pass
        return []


class RqGateway(EntryPoint):
    """Jobs of RQ whose fields, or keys beside them, somebody has damaged."""

    name, weight = "rq", 3

    _FIELDS = ("data", "status", "created_at", "enqueued_at", "timeout", "meta", "origin", "description", "result_ttl")
    _KEYS = ("rq:executions:{}", "rq:job:{}:dependents", "rq:results:{}", "rq:job:{}:dependencies")

    def __init__(self, connection: redis.Redis, rq_queue: str) -> None:
        self._connection = connection
        self._queue = Queue(rq_queue, connection=connection, serializer=JSONSerializer)
        self.enqueued: list[str] = []
        """Ids of the damaged jobs."""

    def send(self, rng: random.Random, job_id: str) -> list[str]:
        arguments = {**_keywords(values.fields(rng)), "prompt": "3 + 4 ="}
        with contextlib.suppress(
            TypeError, ValueError, redis.ResponseError
        ):  # RQ's serializer; a key that is damaged already
            job = self._queue.create_job("millrace.generate", kwargs=arguments, job_id=job_id, result_ttl=60)
            job.save()
            for _ in range(rng.randint(0, 2)):
                self._damage(rng, job.key, job_id)
            self._connection.rpush(self._queue.key, job_id)
            self.enqueued.append(job_id)
        return []

    def _damage(self, rng: random.Random, key: str, job_id: str) -> None:
        other = rng.choice(self._KEYS).format(job_id)
        match rng.randrange(6):
            case 0:
                self._connection.hset(key, rng.choice(self._FIELDS), values.odd_text(rng).encode())
            case 1:
                self._connection.hset(key, rng.choice(self._FIELDS), rng.randbytes(rng.randint(0, 50)))
            case 2:
                self._connection.hdel(key, rng.choice(self._FIELDS))
            case 3:
                self._connection.delete(other)
                self._connection.set(other, b"a key of a wrong type", ex=120)
            case 4:
                self._connection.delete(key)
            case _:
                self._connection.delete(key)
                self._connection.set(key, b"a key of a wrong type", ex=120)


def good_request(job_id: str) -> GenerationRequest:
    """Return a job whose answer is known: " 7"."""
    return GenerationRequest(
        id=job_id, prompt="3 + 4 =", tenant="neighbour", sampling=SamplingParams(max_tokens=4, temperature=0)
    )
