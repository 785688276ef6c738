"""What has become of the jobs that this engine took: counts and times, for metrics."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from millrace.executor.metrics import Percentiles, Samples

Outcome = Literal["finished", "failed", "cancelled", "expired", "released", "lost"]
"""How a job left: it ended, was given back to the queue, or is another engine's."""


class JobMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one engine's jobs since it began to serve."""

    num_open: int
    num_by_outcome: dict[Outcome, int]
    """A job that failed here and is tried again counts every time."""
    job_s: Percentiles
    """From a job's arrival in the engine to when it left."""


class JobRecorder:
    """Owns the counts. One thread counts, any may read."""

    def __init__(self) -> None:
        self._num_by_outcome: dict[Outcome, int] = dict.fromkeys(get_args(Outcome), 0)
        self._job_s = Samples()

    def count(self, outcome: Outcome, job_s: float | None = None) -> None:
        """A job has left, after so many seconds here; None when it never ran."""
        self._num_by_outcome[outcome] += 1
        if job_s is not None:
            self._job_s.add(job_s)

    def metrics(self, num_open: int) -> JobMetrics:
        return JobMetrics(num_open=num_open, num_by_outcome=dict(self._num_by_outcome), job_s=self._job_s.percentiles())
