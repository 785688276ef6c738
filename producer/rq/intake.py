"""From RQ's queues to runs: take, register with RQ, submit to Millrace.

Each step may be the last that a gateway does. What was taken is in the ledger, so another gateway adopts it, and whatever
the step, goes through the same three again:
- taken, not registered: the job lies in RQ's intermediate list, its ledger entry is empty. It starts as if just taken.
- registered, not submitted: RQ's job is started, the entry names the Millrace job. It is submitted.
- submitted: submitting it again finds the same job under the same id, running or over. Nothing is run twice.
A gateway that has lost a reply, or the connection half way, goes through its own ledger in the same manner.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import redis
from redis.client import Pipeline
from redis.exceptions import WatchError
from rq.job import JobStatus

from millrace.producer.messages import refusal
from millrace.producer.rq.ledger import Ledger
from millrace.producer.rq.native_jobs import NativeJobs, is_over
from millrace.producer.rq.payload import PayloadRefused, read_submission
from millrace.producer.rq.presence import Presence
from millrace.producer.rq.result_writer import ResultWriter
from millrace.producer.rq.run_table import RunTable
from millrace.producer.rq.runs import (
    GatewayJob,
    GatewayRun,
    RunEnd,
    Standing,
    delete_executions,
    new_job,
    read_executions,
    write_start,
)
from millrace.results.messages import Submission

logger = logging.getLogger("millrace.gateway")

_AT_ONCE = 256
_RQ_JOB_ID = re.compile(rb"[A-Za-z0-9_-]+")


class _Found(NamedTuple):
    """An RQ job that is in the ledger, as it was read."""

    job: GatewayJob
    standing: Standing
    malformed: str = ""

    @property
    def is_over(self) -> bool:
        """Cancelled or deleted; or, once it had been registered, ended by somebody else."""
        status = self.standing.status
        if status in (None, JobStatus.CANCELED):
            return True
        return bool(self.standing.native_id) and status in (JobStatus.STOPPED, JobStatus.FINISHED)


class _Started(NamedTuple):
    run: GatewayRun
    submission: Submission | None
    refusal: str = ""


class RQIntake:
    """Owns the way in. Its callers wait for each other, so no job is begun twice at a time."""

    def __init__(
        self,
        connection: redis.Redis,
        ledgers: Sequence[Ledger],
        native: NativeJobs,
        presence: Presence,
        runs: RunTable,
        result_writer: ResultWriter,
    ) -> None:
        self._connection = connection
        self._ledgers = ledgers
        self._native = native
        self._presence = presence
        self._runs = runs
        self._result_writer = result_writer
        self._gateway = presence.name
        self._lock = threading.Lock()
        self._is_halfway = False  # something was taken and could not be submitted
        self._full_tenants: set[str] = set()
        """Who has as many jobs in Millrace's queue as may be, as of the last second look."""

    def take(self) -> Literal["taken", "empty", "suspended", "full"]:
        """Take from the first queue that has something, as much as there is room for; "full" when jobs that wait in front of
        Millrace's queue leave none."""
        with self._lock:
            if self._is_halfway:  # first things first: else a queue would be emptied that nobody works off
                for ledger in self._ledgers:
                    self._begin(ledger, self._not_begun(ledger))
            for ledger in self._ledgers:
                room = min(self._room(), _AT_ONCE)
                if room <= 0:
                    return "full" if self._runs.room else "taken"  # by another thread
                ids = ledger.take(room)
                self._presence.is_suspended = ids is None
                if ids is None:
                    return "suspended"
                if ids:
                    self._begin(ledger, ids)
                    return "taken"
        return "empty"

    def adopt(self, ledger: Ledger) -> None:
        """Go on with the jobs of gateways that have stopped."""
        while adoption := ledger.adopt():
            logger.warning("adopting %d jobs of gateway %s", len(adoption.job_ids), adoption.gateway)
            self._presence.remove_dead(adoption.gateway)
            with self._lock:
                self._begin(ledger, adoption.job_ids)

    def reconcile(self, ledger: Ledger) -> None:
        """Begin what the ledger has for this gateway and the table of runs has not: a reply was lost, or Millrace's queue
        was full."""
        with self._lock:
            self._full_tenants.clear()
            self._begin(ledger, self._not_begun(ledger))

    def begin_again(self, runs: Iterable[GatewayRun]) -> None:
        """For runs of which RQ's or Millrace's record has been lost or changed under us."""
        with self._lock:
            for run in runs:
                self._begin(run.ledger, [run.job.id.encode()])

    # --- under the lock ---

    def _room(self) -> int:
        """What waits in front of a full queue counts too: else RQ's queue would be emptied, and nobody work it off."""
        return self._runs.room - self._num_waiting()

    def _num_waiting(self) -> int:
        return max(0, sum(ledger.num_jobs() for ledger in self._ledgers) - len(self._runs))

    def _not_begun(self, ledger: Ledger) -> list[bytes]:
        return [id_ for id_ in ledger.job_ids() if self._runs.get(id_.decode(errors="replace")) is None]

    def _begin(self, ledger: Ledger, ids: Sequence[bytes]) -> None:
        self._is_halfway = True
        if strange := [id_ for id_ in ids if not _RQ_JOB_ID.fullmatch(id_)]:
            logger.error("queue %s: dropped ids that RQ does not allow: %s", ledger.queue.name, strange)
            ledger.drop(strange)
        job_ids = [id_.decode() for id_ in ids if _RQ_JOB_ID.fullmatch(id_)]
        for first in range(0, len(job_ids), _AT_ONCE):
            self._submit(self._register(ledger, job_ids[first : first + _AT_ONCE]))
        self._is_halfway = False

    def _submit(self, started: list[_Started]) -> None:
        """What finds no room stays in the ledger, for `reconcile`, and keeps out nobody but later jobs of its tenant."""
        accepted = [
            (one.run, one.submission)
            for one in started
            if one.submission is not None and one.submission.tenant not in self._full_tenants
        ]
        runs = [run for run, _ in accepted]
        self._runs.add(runs)  # first, so that no end goes unnoticed
        try:
            outcomes = self._native.submit([submission for _, submission in accepted])
        except BaseException:
            self._runs.remove(runs)  # they are in the ledger: reconcile will try again
            raise
        refused = [RunEnd(one.run, "failed", reason=one.refusal) for one in started if one.submission is None]
        waiting = []
        for (run, submission), outcome in zip(accepted, outcomes, strict=True):
            if outcome.startswith("full"):
                waiting.append(run)
                if "max_queued_jobs" in outcome:
                    self._full_tenants.add(submission.tenant)
            elif outcome == "conflict":
                reason = f"conflict: Millrace already has another job with the id {run.native_id}"
                refused.append(RunEnd(run, "failed", reason=reason))
            elif invalid := refusal(run.native_id, outcome):
                refused.append(RunEnd(run, "failed", reason=f"invalid_request: {invalid}"))
        self._presence.correct_state()
        self._result_writer.write_ends(refused)
        if waiting:
            self._runs.remove(waiting)
            logger.warning("Millrace's queue is full: %d jobs wait in front of it", self._num_waiting())

    def _register(self, ledger: Ledger, job_ids: Sequence[str]) -> list[_Started]:
        """Give the jobs their RQ execution and their Millrace id, in one transaction; nobody touches them meanwhile."""
        while job_ids:
            pipe: Any = self._connection.pipeline()
            with pipe:
                try:
                    pipe.watch(*map(GatewayJob.key_for, job_ids))
                    found = self._read(ledger, job_ids)
                    over = [one for one in found if one.is_over]
                    native_ids = self._native_ids([one for one in found if not one.is_over])
                    pipe.multi()
                    for one in over:
                        _write_over(pipe, ledger, one)
                    started = [
                        self._start(pipe, ledger, one, *native_ids[one.job.id]) for one in found if not one.is_over
                    ]
                    pipe.execute()
                except WatchError:
                    continue
            for one in over:
                if one.standing.native_id and one.standing.status != JobStatus.FINISHED:
                    self._native.cancel(one.standing.native_id)
            return started
        return []

    def _read(self, ledger: Ledger, job_ids: Sequence[str]) -> list[_Found]:
        """What is still in the ledger of these."""
        with self._connection.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hgetall(GatewayJob.key_for(job_id))
                ledger.read(pipe, job_id)
                read_executions(pipe, job_id)
            replies = pipe.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, redis.RedisError) and not _is_wrong_type(reply):
                raise reply
        found = []
        for job_id, fields, native_id, executions in zip(
            job_ids, replies[0::3], replies[1::3], replies[2::3], strict=True
        ):
            if native_id is not None:
                ids = [execution_id.decode() for execution_id in executions]
                found.append(_found(ledger, job_id, fields, Standing(None, self._gateway, native_id.decode(), ids)))
        return found

    def _native_ids(self, found: Sequence[_Found]) -> dict[str, tuple[str, bool]]:
        """By RQ id, the id of the Millrace job, and whether that is new.

        It is the RQ id. A job that has run to an end before, because RQ retries, repeats or requeues it, runs again as
        `<id>.r<n>`: what has ended in Millrace has ended.
        """
        chosen = {one.job.id: (one.standing.native_id, False) for one in found if one.standing.native_id}
        undecided = [one.job.id for one in found if not one.standing.native_id]
        num_runs = 0
        while undecided:
            candidates = [f"{job_id}.r{num_runs}" if num_runs else job_id for job_id in undecided]
            states = self._native.states(candidates)
            for job_id, native_id, state in zip(undecided, candidates, states, strict=True):
                if not is_over(state):
                    chosen[job_id] = (native_id, state is None)
            undecided = [job_id for job_id in undecided if job_id not in chosen]
            num_runs += 1
        return chosen

    def _start(self, pipe: Pipeline, ledger: Ledger, found: _Found, native_id: str, is_new: bool) -> _Started:
        execution = write_start(pipe, ledger, found.job, native_id, self._gateway, found.standing)
        self._presence.write_busy(pipe, found.job.id)
        run = GatewayRun(found.job, ledger, native_id, execution, is_checked=is_new)
        try:
            return _Started(run, _submission(found, native_id))
        except PayloadRefused as refused:
            return _Started(run, None, str(refused))
        except Exception as error:  # our bug: it must not cost the other jobs anything
            logger.exception("job %s cannot be read", found.job.id)
            return _Started(run, None, f"internal: {error!r}")


