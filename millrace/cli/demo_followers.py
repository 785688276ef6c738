"""The readers of the demo's streamed jobs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.producer import GenerationRequest


class Followers:
    """Owns the texts of the streamed jobs while they grow. Each job has a thread and a connection."""

    def __init__(self, jobs: Sequence[GenerationRequest], redis_url: str, queue: str) -> None:
        self._jobs = [(str(job.id), str(job.prompt)) for job in jobs if job.stream]
        self._redis_url = redis_url
        self._queue = queue
        self._threads: list[threading.Thread] = []
        self.text_by_prompt = {prompt: "" for _, prompt in self._jobs}

    @property
    def have_started(self) -> bool:
        return bool(self._threads)

    def start(self) -> None:
        """Start to read. The jobs must be in the queue."""
        self._threads = [threading.Thread(target=self._follow, args=job, daemon=True) for job in self._jobs]
        for thread in self._threads:
            thread.start()

    def _follow(self, job_id: str, prompt: str) -> None:
        from millrace import Client, MillraceError

        with contextlib.suppress(MillraceError):  # the demo was stopped, and the server is gone
            for event in Client(self._redis_url, queue=self._queue).stream(job_id):
                self.text_by_prompt[prompt] += event.text
