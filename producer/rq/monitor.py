"""Follows the jobs in flight: writes the ends of Millrace's jobs into RQ, checks both sides for what was missed or changed,
and renews what expires."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import redis
from rq.job import JobStatus

from millrace.producer.rq.intake import Intake
from millrace.producer.rq.isolation import in_batches, isolated, read, write
from millrace.producer.rq.millrace_jobs import MillraceJobs
from millrace.producer.rq.result_writer import ResultWriter
from millrace.producer.rq.runs import EXECUTION_TTL_S, RENEWAL_INTERVAL_S, GatewayRun, RunEnd, RunTable
from millrace.producer.rq.source_queue import GATEWAY_TTL_MS, SourceQueue
from millrace.producer.rq.worker_entry import WorkerEntry
from millrace.results.errors import one_line
from millrace.results.job import CompletionOutput, Job
from millrace.results.messages import TERMINAL_STATES

logger = logging.getLogger("millrace.gateway")

_LOOKUP_INTERVAL_S = 10.0
_MAX_LOOKUPS_LOST = 2
_READ_RESULTS = 64
_CANCELLED = (JobStatus.CANCELED.encode(), JobStatus.STOPPED.encode())
_FAILED = JobStatus.FAILED.encode()


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
        if run := self._intake.find(job_id):
            run.is_stopping = True
            self._millrace.cancel(run.millrace_id)
        else:
            logger.info("ignored RQ's stop-job command for %s, which this gateway has not taken", one_line(job_id, 200))

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
            if state in TERMINAL_STATES:
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
        why = f"the job cannot be followed ({one_line(str(error), 300)}); delete it, and enqueue it again"
        self._writer.write_ends([RunEnd(run, "failed", reason=why)])

    # --- RQ's side ---

    def check(self) -> None:
        """Do what has to be done every few seconds."""
        for source in self._sources:
            with isolated(f"RQ queue {source.queue.name}"):
                if source.num_jobs() > sum(run.source is source for run in self._runs.all()):
                    self._intake.reconcile(source)
                if time.monotonic() >= self._next_takeover_s:
                    self._intake.take_over(source)
        in_batches(self._runs.all(), self._check_in_rq, self._fail)
        if time.monotonic() >= self._next_renewal_s:
            in_batches(self._runs.all(), self._renew, self._fail)
            self._clean_registries()
            self._next_renewal_s = time.monotonic() + RENEWAL_INTERVAL_S

    def _check_in_rq(self, runs: Sequence[GatewayRun]) -> None:
        """Find jobs that others have ended: RQ sends the worker no command for `job.cancel()` and `job.delete()`."""
        dropped, abandoned = [], []
        with self._connection.pipeline(transaction=False) as pipe:
            for run in runs:
                pipe.hmget(run.job.key, "status", "worker_name")
            replies = read(pipe)
        for run, reply in zip(runs, replies, strict=True):
            status, worker_name = (None, None) if isinstance(reply, Exception) else reply  # not a hash any more
            is_ours = worker_name == self._worker_entry.name.encode()
            if worker_name is None or (is_ours and status in _CANCELLED):
                self._millrace.cancel(run.millrace_id)
                dropped.append(RunEnd(run, "dropped"))
            elif not is_ours:
                dropped.append(RunEnd(run, "dropped"))
            elif status == _FAILED:
                abandoned.append(run)  # by RQ's cleanup; or it has just ended, and left the record
            elif run.is_stopping:
                self._millrace.cancel(run.millrace_id)
        self._writer.write_ends(dropped)
        if abandoned:
            self._intake.restart(abandoned)

    def _renew(self, runs: Sequence[GatewayRun]) -> None:
        with self._connection.pipeline(transaction=False) as pipe:
            for run in runs:
                run.execution.heartbeat(run.job.started_job_registry, EXECUTION_TTL_S, pipeline=pipe)
            write(pipe)

    def _clean_registries(self) -> None:
        """Remove ids that have expired from the registries of finished and failed jobs, as every RQ worker does."""
        for source in self._sources:
            with isolated(f"RQ queue {source.queue.name}"):
                source.queue.finished_job_registry.cleanup()
                source.queue.failed_job_registry.cleanup()


def _end_of(run: GatewayRun, job: Job) -> RunEnd:
    if job.state == "finished" and not job.has_result:
        return RunEnd(run, "failed", reason="finished, but the result has expired")
    if job.state == "finished":
        outputs = [_fields_of(output) for output in job.outputs]
        value = {name: each for name, each in outputs[0].items() if name != "index"}
        if len(outputs) > 1:
            value["outputs"] = outputs
        if job.prompt_logprobs is not None:
            value["prompt_logprobs"] = msgspec.to_builtins(job.prompt_logprobs)
        value |= {"usage": msgspec.to_builtins(job.usage), "timings": job.timings.durations}
        return RunEnd(run, "finished", {**value, "attempt": job.attempt, "engine": job.engine})
    if job.state == "cancelled" and run.is_stopping:
        return RunEnd(run, "stopped", reason="stopped by RQ's stop-job command")
    why = f": {job.error.kind}: {job.error.message}" if job.error else ""
    return RunEnd(run, "failed", reason=job.state + why)


def _fields_of(output: CompletionOutput) -> dict[str, Any]:
    """Return the fields that are set. `content` is left out where it would repeat the text."""
    fields: dict[str, Any] = msgspec.to_builtins(output)
    if output.content == output.text:
        del fields["content"]
    return fields
