"""Single script calls on connections that are kept between calls, which is faster than redis-py's pool."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import hiredis
import redis

from millrace.results.scripts import Command

_Connection: TypeAlias = Any
"""A redis.Connection; its methods have no types."""
_pack: Callable[..., bytes] = hiredis.pack_command
SPIN_S = 0.0002
"""How long a caller polls for a reply before it sleeps. To wake a thread takes about 50 us, as long as a script. After a
reply that took longer than this, the next call does not poll."""


class ConnectionCache:
    """Owns connections of a client's pool between single calls. Thread-safe.

    To take a connection from redis-py's pool and release it takes as long as a script. So connections are kept here until
    `release_idle`. The pool opens, closes and counts them.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool
        self._idle: list[_Connection] = []  # its append and pop are atomic
        self._may_spin = True

    def call(self, command: Command) -> object:
        """Send a command of `script_command` once, and return the reply. Raises as redis-py does."""
        connection = self._take()
        try:
            connection.send_packed_command([_pack(command)])
            reply = self._read(connection)
        except redis.ResponseError:  # a reply too
            self._idle.append(connection)
            raise
        except BaseException:
            connection.disconnect()  # its next reply would be read as another call's
            self._pool.release(connection)
            raise
        self._idle.append(connection)
        return reply

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

    def _read(self, connection: _Connection) -> object:
        begin_s = time.perf_counter()
        if self._may_spin:
            while not connection.can_read() and time.perf_counter() - begin_s < SPIN_S:
                os.sched_yield()
        reply = connection.read_response()
        self._may_spin = time.perf_counter() - begin_s < SPIN_S
        return reply
