"""Sends commands to the server: scripts that it has forgotten are loaded, its errors become ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import NoScriptError

from results.connection import (
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
from results.errors import QueueError
from results.scripts import Command, source_of

Reply = Any
"""What the server answers, as redis-py gives it under RESP2: bytes, int, None or nested lists."""


_KEY = 3
"""Where a script's command has its key."""


class Transport:
    """Sends commands through a client of `connection.connect`. May be used by several threads."""

    def __init__(self, client: redis.Redis, *, is_borrowed: bool = False) -> None:
        """A borrowed client stays open when this is closed."""
        self._client = client
        self._is_borrowed = is_borrowed
        self._execute: Callable[..., Reply] = client.execute_command
        self._server = server_name(client)

    @classmethod
    def to(cls, server: str | Connection | None) -> Transport:
        """Over a client of our own for a URL (None: that of the environment), or over one that is there already."""
        if server is None or isinstance(server, str):
            return cls(connect(server))
        return cls(borrow(server), is_borrowed=True)

    def send(self, command: Command) -> Reply:
        """The reply to one command. Raises RedisUnavailable, or QueueError where the command is at fault."""
        with _our_errors(self._server):
            try:
                return self._execute(*command)
            except NoScriptError:
                self._load(command)
                return self._execute(*command)

    def send_many(self, commands: Sequence[Command]) -> list[Reply]:
        """The replies to commands that travel together. Not atomic. Raises as `send` does, for the first at fault."""
        return _all_good(self.send_each(commands), self._server)

    def send_each(self, commands: Sequence[Command]) -> list[Reply]:
        """Like `send_many`, but a command that is itself at fault gets its error (a ResponseError) in place of a reply.

        A command whose script the server had forgotten runs after the others: commands that need an order do not travel
        together.
        """
        with _our_errors(self._server):
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
        with _our_errors(self._server):
            node = node_of(self._client, str(commands[0][_KEY]))
            *replies, answer = _pipeline(node, [*commands, last])
            if _forgotten(replies):
                self._load(commands[0])
                *replies, answer = _pipeline(node, [*commands, last])
        return _all_good(_raise_unavailable(replies, self._server), self._server), answer

    def close(self) -> None:
        if not self._is_borrowed:
            self._client.close()

    def _load(self, *commands: Command) -> None:
        for source in {source_of(command) for command in commands}:
            self._execute("SCRIPT LOAD", source)

    def _pipeline(self, commands: Sequence[Command]) -> list[Reply]:
        return _pipeline(self._client, commands)


def _pipeline(client: redis.Redis, commands: Sequence[Command]) -> list[Reply]:
    with client.pipeline(transaction=False) as pipe:
        enqueue: Callable[..., Any] = pipe.execute_command
        for command in commands:
            enqueue(*command)
        return pipe.execute(raise_on_error=False)


class AsyncTransport:
    """The same for asyncio."""

    def __init__(self, client: redis.asyncio.Redis, *, is_borrowed: bool = False) -> None:
        self._client = client
        self._is_borrowed = is_borrowed
        self._execute: Callable[..., Awaitable[Reply]] = client.execute_command
        self._server = server_name(client)

    @classmethod
    def to(cls, server: str | AsyncConnection | None) -> AsyncTransport:
        if server is None or isinstance(server, str):
            return cls(connect_async(server))
        return cls(borrow_async(server), is_borrowed=True)

    async def send(self, command: Command) -> Reply:
        with _our_errors(self._server):
            try:
                return await self._execute(*command)
            except NoScriptError:
                await self._load(command)
                return await self._execute(*command)

    async def send_many(self, commands: Sequence[Command]) -> list[Reply]:
        with _our_errors(self._server):
            replies = await self._pipeline(commands)
            forgotten = _forgotten(replies)
            if forgotten:
                await self._load(*(commands[i] for i in forgotten))
                for i, reply in zip(forgotten, await self._pipeline([commands[i] for i in forgotten]), strict=True):
                    replies[i] = reply
        return _all_good(_raise_unavailable(replies, self._server), self._server)

    async def send_together(self, commands: Sequence[Command], last: Command) -> tuple[list[Reply], Reply]:
        with _our_errors(self._server):
            node = await node_of_async(self._client, str(commands[0][_KEY]))
            try:
                *replies, answer = await _pipeline_async(node, [*commands, last])
                if _forgotten(replies):
                    await self._load(commands[0])
                    *replies, answer = await _pipeline_async(node, [*commands, last])
            finally:
                if node is not self._client:
                    await node.aclose()
        return _all_good(_raise_unavailable(replies, self._server), self._server), answer

    async def close(self) -> None:
        if not self._is_borrowed:
            await self._client.aclose()

    async def _load(self, *commands: Command) -> None:
        for source in {source_of(command) for command in commands}:
            await self._execute("SCRIPT LOAD", source)

    async def _pipeline(self, commands: Sequence[Command]) -> list[Reply]:
        return await _pipeline_async(self._client, commands)


async def _pipeline_async(client: redis.asyncio.Redis, commands: Sequence[Command]) -> list[Reply]:
    async with client.pipeline(transaction=False) as pipe:
        enqueue: Callable[..., Any] = pipe.execute_command
        for command in commands:
            enqueue(*command)
        return await pipe.execute(raise_on_error=False)


@contextmanager
def _our_errors(server: str) -> Iterator[None]:
    try:
        yield
    except CLIENT_ERRORS as error:
        raise as_unavailable(error, server) or _at_fault(error, server) from error


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
