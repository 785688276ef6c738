"""TLS in front of a server that has none: what a proxy such as stunnel or a hosted Redis does."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from urllib.parse import urlparse

CHUNK_BYTES = 65536


class TlsTerminator:
    """Owns a port that speaks TLS and hands what it hears to a server's unix socket. Runs in a thread of its own."""

    def __init__(self, server_url: str, context: ssl.SSLContext) -> None:
        self._path = urlparse(server_url).path
        self._context = context
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.port = int(self._server.sockets[0].getsockname()[1])

    def __enter__(self) -> TlsTerminator:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        # A client that does not trust us breaks the handshake off; that is its right and no news for the log.
        self._loop.set_exception_handler(lambda loop, context: None)
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)

    async def _close(self) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(self._path)
            await _pump_both((reader, server_writer), (server_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # one side has gone, or we close
        finally:
            writer.transport.abort()
            self._connections.discard(task)


async def _pump_both(*ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Until either side ends; then both have."""
    pumps = [asyncio.ensure_future(_pump(*way)) for way in ways]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump, (_, writer) in zip(pumps, ways, strict=True):
            pump.cancel()
            writer.transport.abort()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
