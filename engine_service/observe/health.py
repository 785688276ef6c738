"""Whether this engine does its work, for supervisors: not only that the process is there, but that steps move."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from millrace.engine_service.engine import Engine
from millrace.engine_service.serving.leases import Leases


class Health:
    """Judges from what the loop and the heartbeat have noted. Asks nobody and never blocks; any thread may ask it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._leases: Leases | None = None
        self._threads: Sequence[threading.Thread] = ()

    def watch(self, leases: Leases, threads: Sequence[threading.Thread]) -> None:
        """From now on the engine serves, and Redis has to hear of it; none of these threads may end."""
        self._leases, self._threads = leases, threads

    def let_threads_end(self) -> None:
        """The engine is leaving."""
        self._threads = ()

    def unhealthy_reason(self) -> str | None:
        """What is wrong, in one line. None while steps move, or while there is nothing to do, or while the engine sleeps."""
        if not self._engine.is_started or self._leases is None:
            return "the engine is starting"
        if dead := [thread.name for thread in self._threads if not thread.is_alive()]:
            return f"the thread {dead[0]!r} has died; restart the engine"
        now_s = time.monotonic()
        return self._engine.unhealthy_reason(now_s) or self._leases.unhealthy_reason(now_s)

    def state(self) -> str:
        """What a healthy engine is about."""
        return f"asleep, level {self._engine.sleep_level}" if self._engine.sleep_level else "serving"
