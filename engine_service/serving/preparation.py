"""Prepares the requests that take long (a large body, a slow chat, a grammar to check) in a thread of their own, so that no
other job waits for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from millrace.engine_service.serving.jobs import PendingJob


class Preparation:
    """Owns the thread that prepares these jobs, one at a time, and their order: the tenants take turns.

    Jobs come from the claim thread. The engine loop withdraws a job by its `is_withdrawn`.
    """

    def __init__(self, prepare: Callable[[PendingJob], None]) -> None:
        self._prepare = prepare
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[PendingJob]] = {}
        """By tenant. The first one is next."""
        self._is_stopping = False
        self.thread = threading.Thread(target=self._run, name="prepare", daemon=True)

    def put(self, job: PendingJob) -> None:
        with self._changed:
            self._waiting.setdefault(job.claimed.tenant, deque()).append(job)
            self._changed.notify()

    def stop(self) -> None:
        """Prepare nothing more. Returns at once; the thread ends after its current job."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    def _run(self) -> None:
        last_tenant = None
        while (job := self._take(last_tenant)) is not None:
            last_tenant = job.claimed.tenant
            if not job.is_withdrawn:
                self._prepare(job)

    def _take(self, last_tenant: str | None) -> PendingJob | None:
        """Wait for a job and take it. None: stopped.

        `last_tenant` had the last turn. It is put behind only now, so that tenants that came in the meantime are before it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_stopping)
            if self._is_stopping:
                return None
            if last_tenant in self._waiting:
                self._waiting[last_tenant] = self._waiting.pop(last_tenant)
            tenant, jobs = next(iter(self._waiting.items()))
            job = jobs.popleft()
            if not jobs:
                del self._waiting[tenant]
            return job
