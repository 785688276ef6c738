"""The runs that a gateway has in flight, and how the start and the end of a run are written into RQ's keys.

RQ writes one job at a time and has no fence. A gateway writes hundreds at once, with RQ's public calls in another order. The
`write_` functions add commands to the caller's transaction and send nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from redis.client import Pipeline
from rq import Queue
from rq.defaults import DEFAULT_RESULT_TTL
from rq.executions import Execution
from rq.job import JobStatus
from rq.repeat import Repeat
from rq.results import Result
from rq.utils import now

from millrace.producer.rq.rq_job import GatewayJob, JobSnapshot
from millrace.producer.rq.source_queue import SourceQueue

EXECUTION_TTL_S = 3600
"""RQ declares an execution abandoned, and fails its job, when nobody has renewed it for this time. So a job survives that
long without any gateway. The takeover of a dead gateway's jobs takes seconds and does not depend on it."""
RENEWAL_INTERVAL_S = 60.0


@dataclass(slots=True, eq=False)
class GatewayRun:
    """One RQ job that this gateway has in flight: registered with RQ, submitted to Millrace, not yet ended."""

    job: GatewayJob
    source: SourceQueue
    millrace_id: str
    execution: Execution
    is_checked: bool = False
    """False: its Millrace job may have ended before the gateway followed it."""
    num_lookups_lost: int = 0
    """How often in a row Millrace did not know the job."""
    is_stopping: bool = False
    """RQ's stop-job command has come."""


class RunEnd(NamedTuple):
    """How a run ends."""

    run: GatewayRun
    kind: Literal["finished", "failed", "stopped", "dropped"]
    """Dropped: RQ's job was cancelled, deleted or taken over by another gateway; no end is written."""
    value: dict[str, Any] | None = None
    reason: str = ""


class RunTable:
    """Owns the table of runs. The intake adds and withdraws runs, the result writer removes them; every thread may read."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._by_job_id: dict[str, GatewayRun] = {}
        self._by_millrace_id: dict[str, GatewayRun] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._by_job_id)

    def add(self, runs: Iterable[GatewayRun]) -> None:
        """Add runs. A run replaces the one of the same RQ job."""
        with self._changed:
            for run in runs:
                if old := self._by_job_id.get(run.job.id):
                    self._remove(old)
                self._by_job_id[run.job.id] = run
                self._by_millrace_id[run.millrace_id] = run

    def remove(self, runs: Iterable[GatewayRun]) -> None:
        """Remove runs; those that are not in the table are skipped."""
        with self._changed:
            for run in runs:
                if self._by_job_id.get(run.job.id) is run:
                    self._remove(run)
            self._changed.notify_all()

    def get(self, job_id: str) -> GatewayRun | None:
        return self._by_job_id.get(job_id)

    def all(self) -> list[GatewayRun]:
        with self._changed:
            return list(self._by_job_id.values())

    def by_millrace_ids(self, millrace_ids: Iterable[str]) -> list[GatewayRun]:
        """Return the runs of these Millrace jobs; jobs of others are skipped."""
        return [run for id_ in dict.fromkeys(millrace_ids) if (run := self._by_millrace_id.get(id_))]

    @property
    def capacity(self) -> int:
        """How many more jobs may be taken."""
        return max(0, self._max_in_flight - len(self._by_job_id))

    def wait_for_capacity(self, timeout_s: float) -> bool:
        """Return whether more jobs may be taken, after the timeout at the latest."""
        with self._changed:
            return self._changed.wait_for(lambda: self.capacity > 0, timeout_s)

    def _remove(self, run: GatewayRun) -> None:
        self._by_job_id.pop(run.job.id, None)
        self._by_millrace_id.pop(run.millrace_id, None)


def write_start(
    pipe: Pipeline, source: SourceQueue, job: GatewayJob, millrace_id: str, gateway: str, snapshot: JobSnapshot
) -> Execution:
    """Start the job: queued, or wherever RQ's cleanup has put it -> started."""
    if snapshot.millrace_id:  # registered before, by this gateway or one that has died
        _write_left_registries(pipe, source, job, snapshot.status)
    # RQ would find an old execution abandoned one day, and fail the job.
    write_executions_deleted(pipe, job, snapshot)
    execution = Execution.create(job, EXECUTION_TTL_S, pipeline=pipe)
    pipe.hset(execution.key, "worker_name", gateway)  # RQ does it since 2.10
    job.prepare_for_execution(gateway, pipeline=pipe)
    pipe.persist(job.key)  # `ttl` is for the time in the queue
    source.write_registered(pipe, job.id, millrace_id)
    return execution


