"""The jobs that an engine service holds."""

from __future__ import annotations

import time
from collections.abc import Callable

from millrace.engine_service.serving.capacity import Capacity
from millrace.engine_service.serving.job_metrics import JobMetrics, JobRecorder, Outcome
from millrace.engine_service.serving.jobs import PendingJob, ServedJob, is_alone
from millrace.executor.wire.messages import SeqId
from millrace.results.messages import ClaimedJob, JobId, Lease


class JobTable:
    """Owns the jobs that the engine loop has taken, and reports each change to capacity, leases and metrics.

    For the engine loop; `metrics` for any thread.
    """

    def __init__(self, capacity: Capacity, on_over: Callable[[JobId, Lease], None]) -> None:
        """`on_over` is called with each lease that this engine needs no longer."""
        self._capacity = capacity
        self._on_over = on_over
        self._recorder = JobRecorder()
        self._served: dict[JobId, ServedJob] = {}
        self._by_sequence: dict[SeqId, ServedJob] = {}
        self._pending: dict[JobId, PendingJob] = {}

    def __repr__(self) -> str:
        return f"JobTable({len(self._served)} served, {len(self._pending)} pending)"

    def metrics(self) -> JobMetrics:
        return self._recorder.metrics(num_open=len(self._served) + len(self._pending))

    # --- served ---

    def served(self) -> list[ServedJob]:
        return list(self._served.values())

    def get(self, job_id: JobId) -> ServedJob | None:
        return self._served.get(job_id)

    def of_sequence(self, seq_id: SeqId) -> ServedJob:
        return self._by_sequence[seq_id]

    def add(self, job: ServedJob) -> None:
        self._capacity.arrive(job.cost)
        self._served[job.job_id] = job
        self._by_sequence[job.generation.sequence.seq_id] = job
        job.arrived_s = job.saved_at_s = time.monotonic()

    def remove(self, job: ServedJob, outcome: Outcome) -> None:
        self._recorder.count(outcome, time.monotonic() - job.arrived_s)
        del self._served[job.job_id]
        del self._by_sequence[job.generation.sequence.seq_id]
        self._capacity.close(is_alone=job.is_alone)
        self._on_over(job.job_id, job.lease)

    def remove_unserved(self, claimed: ClaimedJob, outcome: Outcome) -> None:
        """A job that could not be served leaves without having been added."""
        self._recorder.count(outcome)
        self._capacity.arrive(claimed.cost)
        self._capacity.close(is_alone=is_alone(claimed))
        self._on_over(claimed.job_id, claimed.lease)

    # --- pending ---

    def pending(self) -> list[PendingJob]:
        return list(self._pending.values())

    def get_pending(self, job_id: JobId) -> PendingJob | None:
        return self._pending.get(job_id)

    def add_pending(self, job: PendingJob) -> None:
        self._pending[job.claimed.job_id] = job

    def end_preparation(self, job: PendingJob) -> None:
        del self._pending[job.claimed.job_id]
        self._capacity.end_preparation(job.claimed.cost)

    def withdraw(self, job: PendingJob, outcome: Outcome) -> None:
        job.is_withdrawn = True
        self.end_preparation(job)
        self.remove_unserved(job.claimed, outcome)
