"""Logs one line of figures every 10 s while an engine has work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from millrace.engine_service.engine import EngineMetrics
from millrace.engine_service.serving.job_table import JobMetrics

logger = logging.getLogger("millrace.engine")

EVERY_S = 10.0


class StatusLog:
    """Owns the thread that logs the line. It only reads."""

    def __init__(self, engine: Callable[[], EngineMetrics], jobs: Callable[[], JobMetrics]) -> None:
        """`engine` and `jobs` return the present metrics."""
        self._engine, self._jobs = engine, jobs
        self._before, self._before_s = self._counts(engine(), jobs()), time.monotonic()
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
        metrics, span_s = self._engine(), now_s - self._before_s
        counts = self._counts(metrics, self._jobs())
        num_out, num_in, num_finished, num_failed = (now - old for now, old in zip(counts, self._before, strict=True))
        has_news = counts != self._before
        self._before, self._before_s = counts, now_s
        scheduler = metrics.scheduler
        if not (has_news or scheduler.num_running or scheduler.num_waiting):
            return
        fields = {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "tokens_per_s_out": round(num_out / span_s, 1),
            "tokens_per_s_in": round(num_in / span_s, 1),
            "kv_use_percent": round(100 * metrics.pool_use, 1),
            "finished": num_finished,
            "failed": num_failed,
        }
        logger.info(
            "running %d, waiting %d; tokens/s: %.1f out, %.1f in; KV pool %.1f %% used; jobs finished %d, failed %d",
            *fields.values(),
            extra={"fields": fields},
        )

    @staticmethod
    def _counts(engine: EngineMetrics, jobs: JobMetrics) -> tuple[int, ...]:
        """Return what is counted since the start of the engine: output tokens, prompt tokens with each chunk of a prompt,
        finished and failed jobs."""
        ended = jobs.num_by_outcome
        return engine.executor.num_tokens, engine.scheduler.num_prompt_tokens, ended["finished"], ended["failed"]
