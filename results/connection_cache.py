"""Single script calls without the pool's ceremony, for callers that wait for each reply before they send the next."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import hiredis
import redis

from millrace.results.scripts import Command

_Connection: TypeAlias = Any
"""A redis.Connection, whose methods have no types."""
_pack: Callable[..., bytes] = hiredis.pack_command
LOOK_S = 0.0002
"""How long a caller looks for a reply before it sleeps. A thread that slept needs about 50 us to run again, as long as the
server takes for a script; a reply from farther away than this is not looked for."""


class ConnectionCache:
    """Owns connections of a client's pool between single calls. May be used by several threads.

    Taking one from redis-py's pool, and giving it back, takes as long as a script does; so what was taken is held until
    `give_back`, and the pool, not this, opens, closes and counts.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool
        self._idle: list[_Connection] = []  # its append and pop are atomic
        self._is_near = True

    def call(self, command: Command) -> object:
        """The reply to a command of `script_command`, sent once: no error is tried again. Raises as redis-py does."""
        connection = self._take()
        try:
            connection.send_packed_command([_pack(command)])
            reply = self._read(connection)
        except redis.ResponseError:  # an answer like any other
            self._idle.append(connection)
            raise
        except BaseException:
            connection.disconnect()  # whatever is still to come on it would be taken for another's reply
            self._pool.release(connection)
            raise
        self._idle.append(connection)
        return reply

    def give_back(self) -> None:
        """Back into the pool, with all that no call is using."""
        while connection := self._pop():
            self._pool.release(connection)

    def _take(self) -> _Connection:
        while connection := self._pop():
            if connection.pid == os.getpid():  # else a fork has copied it, and it is the parent's
                return connection
        return self._pool.get_connection()

    def _pop(self) -> _Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _read(self, connection: _Connection) -> object:
        began_s = time.perf_counter()
        if self._is_near:
            while not connection.can_read() and time.perf_counter() - began_s < LOOK_S:
                os.sched_yield()
        reply = connection.read_response()
        self._is_near = time.perf_counter() - began_s < LOOK_S
        return reply
