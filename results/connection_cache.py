"""Script calls on connections that are kept between calls, which is faster than redis-py's pool and its pipelines."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import hiredis
import redis

from millrace.results.scripts import Command

_Connection: TypeAlias = Any
"""A redis.Connection; its methods have no types."""
_pack: Callable[..., bytes] = hiredis.pack_command
SPIN_S = 0.0002
"""How long a caller polls for a reply before it sleeps. To wake a thread takes about 50 us, as long as a script."""
MOST_CALLS_WITHOUT_SPIN = 64
"""After replies that took longer than that: the cores are busy, and a caller that polls keeps the server from running. After
the first one it is one call, and twice as many after each next one."""


class ConnectionCache:
    """Owns connections of a client's pool between calls. Thread-safe.

    To take a connection from redis-py's pool and release it takes as long as a script. So connections are kept here until
    `release_idle`. The pool opens, closes and counts them.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool
        self._idle: list[_Connection] = []  # its append and pop are atomic
        self._in_use: list[_Connection] = []  # with as many entries as there are calls
        self._calls_without_spin, self._next_without_spin = 0, 1

    def call(self, commands: Sequence[Command], meanwhile: Callable[[], None] | None = None) -> list[object]:
        """Send commands of `script_command` together, once, call `meanwhile`, and return the replies. The error of a command
        takes the place of its reply. Raises as redis-py does when the connection fails."""
        connection = self._take()
        self._in_use.append(connection)
        try:
            connection.send_packed_command([b"".join(map(_pack, commands))])
            if meanwhile is not None:
                meanwhile()
            replies = [self._reply_to_one(connection)] if len(commands) == 1 else [_reply(connection) for _ in commands]
        except BaseException:
            connection.disconnect()  # its next reply would be read as another call's
            self._pool.release(connection)
            raise
        finally:
            self._in_use.pop()
        self._idle.append(connection)
        return replies

    def release_idle(self) -> None:
        """Release the connections that no call uses to the pool."""
        while connection := self._pop():
            self._pool.release(connection)

    def _take(self) -> _Connection:
        while connection := self._pop():
            if connection.pid == os.getpid():  # else it belongs to the parent process
                return connection
        return self._pool.get_connection()

    def _pop(self) -> _Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _reply_to_one(self, connection: _Connection) -> object:
        begin_s = time.perf_counter()
        spins = not self._calls_without_spin and len(self._in_use) == 1  # threads that poll keep others from running
        if spins:
            poller = select.poll()  # redis-py's `can_read` takes several times as long
            poller.register(connection._sock, select.POLLIN)
            while not poller.poll(0) and time.perf_counter() - begin_s < SPIN_S:
                os.sched_yield()
        reply = _reply(connection)
        if not spins:
            self._calls_without_spin = max(0, self._calls_without_spin - 1)
        elif time.perf_counter() - begin_s < SPIN_S:
            self._next_without_spin = 1
        else:
            self._calls_without_spin = self._next_without_spin
            self._next_without_spin = min(2 * self._next_without_spin, MOST_CALLS_WITHOUT_SPIN)
        return reply


def _reply(connection: _Connection) -> object:
    """Return the next reply, or the error that takes its place."""
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error
