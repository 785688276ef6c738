"""Repeats calls in an outage of Redis. It is logged once, however many threads notice it, and again for a new reason."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from millrace.results.errors import QueueError

logger = logging.getLogger("millrace.results")

RETRY_S = 0.5
SETTLED_S = 5.0
"""After this time another reason is logged too."""


class Outage:
    """Owns which threads cannot use Redis now, and how many outages have ended. Logs when the first thread fails and when
    the last one succeeds again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failing: set[str] = set()
        self.num_ended = 0
        self._since_s = 0.0
        self._reasons: set[str] = set()
        """Those that are logged."""
        self._reason_s = 0.0
        """When the last one was."""

    def repeat(self, step: Callable[[], object], stopping: threading.Event) -> None:
        """Call `step` until the event is set, after an error again in RETRY_S. For the main loop of a thread."""
        while not stopping.is_set():
            try:
                step()
                self.note_success()
            except QueueError as error:
                self.note_failure(error)
                stopping.wait(RETRY_S)
            except Exception:  # our bug: it must not end the thread
                logger.exception("%s: trying again", threading.current_thread().name)
                stopping.wait(RETRY_S)

    def note_failure(self, error: Exception) -> None:
        """A call of this thread has failed and will be repeated."""
        name = threading.current_thread().name
        reason, now_s = str(error), self._clock()
        with self._lock:
            if not self._failing:
                self._since_s = now_s
                self._reasons.clear()
            self._failing.add(name)
            # The first reason may be that of the moment, such as a connection that was closed.
            is_new = reason not in self._reasons and (not self._reasons or now_s >= self._reason_s + SETTLED_S)
            if is_new:
                self._reasons.add(reason)
                self._reason_s = now_s
        level = logging.WARNING if is_new else logging.DEBUG
        logger.log(level, "outage, seen by %s: %s; trying again", name, reason)

    def note_success(self) -> None:
        """A call of this thread has succeeded. Costs next to nothing without an outage."""
        if not self._failing or (name := threading.current_thread().name) not in self._failing:
            return
        with self._lock:
            self._failing.remove(name)
            has_ended = not self._failing
            self.num_ended += has_ended
        if has_ended:
            logger.info("the outage is over after %.1f s", self._clock() - self._since_s)
