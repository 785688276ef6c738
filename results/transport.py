"""Sends commands to the server: scripts that it has forgotten are loaded, its errors become ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import NoScriptError

from millrace.results.connection import (
    CLIENT_ERRORS,
    AsyncConnection,
    Connection,
    as_unavailable,
    borrow,
    borrow_async,
    connect,
    connect_async,
    node_of,
    node_of_async,
    server_name,
)
from millrace.results.connection_cache import ConnectionCache
from millrace.results.errors import QueueError
from millrace.results.scripts import Command, is_script, source_of

Reply = Any
"""What the server answers, as redis-py gives it under RESP2: bytes, int, None or nested lists."""

_REPLY_OFF, _REPLY_ON = ("CLIENT", "REPLY", "OFF"), ("CLIENT", "REPLY", "ON")
_KEY = 3
"""Where a script's command has its key."""


class _OurErrors:
    """What redis-py raises in its `with` block becomes RedisUnavailable, or QueueError where the command is at fault."""

    def __init__(self, server: str) -> None:
        self._server = server

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, CLIENT_ERRORS):
            raise as_unavailable(error, self._server) or _at_fault(error, self._server) from error


class Transport:
    """Sends commands through a client of `connection.connect`. May be used by several threads.

    What a server has not answered in time is sent once more, on another connection; but for clients that do so themselves,
    a borrowed one and a cluster's, and for one that is to send nothing again.
    """

    def __init__(self, client: redis.Redis, *, is_borrowed: bool = False) -> None:
        """A borrowed client stays open when this is closed."""
        self._client = client
        self._is_borrowed = is_borrowed
        self._server = server_name(client)
        self._our_errors = _OurErrors(self._server)
        # A borrowed pool may be small, and a cluster's client finds the node for each command.
        has_own_pool = not is_borrowed and not isinstance(client, redis.RedisCluster)
        self._held = ConnectionCache(client) if has_own_pool else None
        retry = client.get_retry() if has_own_pool else None
        self._sends_again = retry is not None and retry.get_retries() > 0

    @classmethod
    def to(cls, server: str | Connection | None) -> Transport:
        """Over a client of our own for a URL (None: that of the environment), or over one that is there already."""
        if server is None or isinstance(server, str):
            return cls(connect(server))
        return cls(borrow(server), is_borrowed=True)

    def send(self, command: Command) -> Reply:
        """The reply to one command. Raises RedisUnavailable, or QueueError where the command is at fault."""
        with self._our_errors:
            try:
                return self._call(command)
            except NoScriptError:
                self._load(command)
                return self._call(command)

    def send_many(self, commands: Sequence[Command]) -> list[Reply]:
        """The replies to commands that travel together. Not atomic. Raises as `send` does, for the first at fault."""
        return _all_good(self.send_each(commands), self._server)

    def send_each(self, commands: Sequence[Command]) -> list[Reply]:
        """Like `send_many`, but a command that is itself at fault gets its error (a ResponseError) in place of a reply.

        A command whose script the server had forgotten runs after the others: commands that need an order do not travel
        together.
        """
        with self._our_errors:
            replies = self._pipeline(commands)
            forgotten = _forgotten(replies)
            if forgotten:
                self._load(*(commands[i] for i in forgotten))
                for i, reply in zip(forgotten, self._pipeline([commands[i] for i in forgotten]), strict=True):
                    replies[i] = reply
        return _raise_unavailable(replies, self._server)

    def send_together(self, commands: Sequence[Command], last: Command) -> tuple[list[Reply], Reply]:
        """The replies to commands of one script, and to a `last` one that speaks of all that its connection has sent.

        An error of `last` takes the place of its reply. Where the server had forgotten the script, everything is sent
        again, on one connection too.
        """
        with self._our_errors:
            node = node_of(self._pooled(), str(commands[0][_KEY]))
            *replies, answer = self._pipeline([*commands, last], node)
            if _forgotten(replies):
                self._load(commands[0])
                *replies, answer = self._pipeline([*commands, last], node)
        return _all_good(_raise_unavailable(replies, self._server), self._server), answer

    def wait(self, blocking: Command, key: str) -> None:
        """Wait until a blocking command on this key has a reply, and have the server drop the reply, whatever its size.

        Errors of the command are dropped too: callers must not wait in a loop without a pause.
        """
        with self._our_errors:
            pool = node_of(self._pooled(), key).connection_pool
            connection = pool.get_connection()
            try:
                connection.send_packed_command(connection.pack_commands([_REPLY_OFF, blocking, _REPLY_ON]))
                connection.read_response()  # of the last one; the others have none
            except BaseException:
                connection.disconnect()
                raise
            finally:
                pool.release(connection)

    def close(self) -> None:
        if not self._is_borrowed:
            self._client.close()

    def _call(self, command: Command) -> Reply:
        try:
            if self._held and is_script(command):
                return self._held.call(command)
            return self._execute(command)
        except redis.TimeoutError:
            if not self._sends_again:
                raise
        except redis.ConnectionError:  # of a held one it is the first; redis-py has tried the others again
            if not (self._sends_again and is_script(command)):
                raise
        return self._execute(command)

    def _execute(self, command: Command) -> Reply:
        execute: Callable[..., Reply] = self._pooled().execute_command
        return execute(*command)

    def _load(self, *commands: Command) -> None:
        for source in {source_of(command) for command in commands}:
            self._call(("SCRIPT LOAD", source))

    def _pipeline(self, commands: Sequence[Command], node: redis.Redis | None = None) -> list[Reply]:
        with (node or self._pooled()).pipeline(transaction=False) as pipe:
            enqueue: Callable[..., Any] = pipe.execute_command

            def send() -> list[Reply]:
                for command in commands:
                    enqueue(*command)
                return pipe.execute(raise_on_error=False)

            try:
                return send()
            except redis.TimeoutError:
                if not self._sends_again:
                    raise
                return send()

    def _pooled(self) -> redis.Redis:
        """The client, with what is held back in its pool, so that nobody needs a second connection for it."""
        if self._held:
            self._held.give_back()
        return self._client


