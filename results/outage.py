"""Logs an outage of Redis once, however many threads notice it."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger("millrace.results")


class Outage:
    """Owns which threads cannot use Redis now. Logs when the first one fails and when the last one succeeds again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failing: set[str] = set()
        self._since_s = 0.0

    def note_failure(self, error: Exception) -> None:
        """A call of this thread has failed and will be repeated."""
        name = threading.current_thread().name
        with self._lock:
            has_begun = not self._failing
            self._failing.add(name)
            if has_begun:
                self._since_s = time.monotonic()
        level = logging.WARNING if has_begun else logging.DEBUG
        logger.log(level, "outage, seen by %s: %s; trying again", name, error)

    def note_success(self) -> None:
        """A call of this thread has succeeded. Costs next to nothing without an outage."""
        if not self._failing or (name := threading.current_thread().name) not in self._failing:
            return
        with self._lock:
            self._failing.remove(name)
            has_ended = not self._failing
        if has_ended:
            logger.info("the outage is over after %.1f s", time.monotonic() - self._since_s)
