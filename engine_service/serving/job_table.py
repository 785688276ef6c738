"""The jobs that an engine service holds."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import msgspec

from millrace.engine_service.serving.capacity import Capacity
from millrace.engine_service.serving.jobs import Candidate, PendingJob, ServedJob, is_alone
from millrace.executor.histogram import Histogram
from millrace.executor.wire.messages import SeqId
from millrace.results.messages import ClaimedJob, JobId, Lease

Outcome = Literal["finished", "failed", "cancelled", "expired", "released", "lost"]
"""How a job left this engine: it ended, went back to the queue ("released"), or went to another engine ("lost")."""


_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 150, 300, 600, 1800, 3600, 10800, 43200, 86400)
_BOUNDS_TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class JobMetrics(msgspec.Struct, kw_only=True):
    """Figures since the start of the engine."""

    num_open: int = 0
    num_by_outcome: dict[Outcome, int] = msgspec.field(default_factory=lambda: dict.fromkeys(get_args(Outcome), 0))
    """A job that fails and is tried again counts each time."""
    num_prompt_tokens: int = 0
    """Prompt tokens of the jobs whose first token this engine has sampled."""
    queue_s: Histogram = msgspec.field(default_factory=partial(Histogram, _BOUNDS_S))
    """From when a job could run until this engine had it, in the first attempt; so is the next field."""
    first_token_s: Histogram = msgspec.field(default_factory=partial(Histogram, _BOUNDS_S))
    """From when a job could run until its first token."""
    end_to_end_s: Histogram = msgspec.field(default_factory=partial(Histogram, _BOUNDS_S))
    """From when a job could run until it has finished; so are the next fields."""
    prompt_tokens: Histogram = msgspec.field(default_factory=partial(Histogram, _BOUNDS_TOKENS))
    output_tokens: Histogram = msgspec.field(default_factory=partial(Histogram, _BOUNDS_TOKENS))


class JobTable:
    """Owns the jobs that the engine loop has taken, and reports each change to capacity, leases and metrics.

    Its methods are for the engine loop; `metrics` is for any thread.
    """

    def __init__(self, capacity: Capacity, on_over: Callable[[JobId, Lease], None]) -> None:
        self._capacity = capacity
        self._on_over = on_over
        self.served: dict[JobId, ServedJob] = {}
        self.by_sequence: dict[SeqId, tuple[ServedJob, Candidate]] = {}
        self.pending: dict[JobId, PendingJob] = {}
        """Jobs that are slow to prepare, until they are prepared."""
        self.num_watched = 0
        """Served jobs that somebody reads."""
        self._metrics = JobMetrics()

    def metrics(self) -> JobMetrics:
        metrics = copy.deepcopy(self._metrics)
        metrics.num_open = len(self.served) + len(self.pending)
        return metrics

    def add(self, job: ServedJob) -> None:
        self._capacity.arrive(job.cost)
        self.served[job.job_id] = job
        self.num_watched += job.is_watched
        for candidate in job.candidates:
            self.by_sequence[candidate.generation.sequence.seq_id] = job, candidate
        job.saved_at_s = time.monotonic()
        if job.awaits_first_token:
            self._metrics.queue_s.add(_since(job.due_s))

    def watch(self, job: ServedJob) -> None:
        """Note that somebody reads a served job."""
        self.num_watched += not job.is_watched
        job.watch()

    def note_first_token(self, job: ServedJob) -> None:
        job.note_first_token()
        self._metrics.first_token_s.add(_since(job.due_s))
        self._metrics.num_prompt_tokens += job.generations[0].sequence.num_prompt_tokens

    def remove(self, job: ServedJob, outcome: Outcome) -> None:
        if outcome == "finished":
            self._metrics.end_to_end_s.add(_since(job.due_s))
            self._metrics.prompt_tokens.add(job.generations[0].sequence.num_prompt_tokens)
            self._metrics.output_tokens.add(sum(len(generation.token_ids) for generation in job.generations))
        del self.served[job.job_id]
        self.num_watched -= job.is_watched
        for candidate in job.candidates:
            del self.by_sequence[candidate.generation.sequence.seq_id]
        self._close(job.job_id, job.lease, outcome, len(job.candidates), is_alone=job.is_alone)

    def remove_unserved(self, claimed: ClaimedJob, outcome: Outcome) -> None:
        """Account for a job that leaves without having been added."""
        self._capacity.arrive(claimed.cost)
        self._close(claimed.job_id, claimed.lease, outcome, len(claimed.checkpoints), is_alone=is_alone(claimed))

    def add_pending(self, job: PendingJob) -> None:
        self.pending[job.claimed.job_id] = job

    def end_preparation(self, job: PendingJob) -> None:
        del self.pending[job.claimed.job_id]
        self._capacity.end_preparation(job.claimed.cost)

    def withdraw(self, job: PendingJob, outcome: Outcome) -> None:
        """Remove a job before it is prepared. The `Prepared` event that may still come has to be ignored."""
        job.is_withdrawn = True
        self.end_preparation(job)
        self.remove_unserved(job.claimed, outcome)

    def _close(self, job_id: JobId, lease: Lease, outcome: Outcome, num_candidates: int, *, is_alone: bool) -> None:
        self._metrics.num_by_outcome[outcome] += 1
        self._on_over(job_id, lease)  # before the capacity: the next claim says how many leases are held
        self._capacity.close(num_candidates, is_alone=is_alone)


def _since(time_s: float) -> float:
    """Return the seconds since a time by the clock of Redis, which may be ahead of this host's."""
    return max(0.0, time.time() - time_s)
