"""Sends commands to the server, loads scripts that it has forgotten, and maps its errors to ours."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Self, TypeVar

import redis
import redis.asyncio
from redis.exceptions import NoScriptError

from millrace.results.connection import (
    CLIENT_ERRORS,
    AsyncConnection,
    Connection,
    borrow,
    borrow_async,
    connect,
    connect_async,
    node_of,
    node_of_async,
    server_name,
)
from millrace.results.connection_cache import ConnectionCache
from millrace.results.errors import QueueError, RedisUnavailable
from millrace.results.scripts import Command, is_script, source_of
from millrace.results.server_errors import as_unavailable, is_of_replica, is_unanswered_handshake
from millrace.results.shared_reads import SharedReads, is_blocking

Reply = Any
"""What redis-py returns under RESP2: bytes, int, None or nested lists."""

T = TypeVar("T")
Call = Generator[list[Command], list[Reply], T]
"""A call of several round trips, which sync and async clients share: it yields the commands of one round trip, receives
their replies, and returns its result."""

_REPLY_OFF, _REPLY_ON = ("CLIENT", "REPLY", "OFF"), ("CLIENT", "REPLY", "ON")

_MAX_ROUND_TRIPS = 64
"""How many calls of an AsyncTransport are under way together. Each takes a connection, and more are no faster."""

_CLOSED = "this client is closed"
_OTHER_LOOP = re.compile("loop is closed|different (event )?loop|the handler is closed")
"""What asyncio and, at last, uvloop say."""


class _Guard:
    """Refuses calls, which are `with` blocks, after `close`. Maps what redis-py raises in them to RedisUnavailable, or to
    QueueError where the command is at fault."""

    def __init__(self, server: str) -> None:
        self._server = server
        self.is_closed = False

    def __enter__(self) -> None:
        if self.is_closed:
            raise QueueError(_CLOSED)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.is_closed and isinstance(error, (*CLIENT_ERRORS, RedisUnavailable)):
            raise QueueError(_CLOSED) from error  # a cluster's client closes all connections, also those in use
        if isinstance(error, CLIENT_ERRORS):
            raise as_unavailable(error, self._server) or _at_fault(error, self._server) from error
        if isinstance(error, RuntimeError) and _OTHER_LOOP.search(str(error)):
            raise QueueError("this client belongs to another event loop: make one for each") from error


class Transport:
    """Sends commands through a client of `connection.connect`. Thread-safe.

    A command without a reply in time is sent once more, on another connection; except through clients that do so themselves
    (borrowed ones and a cluster's) and through `blocking` ones.
    """

    def __init__(self, client: redis.Redis, *, is_borrowed: bool = False) -> None:
        """A borrowed client stays open after `close`."""
        self._client = client
        self._is_borrowed = is_borrowed
        self._server = server_name(client)
        self._guard = _Guard(self._server)
        # A borrowed pool may be small, and a cluster's client finds the node for each command.
        has_own_pool = not is_borrowed and not isinstance(client, redis.RedisCluster)
        self._cache = ConnectionCache(client) if has_own_pool else None
        retry = client.get_retry() if has_own_pool else None
        self._sends_again = retry is not None and retry.get_retries() > 0
        self._executed: set[str | bytes] = set()
        """Digests of scripts that were sent with `meanwhile`."""

    @classmethod
    def to(cls, server: str | Connection | None) -> Self:
        """Make a transport with an own client for a URL (None: that of the environment), or with a given client."""
        if server is None or isinstance(server, str):
            return cls(connect(server))
        return cls(borrow(server), is_borrowed=True)

    @property
    def has_connected(self) -> bool:
        """Whether a command may have reached the server. True where that is not known, as of borrowed clients."""
        return bool(getattr(getattr(self._client, "connection_pool", None), "has_connected", True))

    def send(self, command: Command, meanwhile: Callable[[], None] | None = None) -> Reply:
        """Send a command and return the reply. Raises RedisUnavailable, or QueueError where the command is at fault.

        `meanwhile` is called while the server executes the command, but not before this transport knows that the server has
        the script: it may take long, and the command would wait for it. It is never called through a borrowed client or a
        cluster's, and several times where the command is sent again.
        """
        with self._guard:
            try:
                reply = self._call(command, meanwhile if meanwhile and command[1] in self._executed else None)
            except NoScriptError:
                self._load(command)
                reply = self._call(command, meanwhile)
        if meanwhile:
            self._executed.add(command[1])
        return reply

    def send_many(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands in one pipeline, not atomically; return the replies. Raises as `send`, for the first at fault."""
        return _checked(self.send_each(commands), self._server)

    def send_each(self, commands: Sequence[Command]) -> list[Reply]:
        """Like `send_many`, but a command that is itself at fault has its error (a ResponseError) in place of a reply.

        A command whose script the server had forgotten runs after the others, so send commands that need an order apart.
        """
        with self._guard:
            replies = self._pipeline(commands)
            forgotten = _forgotten(replies)
            if forgotten:
                self._load(*(commands[i] for i in forgotten))
                for i, reply in zip(forgotten, self._pipeline([commands[i] for i in forgotten]), strict=True):
                    replies[i] = reply
            return _checked(replies, self._server, only_unavailable=True)

    def send_together(self, commands: Sequence[Command], last: Command) -> tuple[list[Reply], Reply]:
        """Send commands of one script, then `last`, on one connection, and return the replies and that to `last`.

        An error of `last` takes the place of its reply. Where the server had forgotten the script, all are sent again.
        """
        with self._guard:
            node = node_of(self._pooled(), str(commands[0][3]))  # its key
            *replies, answer = self._pipeline([*commands, last], node)
            if _forgotten(replies):
                self._load(commands[0])
                *replies, answer = self._pipeline([*commands, last], node)
            return _checked(replies, self._server), answer

    def wait(self, blocking: Command, key: str) -> None:
        """Wait until a blocking command on this key has a reply, and have the server drop the reply, whatever its size.

        Errors of the command are dropped too: callers must not wait in a loop without a pause.
        """
        with self._guard:
            pool = node_of(self._pooled(), key).connection_pool
            connection: Any = pool.get_connection()
            try:
                connection.send_packed_command(connection.pack_commands([_REPLY_OFF, blocking, _REPLY_ON]))
                connection.read_response()  # of the last one; the others have none
            except BaseException:
                connection.disconnect()
                raise
            finally:
                pool.release(connection)

    def find_keys(self, pattern: str) -> list[str]:
        """Return the keys that match a pattern, of all nodes of a cluster. Takes about a second for a million keys."""
        with self._guard:
            return [key.decode() for key in self._pooled().scan_iter(match=pattern, count=10_000)]

    def close(self) -> None:
        """Close the connections; that of a call in flight when it ends. Every later call raises QueueError."""
        self._guard.is_closed = True
        self._disconnect()

    def _call(self, command: Command, meanwhile: Callable[[], None] | None = None) -> Reply:
        cache = self._cache if is_script(command) else None
        (reply,) = self._send([command], cache, lambda: self._execute(command), meanwhile)
        if isinstance(reply, redis.ResponseError):
            raise reply
        return reply

    def _pipeline(self, commands: Sequence[Command], node: redis.Redis | None = None) -> list[Reply]:
        cache = self._cache if node is None and all(map(is_script, commands)) else None
        return self._send(commands, cache, lambda: self._execute_together(commands, node))

    def _send(
        self,
        commands: Sequence[Command],
        cache: ConnectionCache | None,
        execute: Callable[[], list[Reply]],
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Reply]:
        """Send commands through the cache, or by `execute`. Return the replies, or errors in their place."""
        try:
            replies = cache.call(commands, meanwhile) if cache else execute()
        except redis.TimeoutError as error:
            if not self._sends_again or is_unanswered_handshake(error, self._server):
                raise
            replies = execute()
        except redis.ConnectionError:  # redis-py itself sends again after a lost connection, but not for the cache
            if not (self._sends_again and cache):
                raise
            replies = execute()
        self._disconnect_after(*replies)
        return replies

    def _execute(self, command: Command) -> list[Reply]:
        execute: Callable[..., Reply] = self._pooled().execute_command
        try:
            return [execute(*command)]
        except redis.ResponseError as error:
            return [error]

    def _load(self, *commands: Command) -> None:
        for source in {source_of(command) for command in commands}:
            self._call(("SCRIPT LOAD", source))

    def _execute_together(self, commands: Sequence[Command], node: redis.Redis | None) -> list[Reply]:
        with (node or self._pooled()).pipeline(transaction=False) as pipe:
            enqueue: Callable[..., Any] = pipe.execute_command
            for command in commands:
                enqueue(*command)
            return pipe.execute(raise_on_error=False)

    def _disconnect_after(self, *replies: Reply) -> None:
        """Close the idle connections after `close`, and if the server has become a replica: its name may lead to the new
        primary by now. A cluster's client follows redirections instead."""
        if self._guard.is_closed:
            self._disconnect()
        elif any(map(is_of_replica, replies)) and not isinstance(self._client, redis.RedisCluster):
            self._pooled().connection_pool.disconnect(inuse_connections=False)

    def _disconnect(self) -> None:
        """Close the client's own connections, of a single server only the idle ones."""
        if self._is_borrowed:
            return
        if isinstance(self._client, redis.RedisCluster):
            self._client.close()
        else:
            self._pooled().connection_pool.disconnect(inuse_connections=False)

    def _pooled(self) -> redis.Redis:
        """Return the client after the cache has released its connections, so that no second one is opened."""
        if self._cache:
            self._cache.release_idle()
        return self._client


class AsyncTransport:
    """The same for asyncio."""

    def __init__(self, client: redis.asyncio.Redis, *, is_borrowed: bool = False) -> None:
        self._client = client
        self._is_borrowed = is_borrowed
        self._server = server_name(client)
        self._guard = _Guard(self._server)
        self._sends_again = not is_borrowed and not isinstance(client, redis.asyncio.RedisCluster)
        self._reads = SharedReads(self.send)
        self._slots = asyncio.Semaphore(_MAX_ROUND_TRIPS)

    @classmethod
    def to(cls, server: str | AsyncConnection | None) -> AsyncTransport:
        if server is None or isinstance(server, str):
            return cls(connect_async(server))
        return cls(borrow_async(server), is_borrowed=True)

    async def send(self, command: Command) -> Reply:
        with self._guard:
            try:
                return await self._call(command)
            except NoScriptError:
                await self._load(command)
                return await self._call(command)

    async def send_many(self, commands: Sequence[Command]) -> list[Reply]:
        if len(commands) == 1 and is_blocking(commands[0]):
            return [await self._reads.read(commands[0])]
        with self._guard:
            replies = await self._pipeline(commands)
            forgotten = _forgotten(replies)
            if forgotten:
                await self._load(*(commands[i] for i in forgotten))
                for i, reply in zip(forgotten, await self._pipeline([commands[i] for i in forgotten]), strict=True):
                    replies[i] = reply
            return _checked(replies, self._server)

    async def send_together(self, commands: Sequence[Command], last: Command) -> tuple[list[Reply], Reply]:
        with self._guard:
            node = await node_of_async(self._client, str(commands[0][3]))  # its key
            try:
                *replies, answer = await self._pipeline([*commands, last], node)
                if _forgotten(replies):
                    await self._load(commands[0])
                    *replies, answer = await self._pipeline([*commands, last], node)
            finally:
                if node is not self._client:
                    await node.aclose()
            return _checked(replies, self._server), answer

    async def close(self) -> None:
        self._guard.is_closed = True
        await self._disconnect()

    async def _call(self, command: Command) -> Reply:
        (reply,) = await self._send([command], lambda: self._execute(command))
        if isinstance(reply, redis.ResponseError):
            raise reply
        return reply

    async def _pipeline(self, commands: Sequence[Command], node: redis.asyncio.Redis | None = None) -> list[Reply]:
        return await self._send(commands, lambda: self._execute_together(commands, node))

    async def _send(self, commands: Sequence[Command], execute: Callable[[], Awaitable[list[Reply]]]) -> list[Reply]:
        async with contextlib.nullcontext() if any(map(is_blocking, commands)) else self._slots:
            try:
                replies = await execute()
            except redis.TimeoutError as error:
                if not self._sends_again or is_unanswered_handshake(error, self._server):
                    raise
                replies = await execute()
        await self._disconnect_after(*replies)
        return replies

    async def _execute(self, command: Command) -> list[Reply]:
        execute: Callable[..., Awaitable[Reply]] = self._client.execute_command
        try:
            return [await execute(*command)]
        except redis.ResponseError as error:
            return [error]

    async def _load(self, *commands: Command) -> None:
        for source in {source_of(command) for command in commands}:
            await self._call(("SCRIPT LOAD", source))

    async def _execute_together(self, commands: Sequence[Command], node: redis.asyncio.Redis | None) -> list[Reply]:
        async with (node or self._client).pipeline(transaction=False) as pipe:
            enqueue: Callable[..., Any] = pipe.execute_command
            for command in commands:
                enqueue(*command)
            return await pipe.execute(raise_on_error=False)

    async def _disconnect_after(self, *replies: Reply) -> None:
        if self._guard.is_closed:
            await self._disconnect()
        elif any(map(is_of_replica, replies)) and not isinstance(self._client, redis.asyncio.RedisCluster):
            await self._client.connection_pool.disconnect(inuse_connections=False)

    async def _disconnect(self) -> None:
        if self._is_borrowed:
            return
        if isinstance(self._client, redis.asyncio.RedisCluster):
            await self._client.aclose()
        else:
            await self._client.connection_pool.disconnect(inuse_connections=False)


def _forgotten(replies: list[Reply]) -> list[int]:
    return [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]


def _checked(replies: list[Reply], server: str, *, only_unavailable: bool = False) -> list[Reply]:
    """Return the replies. Raises the first error among them; with `only_unavailable` only RedisUnavailable."""
    for reply in replies:
        if isinstance(reply, redis.RedisError):
            unavailable = as_unavailable(reply, server)
            if unavailable or not only_unavailable:
                raise unavailable or _at_fault(reply, server) from reply
    return replies


def _at_fault(error: Exception, server: str) -> QueueError:
    return QueueError(f"Redis at {server} refused a command: {error}")
