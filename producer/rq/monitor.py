"""Follows the jobs in flight: writes the ends of Millrace's jobs into RQ, checks both sides for what was missed or changed,
and renews what expires."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import redis
from rq.job import JobStatus

from millrace.producer.rq.intake import Intake
from millrace.producer.rq.isolation import BATCH_JOBS, in_batches, isolated, one_line, read, text, write
from millrace.producer.rq.millrace_jobs import MillraceJobs, has_ended
from millrace.producer.rq.result_writer import ResultWriter
from millrace.producer.rq.runs import RENEWAL_INTERVAL_S, GatewayRun, RunEnd, RunTable, write_renewal
from millrace.producer.rq.source_queue import GATEWAY_TTL_MS, SourceQueue
from millrace.producer.rq.worker_entry import WorkerEntry
from millrace.results.messages import Job

logger = logging.getLogger("millrace.gateway")

_LOOKUP_INTERVAL_S = 10.0
_MAX_LOOKUPS_LOST = 2
_READ_RESULTS = 64


@dataclass(eq=False)
class Monitor:
    """Owns the heartbeats of one gateway, and the schedule of its checks."""

    _connection: redis.Redis
    _sources: Sequence[SourceQueue]
    _millrace: MillraceJobs
    _worker_entry: WorkerEntry
    _runs: RunTable
    _intake: Intake
    _writer: ResultWriter
    _next_lookup_s: float = field(default_factory=lambda: time.monotonic() + _LOOKUP_INTERVAL_S, init=False)
    _next_takeover_s: float = field(default=0.0, init=False)
    _next_renewal_s: float = field(default_factory=lambda: time.monotonic() + RENEWAL_INTERVAL_S, init=False)

    def heartbeat(self) -> None:
        """Send heartbeats to the other gateways and to RQ."""
        for source in self._sources:
            source.heartbeat()
        self._worker_entry.heartbeat()

    def delay_takeovers(self) -> None:
        """After an outage of the server: the other gateways could send no heartbeats either, and get the time for it."""
        self._next_takeover_s = time.monotonic() + GATEWAY_TTL_MS / 1000

    def stop_job(self, job_id: str) -> None:
        """Handle RQ's stop-job command: cancel the job in Millrace. When it has ended there, it ends as stopped."""
        run = self._runs.get(job_id)
        if run is None:
            logger.info("RQ's stop-job command for %s, which is not in flight here", one_line(job_id, 200))
            return
        run.is_stopping = True
        self._millrace.cancel(run.millrace_id)

    # --- Millrace's side ---

    def follow_ends(self) -> None:
        """Wait for ended jobs, for a second at most, and write their ends into RQ."""
        self._write_ends(self._runs.by_millrace_ids(self._millrace.next_ended()))
        is_due = time.monotonic() >= self._next_lookup_s
        runs = [run for run in self._runs.all() if is_due or not run.is_checked]
        in_batches(runs, self._look_up, self._fail)
        if is_due:
            self._next_lookup_s = time.monotonic() + _LOOKUP_INTERVAL_S

    def look_up_all(self) -> None:
        """After an error: look up all runs next time."""
        self._next_lookup_s = 0.0

    def _look_up(self, runs: Sequence[GatewayRun]) -> None:
        states = self._millrace.states([run.millrace_id for run in runs])
        ended, lost = [], []
        for run, state in zip(runs, states, strict=True):
            run.num_lookups_lost = 0 if state else run.num_lookups_lost + 1
            run.is_checked = state is not None
            if has_ended(state):
                ended.append(run)
            elif run.num_lookups_lost > _MAX_LOOKUPS_LOST:  # once or twice: it is being submitted
                lost.append(run)
        self._write_ends(ended)
        if lost:
            logger.error("Millrace has lost %d jobs: submitting them again", len(lost))
            self._intake.restart(lost)

    def _write_ends(self, runs: Sequence[GatewayRun]) -> None:
        in_batches(runs, self._write_results, self._fail, _READ_RESULTS)

    def _write_results(self, runs: Sequence[GatewayRun]) -> None:
        jobs = zip(runs, self._millrace.get([run.millrace_id for run in runs]), strict=True)
        self._writer.write_ends([_end_of(run, job) for run, job in jobs if job is not None and job.is_done])

    def _fail(self, run: GatewayRun, error: Exception) -> None:
        reason = one_line(f"Millrace's record of the job cannot be read: {error}")
        self._writer.write_ends([RunEnd(run, "failed", reason=reason)])

    # --- RQ's side ---

    def check(self) -> None:
        """Do what has to be done every few seconds."""
        for source in self._sources:
            with isolated(f"RQ queue {source.queue.name}"):
                if source.num_jobs() > self._runs.num_from(source):
                    self._intake.reconcile(source)
                if time.monotonic() >= self._next_takeover_s:
                    self._intake.take_over(source)
        for runs in self._batches():
            self._check_in_rq(runs)
        if time.monotonic() >= self._next_renewal_s:
            self._renew()
            self._next_renewal_s = time.monotonic() + RENEWAL_INTERVAL_S

    def _check_in_rq(self, runs: Sequence[GatewayRun]) -> None:
        """Find jobs that others have ended: RQ sends the worker no command for `job.cancel()` and `job.delete()`."""
        dropped, abandoned = [], []
        for run, (status, worker_name) in zip(runs, self._read(runs), strict=True):
            is_ours = worker_name == self._worker_entry.name
            if worker_name is None or (is_ours and status in (JobStatus.CANCELED, JobStatus.STOPPED)):
                self._millrace.cancel(run.millrace_id)
                dropped.append(RunEnd(run, "dropped"))
            elif not is_ours:
                dropped.append(RunEnd(run, "dropped"))
            elif status == JobStatus.FAILED:
                abandoned.append(run)  # by RQ's cleanup; or it has just ended, and left the record
            elif run.is_stopping:
                self._millrace.cancel(run.millrace_id)
        self._writer.write_ends(dropped)
        if abandoned:
            self._intake.restart(abandoned)

    def _read(self, runs: Sequence[GatewayRun]) -> list[tuple[str | None, str | None]]:
        """Return status and worker of the jobs; None and None for a job that is deleted, or no longer a hash."""
        with self._connection.pipeline(transaction=False) as pipe:
            for run in runs:
                pipe.hmget(run.job.key, "status", "worker_name")
            replies: list[Any] = [(None, None) if isinstance(reply, Exception) else reply for reply in read(pipe)]
        return [(status and text(status), worker and text(worker)) for status, worker in replies]

    def _renew(self) -> None:
        for runs in self._batches():
            with self._connection.pipeline(transaction=False) as pipe:
                for run in runs:
                    write_renewal(pipe, run)
                write(pipe)
        for source in self._sources:
            with isolated(f"RQ queue {source.queue.name}"):  # every RQ worker removes expired ids now and then
                source.queue.finished_job_registry.cleanup()
                source.queue.failed_job_registry.cleanup()

    def _batches(self) -> Iterator[list[GatewayRun]]:
        runs = self._runs.all()
        return (runs[first : first + BATCH_JOBS] for first in range(0, len(runs), BATCH_JOBS))


def _end_of(run: GatewayRun, job: Job) -> RunEnd:
    if job.state == "finished":
        value = {
            "text": job.text,
            "token_ids": job.token_ids,
            "finish_reason": job.finish_reason,
            "usage": msgspec.to_builtins(job.usage),
        }
        return RunEnd(run, "finished", value)
    if job.state == "cancelled" and run.is_stopping:
        return RunEnd(run, "stopped", reason="stopped by RQ's stop-job command")
    why = f": {job.error.kind}: {job.error.message}" if job.error else ""
    return RunEnd(run, "failed", reason=job.state + why)
