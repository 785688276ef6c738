"""A proxy between engines and their server that can fail as networks do, also at a chosen command.

    client --to_server--> | gate | --> server
    client <--to_client-- | gate | <-- server

A closed gate keeps what arrives and hands it on when it opens again, as TCP does when a cut cable is repaired.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Literal
from urllib.parse import urlparse

from millrace.results.scripts import script_command

Direction = Literal["to_server", "to_client"]
Fault = Literal["hold-request", "hold-reply", "cut-before-reply"]
"""What happens at the chosen command: it does not reach the server; its reply does not come back; the same, and the
connection is closed."""

CHUNK_BYTES = 65536
MAX_NEEDLE_BYTES = 39
"""Bytes of a script's SHA-1 in hexadecimal, all but one, so that no match is found twice."""


class Catch:
    """One fault that waits for its command. Its connection is held from then until `release`."""

    def __init__(self, needle: bytes, fault: Fault, release: Callable[[], None]) -> None:
        self.needle = needle
        self.fault = fault
        self.release = release
        self._caught = threading.Event()

    @property
    def is_caught(self) -> bool:
        return self._caught.is_set()

    def mark(self) -> None:
        self._caught.set()

    def comes_within(self, limit_s: float) -> bool:
        return self._caught.wait(limit_s)

    def wait(self, limit_s: float = 120.0) -> None:
        """Wait until the command has come."""
        assert self.comes_within(limit_s), f"no such command came within {limit_s:g} s"


class _Connection:
    """Owns the two gates of one connection."""

    def __init__(self) -> None:
        self.to_server = asyncio.Event()
        self.to_client = asyncio.Event()
        self.to_server.set()
        self.to_client.set()
        self.must_cut = False
        self.tail = b""
        """The last bytes from the client: a command may come in two pieces."""
        self.writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """Owns a port in front of a server and everything that passes through it. Runs in a thread of its own."""

    def __init__(self, server_url: str) -> None:
        self._target = urlparse(server_url)
        self._loop = asyncio.new_event_loop()
        self._connections: set[_Connection] = set()
        self._catches: list[Catch] = []
        self._is_open = {"to_server": True, "to_client": True}
        self._is_refusing = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- faults ----------------------------------------------------------------------------------------------------

    def blackhole(self, *directions: Direction) -> None:
        """Hold all data in these directions, on old and new connections. No connection is closed."""
        self._call(lambda: self._set_gates(directions, is_open=False))

    def heal(self) -> None:
        """Pass all data again, also what was held."""
        self._call(lambda: self._set_gates(("to_server", "to_client"), is_open=True))

    def cut(self) -> None:
        """Reset every connection. New ones are accepted."""
        self._call(self._cut)

    def refuse(self, is_refusing: bool = True) -> None:
        """Reset every connection, and every new one until `refuse(False)`."""

        def apply() -> None:
            self._is_refusing = is_refusing
            if is_refusing:
                self._cut()

        self._call(apply)

    def lead_to(self, server_url: str, *, cut: bool = True) -> None:
        """Lead to another server from now on, as after a failover. Every connection is reset; or stays, as when only a DNS
        name has been changed."""

        def apply() -> None:
            self._target = urlparse(server_url)
            if cut:
                self._cut()

        self._call(apply)

    def catch(self, script: str, fault: Fault) -> Catch:
        """Make the fault happen once, at the next call of this script, which the server has to know already."""
        needle = str(script_command(script, "")[1]).encode()
        catch = Catch(needle, fault, self.heal)
        self._call(lambda: self._catches.append(catch))
        return catch

    # --- the loop --------------------------------------------------------------------------------------------------

    def _call(self, action: Callable[[], None]) -> None:
        async def run() -> None:
            action()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _close(self) -> None:
        self._server.close()
        self._cut()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _set_gates(self, directions: tuple[Direction, ...], *, is_open: bool) -> None:
        for direction in directions:
            self._is_open[direction] = is_open
            for connection in self._connections:
                gate: asyncio.Event = getattr(connection, direction)
                if is_open:
                    gate.set()
                else:
                    gate.clear()

    def _cut(self) -> None:
        for connection in list(self._connections):
            connection.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection()
        connection.writers.append(writer)
        for direction, is_open in self._is_open.items():
            if not is_open:
                getattr(connection, direction).clear()
        if self._is_refusing:
            connection.cut()
            return
        self._connections.add(connection)
        try:
            server_reader, server_writer = await self._connect()
            connection.writers.append(server_writer)
            await self._pump_both(connection, (reader, server_writer), (server_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # the server is not there, or one side has gone, or we close: the other side hears of it
        finally:
            connection.cut()
            self._connections.discard(connection)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._target.scheme == "unix":
            return await asyncio.open_unix_connection(self._target.path)
        return await asyncio.open_connection(self._target.hostname, self._target.port)

    async def _pump_both(
        self,
        connection: _Connection,
        up: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        down: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        pumps = [
            asyncio.ensure_future(self._pump(*up, connection.to_server, lambda data: self._watch(connection, data))),
            asyncio.ensure_future(self._pump(*down, connection.to_client, lambda _: not connection.must_cut)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        gate: asyncio.Event,
        may_pass: Callable[[bytes], bool],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if not may_pass(data):
                    return
                await gate.wait()
                writer.write(data)
                await writer.drain()

    def _watch(self, connection: _Connection, data: bytes) -> bool:
        """Look for the command of a catch and start its fault. The client's side continues."""
        seen = connection.tail + data
        connection.tail = seen[-MAX_NEEDLE_BYTES:]
        for catch in self._catches:
            if catch.needle in seen:
                self._catches.remove(catch)
                self._begin(catch.fault, connection)
                catch.mark()
                break
        return True

    def _begin(self, fault: Fault, connection: _Connection) -> None:
        match fault:
            case "hold-request":
                connection.to_server.clear()
            case "hold-reply":
                connection.to_client.clear()
            case "cut-before-reply":
                connection.must_cut = True
