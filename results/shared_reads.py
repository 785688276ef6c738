"""Reads of many streams on few connections, for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from millrace.results.errors import RedisUnavailable
from millrace.results.scripts import Command, command

_MAX_READS = 4
"""Reads, and so connections, that block at the same time."""
_MERGE_S = 0.01
"""How long readers wait for one of them to return. After that one is broken off, and sent again with them."""
_S_PER_STREAM = 20e-6
"""How long a read waits before it is sent, for each of its streams. It gathers events; and each read costs the server about
as much time."""
_APART = object()
"""Instead of a reply: the reader has to send its own read."""


def is_blocking(sent: Command) -> bool:
    """Whether this is a read of one stream that waits for an entry, as `commands.read_stream` makes it."""
    return sent[0] == "XREAD" and sent[3] == "BLOCK"


class SharedReads:
    """Sends the blocking reads of many readers together. Alone, each takes a connection, and a round trip for each event.

    A read that returns goes on with those readers for which it has found nothing, and with all that wait meanwhile.
    """

    def __init__(self, send: Callable[[Command], Awaitable[Any]]) -> None:
        self._send = send
        self._waiting: dict[bytes, _Reader] = {}
        """By stream, those that no read has."""
        self._streams: set[bytes] = set()
        """Of all readers."""
        self._reads: dict[asyncio.Task[None], list[_Reader]] = {}
        """The youngest read last."""
        self._timer: asyncio.TimerHandle | None = None
        """Sends the next read."""

    async def read(self, blocking: Command) -> Any:
        """Return the reply to a command for which `is_blocking` holds."""
        reader = _Reader(blocking)
        if reader.stream in self._streams:  # a second reader, who may have read less
            return await self._send(blocking)
        self._streams.add(reader.stream)
        self._add([reader])
        try:
            reply = await reader.reply
            return await self._send(blocking) if reply is _APART else reply
        finally:
            self._streams.remove(reader.stream)
            self._waiting.pop(reader.stream, None)
            await self._end_abandoned()

    def _add(self, readers: Sequence[_Reader]) -> None:
        self._waiting |= {reader.stream: reader for reader in readers}
        if self._waiting:
            loop, pause_s = asyncio.get_running_loop(), _S_PER_STREAM * (len(self._waiting) - 1)
            if len(self._reads) >= _MAX_READS:
                pause_s = max(pause_s, _MERGE_S)
            if self._timer is None or loop.time() + pause_s < self._timer.when():
                self._cancel_timer()
                self._timer = loop.call_later(pause_s, self._begin)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        self._timer = None
        readers, self._waiting = list(self._waiting.values()), {}
        if readers and len(self._reads) >= _MAX_READS:
            youngest, others = self._reads.popitem()
            youngest.cancel()
            readers += [reader for reader in others if not reader.reply.done()]
        if readers:
            self._reads[asyncio.get_running_loop().create_task(self._read(readers))] = readers

    async def _read(self, readers: list[_Reader]) -> None:
        block_s = min(reader.ends_s for reader in readers) - time.monotonic()
        block_ms = max(1, int(block_s * 1000) + 1)  # 0 would be for ever
        streams, ids = [reader.stream for reader in readers], [reader.after for reader in readers]
        sent = command("XREAD", "COUNT", readers[0].count, "BLOCK", block_ms, "STREAMS", *streams, *ids)
        found: dict[bytes, Any] = {}
        error: Exception | None = None
        try:
            found = {one[0]: one for one in await self._send(sent) or ()}
        except Exception as raised:
            error = raised
        self._reads.pop(asyncio.current_task(), None)  # type: ignore[arg-type]  # this is a task
        now_s, others = time.monotonic(), []
        for reader in readers:
            if reader.reply.done():  # its caller was cancelled
                continue
            if isinstance(error, RedisUnavailable) or (error and len(readers) == 1):
                reader.reply.set_exception(error)
            elif error:  # the key of one of them may be no stream
                reader.reply.set_result(_APART)
            elif reader.stream in found or now_s >= reader.ends_s:
                one = found.get(reader.stream)
                reader.reply.set_result([one] if one else None)
            else:
                others.append(reader)
        self._add(others)

    async def _end_abandoned(self) -> None:
        """End the reads for which nobody waits any more."""
        abandoned = [read for read, readers in self._reads.items() if all(reader.reply.done() for reader in readers)]
        for read in abandoned:
            del self._reads[read]
            read.cancel()
        if abandoned:
            await asyncio.wait(abandoned)
        if not self._waiting:
            self._cancel_timer()


class _Reader:
    def __init__(self, blocking: Command) -> None:
        _, _, self.count, _, block_ms, _, stream, self.after = blocking
        self.stream = str(stream).encode()
        self.ends_s = time.monotonic() + int(block_ms) / 1000
        self.reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
