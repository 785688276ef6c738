"""Python's signal handlers run between the operations of an engine, and not within one."""

from __future__ import annotations

import inspect
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any, Self

_PATIENCE_S = 10.0
"""How long a signal waits for the operation. After that another one is handled within it, which may then be very long."""


class DeferredSignals:
    """Keeps the program's signal handlers from running before `handle`, or the end of the block. What they raise, such as
    KeyboardInterrupt, would leave a step half planned or half computed. Does nothing outside the main thread, where no
    handler runs."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._pending: dict[int, float] = {}
        """When each signal came that has not been handled (monotonic clock)."""
        self._restore = ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in signal.valid_signals():
                    if callable(handler := signal.getsignal(number)):  # else it is the system's own
                        self._handlers[number] = handler
                        self._restore.callback(self._put_back, number)
                        signal.signal(number, self._defer)
            except BaseException:  # of a signal that came meanwhile
                self._restore.close()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        self._restore.close()
        self.handle()

    def handle(self) -> None:
        """Run the handlers of the signals that have come."""
        while self._pending:
            number, _ = self._pending.popitem()
            self._handlers[number](number, inspect.currentframe())

    def _defer(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s < self._pending.setdefault(number, now_s) + _PATIENCE_S:
            return
        del self._pending[number]
        self._handlers[number](number, frame)

    def _put_back(self, number: int) -> None:
        if signal.getsignal(number) == self._defer:  # else a handler has set another one
            signal.signal(number, self._handlers[number])