def _is_wrong_type(error: redis.RedisError) -> bool:
    """What has the name of a job's hash is something else: there is no such job."""
    return isinstance(error, redis.ResponseError) and str(error).startswith("WRONGTYPE")


def _found(ledger: Ledger, job_id: str, fields: Any, standing: Standing) -> _Found:
    """`standing` has no status yet."""
    job = new_job(job_id, ledger)
    if not isinstance(fields, dict) or not fields:
        return _Found(job, standing)
    try:
        job.restore({b"data": b"", **fields})
        job.origin = job.origin or ledger.queue.name
        return _Found(job, standing._replace(status=job.get_status(refresh=False)))
    except Exception as error:  # whatever RQ raises for fields that it has not written
        blank = new_job(job_id, ledger)
        return _Found(
            blank, standing._replace(status=JobStatus.QUEUED), f"RQ's record of the job is malformed: {error}"
        )


def _submission(found: _Found, native_id: str) -> Submission:
    if found.malformed:
        raise PayloadRefused(found.malformed)
    if found.job.not_mirrored:
        names = ", ".join(found.job.not_mirrored)
        raise PayloadRefused(
            f"{names}: the gateway does not run these yet; enqueue a job that depends on this one instead"
        )
    submission = read_submission(native_id, found.job.payload)
    found.job.payload = None  # Millrace keeps it from here on
    return submission


def _write_over(pipe: Pipeline, ledger: Ledger, found: _Found) -> None:
    ledger.leave_intermediate(pipe, found.job.id)
    ledger.remove(pipe, found.job.id)
    delete_executions(pipe, found.job, found.standing.execution_ids)
