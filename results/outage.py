"""Repeats calls in an outage of Redis. It is logged once, however many threads notice it, then each minute, and for a new
reason."""

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
REPORT_EVERY_S = 60.0


class Outage:
    """Owns which threads cannot use Redis now, and how many outages have ended. Logs when the first thread fails, while it
    lasts, and when the last thread succeeds again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failing: dict[str, float] = {}
        """By the name of the thread: since when."""
        self._last_reasons: dict[str, str] = {}
        """By the name of the thread: why its last call that failed did so."""
        self.num_ended = 0
        self._since_s = 0.0
        self._reasons: set[str] = set()
        """Those that are logged."""
        self._logged_s = 0.0
        """When the last line was logged."""

    def repeat(self, step: Callable[[], object], stopping: threading.Event) -> None:
        """Call `step` until the event is set, after an error again in RETRY_S. For the main loop of a thread, which sees no
        outage any more when it ends."""
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
        with self._lock:
            self._failing.pop(threading.current_thread().name, None)

    def note_failure(self, error: Exception) -> None:
        """A call of this thread has failed and will be repeated."""
        name = threading.current_thread().name
        reason, now_s = str(error), self._clock()
        with self._lock:
            if not self._failing:
                self._since_s = now_s
                self._reasons.clear()
            self._failing.setdefault(name, now_s)
            self._last_reasons[name] = reason
            # The first reason may be that of the moment, such as a connection that was closed.
            is_new = reason not in self._reasons and (not self._reasons or now_s >= self._logged_s + SETTLED_S)
            is_due = is_new or now_s >= self._logged_s + REPORT_EVERY_S
            if is_due:
                self._reasons.add(reason)
                self._logged_s = now_s
            lasted_s, names = now_s - self._since_s, ", ".join(self._failing)
        since = f" for {lasted_s:.0f} s" if lasted_s >= REPORT_EVERY_S else ""
        level = logging.WARNING if is_due else logging.DEBUG
        logger.log(level, "outage%s, seen by %s: %s; trying again", since, names, reason)

    def note_success(self) -> None:
        """A call of this thread has succeeded. Costs next to nothing without an outage."""
        if not self._failing or (name := threading.current_thread().name) not in self._failing:
            return
        with self._lock:
            del self._failing[name]
            has_ended = not self._failing
            self.num_ended += has_ended
        if has_ended:
            logger.info("the outage is over after %.1f s", self._clock() - self._since_s)

    def is_seen_by(self, thread_name: str) -> bool:
        """Return whether the last call of this thread has failed."""
        return thread_name in self._failing

    def longest(self) -> tuple[float, str]:
        """Return for how many seconds the calls of a thread have failed, of the one that has failed for longest, and a line
        that says so; 0 and an empty line without an outage. Never blocks."""
        if not (failing := dict(self._failing)):
            return 0.0, ""
        name = min(failing, key=failing.__getitem__)
        lasted_s, reason = self._clock() - failing[name], self._last_reasons[name]
        return lasted_s, f"{reason} (the thread {name!r} has not been able to use Redis for {lasted_s:.1f} s)"
