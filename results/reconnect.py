"""A transport that waits out an outage of the server, for programs that follow jobs for hours."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import redis

from millrace.results.errors import RedisUnavailable
from millrace.results.scripts import Command
from millrace.results.transport import Reply, Transport

RETRY_INTERVAL_S = 0.5
"""Between two attempts, each of which makes the transport's own retries."""

_T = TypeVar("_T")


class ReconnectingTransport(Transport):
    """Repeats a call until the server answers again, and reports each outage once when it begins and once when it ends.

    Every call may be repeated, so nothing is submitted twice. Until the first reply an outage is an error, as in Transport:
    the URL may be wrong. Not thread-safe.
    """

    def __init__(self, client: redis.Redis, *, is_borrowed: bool = False) -> None:
        super().__init__(client, is_borrowed=is_borrowed)
        self.report: Callable[[str], None] = lambda _: None
        self.ends_s = math.inf
        """On the monotonic clock. From then on, an outage raises RedisUnavailable."""
        self._has_answered = False

    def send(self, command: Command, meanwhile: Callable[[], None] | None = None) -> Reply:
        return self._repeat(lambda: super(ReconnectingTransport, self).send(command, meanwhile))

    def send_many(self, commands: Sequence[Command]) -> list[Reply]:
        return self._repeat(lambda: super(ReconnectingTransport, self).send_many(commands))

    def send_together(self, commands: Sequence[Command], last: Command) -> tuple[list[Reply], Reply]:
        return self._repeat(lambda: super(ReconnectingTransport, self).send_together(commands, last))

    def _repeat(self, call: Callable[[], _T]) -> _T:
        is_reported = False
        while True:
            try:
                result = call()
                break
            except RedisUnavailable as error:
                if not (self._has_answered and error.is_outage) or time.monotonic() >= self.ends_s:
                    raise
                if not is_reported:
                    self.report(f"{error} Trying again until the server answers.")
                is_reported = True
                time.sleep(RETRY_INTERVAL_S)
        if is_reported:
            self.report(f"Redis at {self._server} answers again.")
        self._has_answered = True
        return result
