"""Logs one line of figures every 10 s while an engine has work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

logger = logging.getLogger("millrace.engine")

EVERY_S = 10.0


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What the line is made of. The last four count since the start of the engine."""

    num_running: int
    num_waiting: int
    kv_use: float
    """Share of the KV pool's blocks that sequences hold, 0 to 1."""
    num_generated_tokens: int
    num_prompt_tokens: int
    num_finished: int
    num_failed: int


class StatusLog:
    """Owns the thread that logs the line. It only reads."""

    def __init__(self, read: Callable[[], Figures]) -> None:
        self._read = read
        self._before, self._before_s = read(), time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self.log(time.monotonic())

    def log(self, now_s: float) -> None:
        """Log what has happened since the last call; nothing if nothing has."""
        now, before, span_s = self._read(), self._before, now_s - self._before_s
        self._before, self._before_s = now, now_s
        if now == before and not now.num_running and not now.num_waiting:
            return
        fields = {
            "running": now.num_running,
            "waiting": now.num_waiting,
            "tokens_per_s_out": round((now.num_generated_tokens - before.num_generated_tokens) / span_s, 1),
            "tokens_per_s_in": round((now.num_prompt_tokens - before.num_prompt_tokens) / span_s, 1),
            "kv_use_percent": round(100 * now.kv_use, 1),
            "finished": now.num_finished - before.num_finished,
            "failed": now.num_failed - before.num_failed,
        }
        logger.info(
            "running %d, waiting %d; tokens/s: %.1f out, %.1f in; KV pool %.1f %% used; jobs finished %d, failed %d",
            *fields.values(),
            extra={"fields": fields},
        )