class AsyncTransport:
    """The same for asyncio."""

    def __init__(self, client: redis.asyncio.Redis, *, is_borrowed: bool = False) -> None:
        self._client = client
        self._is_borrowed = is_borrowed
        self._server = server_name(client)
        self._our_errors = _OurErrors(self._server)
        self._sends_again = not is_borrowed and not isinstance(client, redis.asyncio.RedisCluster)

    @classmethod
    def to(cls, server: str | AsyncConnection | None) -> AsyncTransport:
        if server is None or isinstance(server, str):
            return cls(connect_async(server))
        return cls(borrow_async(server), is_borrowed=True)

    async def send(self, command: Command) -> Reply:
        with self._our_errors:
            try:
                return await self._call(command)
            except NoScriptError:
                await self._load(command)
                return await self._call(command)

    async def send_many(self, commands: Sequence[Command]) -> list[Reply]:
        with self._our_errors:
            replies = await self._pipeline(commands)
            forgotten = _forgotten(replies)
            if forgotten:
                await self._load(*(commands[i] for i in forgotten))
                for i, reply in zip(forgotten, await self._pipeline([commands[i] for i in forgotten]), strict=True):
                    replies[i] = reply
        return _all_good(_raise_unavailable(replies, self._server), self._server)

    async def send_together(self, commands: Sequence[Command], last: Command) -> tuple[list[Reply], Reply]:
        with self._our_errors:
            node = await node_of_async(self._client, str(commands[0][_KEY]))
            try:
                *replies, answer = await self._pipeline([*commands, last], node)
                if _forgotten(replies):
                    await self._load(commands[0])
                    *replies, answer = await self._pipeline([*commands, last], node)
            finally:
                if node is not self._client:
                    await node.aclose()
        return _all_good(_raise_unavailable(replies, self._server), self._server), answer

    async def close(self) -> None:
        if not self._is_borrowed:
            await self._client.aclose()

    async def _call(self, command: Command) -> Reply:
        execute: Callable[..., Awaitable[Reply]] = self._client.execute_command
        try:
            return await execute(*command)
        except redis.TimeoutError:
            if not self._sends_again:
                raise
            return await execute(*command)

    async def _load(self, *commands: Command) -> None:
        for source in {source_of(command) for command in commands}:
            await self._call(("SCRIPT LOAD", source))

    async def _pipeline(self, commands: Sequence[Command], node: redis.asyncio.Redis | None = None) -> list[Reply]:
        async with (node or self._client).pipeline(transaction=False) as pipe:
            enqueue: Callable[..., Any] = pipe.execute_command

            async def send() -> list[Reply]:
                for command in commands:
                    enqueue(*command)
                return await pipe.execute(raise_on_error=False)

            try:
                return await send()
            except redis.TimeoutError:
                if not self._sends_again:
                    raise
                return await send()


def _forgotten(replies: list[Reply]) -> list[int]:
    return [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]


def _raise_unavailable(replies: list[Reply], server: str) -> list[Reply]:
    for reply in replies:
        if isinstance(reply, redis.RedisError) and (unavailable := as_unavailable(reply, server)):
            raise unavailable from reply
    return replies


def _all_good(replies: list[Reply], server: str) -> list[Reply]:
    for reply in replies:
        if isinstance(reply, redis.RedisError):
            raise _at_fault(reply, server) from reply
    return replies


def _at_fault(error: Exception, server: str) -> QueueError:
    return QueueError(f"Redis at {server} refused a command: {error}")