def write_end(pipe: Pipeline, end: RunEnd, job: GatewayJob, snapshot: JobSnapshot, gateway: str) -> None:
    """End the job: started -> finished, failed or stopped, or back to the queue when it has a Retry. Changes `job`."""
    run = end.run
    _write_left_registries(pipe, run.source, job, snapshot.status)
    write_executions_deleted(pipe, job, snapshot)
    write_removed(pipe, run)
    job.ended_at = now()
    stamps = {
        "worker_name": gateway,
        "execution_id": run.execution.id,
        "execution_started_at": run.execution.created_at,
        "execution_ended_at": job.ended_at,
    }
    if end.kind == "finished":
        _write_success(pipe, run.source.queue, job, end.value, stamps)
    elif end.kind == "failed" and job.should_retry:
        _write_retry(pipe, run.source.queue, job)
    else:
        write_failure(pipe, job, JobStatus.STOPPED if end.kind == "stopped" else JobStatus.FAILED, end.reason, stamps)


def write_removed(pipe: Pipeline, run: GatewayRun) -> None:
    """Remove this gateway's traces of the run."""
    run.execution.delete(run.job, pipe)
    run.source.write_ended(pipe, run.job.id)


def write_executions_deleted(pipe: Pipeline, job: GatewayJob, snapshot: JobSnapshot) -> None:
    """Delete all executions of the job."""
    for execution_id in snapshot.execution_ids:
        Execution(execution_id, job.id, job.connection).delete(job, pipe)


def write_failure(pipe: Pipeline, job: GatewayJob, status: JobStatus, reason: str, stamps: dict[str, Any]) -> None:
    """Write a failure without a retry."""
    job.set_status(status, pipeline=pipe)
    job.failed_job_registry.add(job, ttl=job.failure_ttl, exc_string=reason, pipeline=pipe)
    Result.create_failure(job, job.failure_ttl, exc_string=reason, pipeline=pipe, **stamps)


def _write_success(pipe: Pipeline, queue: Queue, job: GatewayJob, value: Any, stamps: dict[str, Any]) -> None:
    ttl = job.get_result_ttl(DEFAULT_RESULT_TTL)
    if ttl != 0:
        job.set_status(JobStatus.FINISHED, pipeline=pipe)
        job.save(pipeline=pipe)
        Result.create(job, Result.Type.SUCCESSFUL, ttl, return_value=value, pipeline=pipe, **stamps)
        job.finished_job_registry.add(job, ttl, pipe)
    if job.repeats_left:
        Repeat.schedule(job, queue, pipeline=pipe)
    else:
        job.cleanup(ttl, pipeline=pipe, remove_from_queue=False)


def _write_retry(pipe: Pipeline, queue: Queue, job: GatewayJob) -> None:
    if not (interval_s := job.get_retry_interval()):
        job.retry(queue, pipe)
    else:  # job.retry would write the new status outside of the transaction
        job.retries_left = (job.retries_left or 1) - 1
        queue.schedule_job(job, now() + timedelta(seconds=interval_s), pipeline=pipe)


def _write_left_registries(pipe: Pipeline, source: SourceQueue, job: GatewayJob, status: str | None) -> None:
    """Remove the job from where RQ's cleanup puts a job that it takes for abandoned."""
    if status == JobStatus.FAILED:
        job.failed_job_registry.remove(job, pipeline=pipe)
    elif status == JobStatus.SCHEDULED:
        source.queue.scheduled_job_registry.remove(job, pipeline=pipe)
    elif status == JobStatus.QUEUED:
        source.queue.remove(job, pipeline=pipe)
        source.write_left_intermediate(pipe, job.id)
