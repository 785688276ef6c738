"""From RQ's queues to runs: take jobs, register them with RQ, submit them to Millrace.

A gateway may be killed after each step. Another one finds the job in the record of taken jobs and repeats the steps:
- Taken, not registered: the job is in RQ's intermediate list, and its entry in the record is empty. It starts as a new one.
- Registered, not submitted: RQ's job is started, and the entry names the Millrace job. It is submitted.
- Submitted: submitting it again finds the same job under the same id, running or ended. Nothing runs twice.
A gateway that has lost a reply does the same with its own record.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import redis
from redis.client import Pipeline
from redis.exceptions import WatchError
from rq.job import JobStatus

from millrace.producer.rq.isolation import BATCH_JOBS, in_batches, isolated, read, write
from millrace.producer.rq.millrace_jobs import MillraceJobs
from millrace.producer.rq.payload import PayloadRefused, read_submission
from millrace.producer.rq.result_writer import ResultWriter
from millrace.producer.rq.rq_job import RQ_JOB_ID, GatewayJob, JobSnapshot, read_snapshots
from millrace.producer.rq.runs import GatewayRun, RunEnd, RunTable, write_executions_deleted, write_start
from millrace.producer.rq.source_queue import SourceQueue
from millrace.producer.rq.worker_entry import WorkerEntry
from millrace.producer.wire import refusal
from millrace.results.errors import one_line
from millrace.results.messages import TERMINAL_STATES, Submission

logger = logging.getLogger("millrace.gateway")

_Started: TypeAlias = tuple[GatewayRun, Submission | str]
"""A run, and what to submit for it, or why it is refused."""


class _Taken(NamedTuple):
    job: GatewayJob
    snapshot: JobSnapshot


@dataclass(eq=False)
class Intake:
    """Owns the way from RQ to Millrace. Its callers wait for each other, so that no job is started twice at a time."""

    _connection: redis.Redis
    _sources: Sequence[SourceQueue]
    _millrace: MillraceJobs
    _worker_entry: WorkerEntry
    _runs: RunTable
    _writer: ResultWriter
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _has_unsubmitted: bool = field(default=False, init=False)
    """An outage came between taking jobs and submitting them."""
    _full_tenants: set[str] = field(default_factory=set, init=False)
    """Tenants that had as many jobs in Millrace's queue as they may, when `reconcile` last ran."""

    def take(self) -> Literal["taken", "empty", "suspended", "full"]:
        """Take from the first queue that has jobs, as many as there is capacity for. "full": the jobs that wait in front of
        Millrace's queue use up the capacity."""
        with self._lock:
            if self._has_unsubmitted:  # submit these first: else an outage would empty RQ's queue
                for source in self._sources:
                    self._start(source, self._unstarted_ids(source))
            for source in self._sources:
                capacity = min(self._runs.capacity - self._num_waiting(), BATCH_JOBS)
                if capacity <= 0:
                    return "full" if self._runs.capacity else "taken"  # by another thread
                ids = source.take(capacity)
                self._worker_entry.is_suspended = ids is None
                if ids is None:
                    return "suspended"
                if ids:
                    self._start(source, ids)
                    return "taken"
        return "empty"

    def take_over(self, source: SourceQueue) -> None:
        """Continue the jobs of gateways that have stopped."""
        while takeover := source.take_over():
            gateway, ids = takeover
            logger.warning("taking over %d jobs of gateway %s", len(ids), one_line(gateway, 200))
            self._worker_entry.remove_dead(gateway)
            with self._lock:
                self._start(source, ids)

    def reconcile(self, source: SourceQueue) -> None:
        """Start the jobs that are in the record and not in flight: a reply was lost, or Millrace's queue was full."""
        with self._lock:
            self._full_tenants.clear()
            self._start(source, self._unstarted_ids(source))

    def find(self, job_id: str) -> GatewayRun | None:
        """Return the run of a job that RQ calls started. It is in Millrace: a job that is being submitted is waited for."""
        with self._lock:
            return self._runs.get(job_id)

    def restart(self, runs: Iterable[GatewayRun]) -> None:
        """Start runs again whose job was lost in Millrace, or changed in RQ by others."""
        with self._lock:
            for run in runs:
                self._start(run.source, [run.job.id.encode()])

    # --- under the lock ---

    def _num_waiting(self) -> int:
        """Return how many taken jobs wait in front of a full Millrace queue."""
        return max(0, sum(source.num_jobs() for source in self._sources) - len(self._runs))

    def _unstarted_ids(self, source: SourceQueue) -> list[bytes]:
        return [id_ for id_ in source.job_ids() if self._runs.get(id_.decode(errors="replace")) is None]

    def _start(self, source: SourceQueue, ids: Sequence[bytes]) -> None:
        def start(job_ids: Sequence[str]) -> None:
            self._submit(self._register(source, job_ids))

        def fail(job_id: str, error: Exception) -> None:
            why = f"the job cannot be started ({type(error).__name__}: {one_line(str(error), 300)})"
            logger.error("job %.150s: %s", job_id, why)
            with isolated(f"job {job_id} is dropped"):
                self._submit(self._register(source, [job_id], damage=f"{why}; delete it, and enqueue it again"))
                return
            source.drop([job_id])

        self._has_unsubmitted = True
        if invalid := [id_ for id_ in ids if not RQ_JOB_ID.fullmatch(id_)]:
            logger.error("queue %s: dropped ids that RQ does not allow: %s", source.queue.name, one_line(str(invalid)))
            source.drop(invalid)
        in_batches([id_.decode() for id_ in ids if RQ_JOB_ID.fullmatch(id_)], start, fail)
        self._has_unsubmitted = False

    def _submit(self, started: list[_Started]) -> None:
        """Submit runs, and fail the refused ones. What Millrace has no space for stays in the record until `reconcile`, and
        keeps out only later jobs of its tenant."""
        refused = [RunEnd(run, "failed", reason=reason) for run, reason in started if isinstance(reason, str)]
        asking = [(run, one) for run, one in started if isinstance(one, Submission)]
        accepted = [(run, submission) for run, submission in asking if submission.tenant not in self._full_tenants]
        runs = [run for run, _ in accepted]
        self._runs.add(runs)  # before they are submitted, so that no end is missed
        try:
            outcomes = self._millrace.submit([submission for _, submission in accepted])
        except BaseException:
            self._runs.remove(runs)  # they are in the record: reconcile will try again
            raise
        if accepted:
            self._millrace.warn_if_never_served()
        waiting = []
        for (run, submission), outcome in zip(accepted, outcomes, strict=True):
            if outcome.kind == "full":
                waiting.append(run)
                if "max_queued_jobs" in outcome.name:
                    self._full_tenants.add(submission.tenant)
            elif outcome.kind == "conflict":
                reason = f"conflict: Millrace already has another job with the id {run.millrace_id}"
                refused.append(RunEnd(run, "failed", reason=reason))
            elif invalid := refusal(run.millrace_id, outcome):
                refused.append(RunEnd(run, "failed", reason=f"invalid_request: {invalid}"))
        self._worker_entry.update_state()
        self._writer.write_ends(refused)
        if waiting:
            self._runs.remove(waiting)
            logger.warning("the Millrace queue is full: %d RQ jobs wait in the gateway", self._num_waiting())

    def _register(self, source: SourceQueue, job_ids: Sequence[str], damage: str = "") -> list[_Started]:
        """Give the jobs an RQ execution and a Millrace id, in one transaction. With `damage` they are refused."""
        while True:  # until no other client changes the jobs between reading and writing
            pipe: Any = self._connection.pipeline()
            with pipe:
                try:
                    pipe.watch(*map(GatewayJob.key_for, job_ids))
                    taken = self._read(source, job_ids, damage)
                    ended = [one for one in taken if one.snapshot.has_ended]
                    starting = [one for one in taken if not one.snapshot.has_ended]
                    millrace_ids = self._choose_millrace_ids(starting)
                    pipe.multi()
                    for job, snapshot in ended:
                        source.write_dropped(pipe, job.id)
                        write_executions_deleted(pipe, job, snapshot)
                    started = [self._start_run(pipe, source, one, *millrace_ids[one.job.id]) for one in starting]
                    write(pipe)
                except WatchError:
                    continue
            for job, snapshot in ended:
                if snapshot.damage:
                    logger.error("job %.150s is dropped: %s", job.id, one_line(snapshot.damage))
                if snapshot.millrace_id and snapshot.status != JobStatus.FINISHED:
                    self._millrace.cancel(snapshot.millrace_id)
            return started

    def _read(self, source: SourceQueue, job_ids: Sequence[str], damage: str) -> list[_Taken]:
        """Read those of the jobs that are still in the record."""
        with self._connection.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hgetall(GatewayJob.key_for(job_id))
            hashes = read(pipe)
        taken = []
        snapshots = read_snapshots(self._connection, [source.record] * len(job_ids), job_ids)
        for job_id, fields, snapshot in zip(job_ids, hashes, snapshots, strict=True):
            if snapshot.millrace_id is not None:
                fields = fields if isinstance(fields, dict) and not damage else {}
                job = GatewayJob.load(job_id, self._connection, fields, source.queue.name)
                job.damage = damage or snapshot.damage or job.damage
                taken.append(_Taken(job, snapshot))
        return taken

    def _choose_millrace_ids(self, taken: Sequence[_Taken]) -> dict[str, tuple[str, bool]]:
        """Return, by RQ id, the id of the Millrace job, and whether there is no such job yet.

        It is the RQ id. A job that RQ retries, repeats or requeues after its Millrace job has ended runs as `<id>.r<n>`.
        """
        decided = [(job, snapshot.millrace_id) for job, snapshot in taken if snapshot.millrace_id or job.damage]
        chosen = {job.id: (millrace_id or job.id, False) for job, millrace_id in decided}
        undecided = [job.id for job, _ in taken if job.id not in chosen]
        numbers = range(1)
        while undecided:  # twice as many in each round: a job that repeats may have run thousands of times
            candidates = [f"{job_id}.r{number}" if number else job_id for job_id in undecided for number in numbers]
            for i, state in enumerate(self._millrace.states(candidates)):
                if state not in TERMINAL_STATES:
                    chosen.setdefault(undecided[i // len(numbers)], (candidates[i], state is None))
            undecided = [job_id for job_id in undecided if job_id not in chosen]
            numbers = range(numbers.stop, 2 * numbers.stop)
        return chosen

    def _start_run(
        self, pipe: Pipeline, source: SourceQueue, taken: _Taken, millrace_id: str, is_new: bool
    ) -> _Started:
        job, snapshot = taken
        execution = write_start(pipe, source, job, millrace_id, self._worker_entry.name, snapshot)
        self._worker_entry.write_busy(pipe, job.id)
        run = GatewayRun(job, source, millrace_id, execution, is_checked=is_new)
        if job.damage:
            return run, one_line(job.damage)
        if job.unsupported_options:
            names = ", ".join(job.unsupported_options)
            return run, f"{names}: the gateway does not run these yet; enqueue a job that depends on this one instead"
        try:
            submission = read_submission(millrace_id, job.payload)
        except PayloadRefused as refused:
            return run, one_line(str(refused))
        job.payload = None  # Millrace keeps it from here on
        return run, submission
