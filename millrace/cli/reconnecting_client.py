"""The client of the verbs that wait: an outage of the server does not end them."""

from __future__ import annotations

import time

from millrace.cli.output import remark
from millrace.producer import Client
from millrace.results.connection import Connection
from millrace.results.reconnect import ReconnectingTransport
from millrace.results.transport import Transport


class ReconnectingClient(Client):
    """Continues after an outage, except one that the first call meets. Reports outages on stderr."""

    def _connect(self, url: str | Connection | None) -> Transport:
        self._reconnecting = ReconnectingTransport.to(url)
        self._reconnecting.report = remark
        return self._reconnecting

    def limit_waiting(self, timeout_s: float | None) -> None:
        """Give up an outage, too, when this time is over."""
        if timeout_s is not None:
            self._reconnecting.ends_s = time.monotonic() + timeout_s
