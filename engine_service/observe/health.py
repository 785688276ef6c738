"""Tells supervisors whether an engine works: that its steps advance, not only that its process exists."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from millrace.engine_service.engine import Engine
from millrace.engine_service.serving.leases import Leases


class Health:
    """Reads the state that the engine loop and the heartbeat have stored. Never blocks; for any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._leases: Leases | None = None
        self._threads: Sequence[threading.Thread] = ()

    def watch(self, leases: Leases, threads: Sequence[threading.Thread]) -> None:
        """Start to check heartbeats, and that none of these threads ends."""
        self._leases, self._threads = leases, threads

    def let_threads_end(self) -> None:
        """Stop checking the threads, because the engine drains."""
        self._threads = ()

    def unhealthy_reason(self) -> str | None:
        """Return in one line what is wrong; None while steps advance, or there is no work, or the engine sleeps."""
        if not self._engine.is_started or self._leases is None:
            return "the engine is starting"
        if dead := [thread.name for thread in self._threads if not thread.is_alive()]:
            return f"the thread {dead[0]!r} has died; restart the engine"
        now_s = time.monotonic()
        return self._engine.unhealthy_reason(now_s) or self._leases.unhealthy_reason(now_s)

    def state(self) -> str:
        """Return what a healthy engine does."""
        if self._engine.is_draining:
            return "draining"
        return f"asleep, level {self._engine.sleep_level}" if self._engine.sleep_level else "serving"
