"""Writes the ends of runs into RQ's keys: hundreds in one transaction, each job once.

- The gateway dies before the transaction: the record still has the job, and the next gateway writes the end.
- The reply to the transaction is lost: read again, the job is no longer started and has left the record.
- Another gateway has taken over the job: the job's hash, which is under WATCH, names that gateway.
- RQ's cleanup has failed the job as abandoned: the record still has it, so it leaves RQ's failed jobs, and ends.
- The job's data is damaged: the job fails with a message that names the damage, and the others end as usual.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.client import Pipeline
from redis.exceptions import WatchError
from rq.job import JobStatus
from rq.worker.base import WorkerStatus

from millrace.producer.rq.isolation import in_batches, isolated, write
from millrace.producer.rq.rq_job import RQ_JOB_ID, GatewayJob, JobSnapshot, read_snapshots
from millrace.producer.rq.runs import RunEnd, RunTable, write_end, write_failure, write_removed
from millrace.producer.rq.worker_entry import WorkerEntry
from millrace.results.errors import one_line

logger = logging.getLogger("millrace.gateway")


@dataclass(slots=True, eq=False)
class _Ending:
    """An end in its transaction."""

    end: RunEnd
    snapshot: JobSnapshot
    job: GatewayJob
    """A copy: its end changes it, and the transaction may have to be repeated."""
    is_owned: bool

    @property
    def is_written(self) -> bool:
        return self.is_owned and self.end.kind != "dropped"

    @property
    def is_awaited(self) -> bool:
        """Whether it is a success with dependents."""
        return self.is_written and self.end.kind == "finished" and self.snapshot.has_dependents


@dataclass(eq=False)
class ResultWriter:
    """Owns the last step of a run. May be used by several threads, for different runs."""

    _connection: redis.Redis
    _worker_entry: WorkerEntry
    _runs: RunTable

    def write_ends(self, ends: Sequence[RunEnd]) -> None:
        """Write these ends and remove the runs, also those that are no longer this gateway's."""
        in_batches(ends, self._write_batch, self._write_blank)

    def _write_batch(self, ends: Sequence[RunEnd]) -> None:
        parents = self._write_together(ends)
        in_batches(parents, self._write_together, self._write_blank, batch_size=1)

    def _write_blank(self, end: RunEnd, error: Exception) -> None:
        """Write the end of a job whose fields RQ cannot handle, without them; at worst, without its dependents too."""
        run = end.run
        why = one_line(f"RQ's record of the job is malformed ({type(error).__name__}: {error})", 250)
        logger.error("job %.150s: %s; only its end is written", run.job.id, why)
        run.job = GatewayJob.blank(run.job.id, self._connection, run.source.queue.name)
        end = end._replace(reason=one_line(f"{end.reason}; {why}"))
        for with_dependents in (True, False):
            with isolated(f"job {run.job.id}: its end cannot be written"):
                self._write_together([end], with_dependents=with_dependents)
                return
        run.source.drop([run.job.id])
        self._runs.remove([run])

    def _write_together(self, ends: Sequence[RunEnd], *, with_dependents: bool = True) -> list[RunEnd]:
        """Write ends in one transaction. Of several, return the successes that other jobs wait for: each needs a transaction
        of its own, which also enqueues these jobs."""
        jobs = [end.run.job for end in ends]
        while True:  # until no other client changes the jobs between reading and writing
            pipe: Any = self._connection.pipeline()
            with pipe:
                try:
                    pipe.watch(*(job.key for job in jobs), *(job.dependents_key for job in jobs))
                    endings = self._read(ends, with_dependents)
                    parents = [one for one in endings if one.is_awaited]
                    if parents and len(ends) == 1:
                        self._enqueue_dependents(parents.pop(), pipe)
                    if not pipe.explicit_transaction:  # RQ begins it when there is something to enqueue
                        pipe.multi()
                    endings = [one for one in endings if one not in parents]
                    self._write(pipe, endings)
                    write(pipe)
                    break
                except WatchError:
                    continue
        self._runs.remove(one.end.run for one in endings if one.is_written or not one.is_owned)
        self._worker_entry.update_state()
        for one in endings:
            is_failed = one.is_written and one.job.get_status(refresh=False) == JobStatus.FAILED
            if is_failed and one.snapshot.has_dependents:  # some allow a failure; RQ, too, enqueues them afterwards
                with isolated(f"job {one.job.id}: its dependents cannot be enqueued"):
                    self._enqueue_dependents(one)
            self._fail_dependents(one.job)
        return [one.end for one in parents]

    def _read(self, ends: Sequence[RunEnd], with_dependents: bool) -> list[_Ending]:
        records, job_ids = [end.run.source.record for end in ends], [end.run.job.id for end in ends]
        endings = []
        for end, snapshot in zip(ends, read_snapshots(self._connection, records, job_ids), strict=True):
            job = copy.copy(end.run.job)
            snapshot = snapshot._replace(has_dependents=with_dependents and snapshot.has_dependents)
            if snapshot.damage and end.kind != "dropped":
                end = RunEnd(end.run, "failed", reason=one_line(snapshot.damage))
                job.retries_left = None
            endings.append(_Ending(end, snapshot, job, snapshot.is_owned_by(self._worker_entry.name)))
        return endings

    def _write(self, pipe: Pipeline, endings: Sequence[_Ending]) -> None:
        for one in endings:
            snapshot, run = one.snapshot, one.end.run
            if not one.is_owned:
                why = one_line(f"status {snapshot.status}, worker {snapshot.worker_name} {snapshot.damage}")
                logger.info("job %.150s is no longer ours: %s", run.job.id, why)
                write_removed(pipe, run)
            elif one.is_written:
                if snapshot.damage:
                    logger.error("job %.150s fails: %s", run.job.id, one.end.reason)
                write_end(pipe, one.end, one.job, snapshot, self._worker_entry.name)
        if written := [one for one in endings if one.is_written]:
            self._count(pipe, written)

    def _count(self, pipe: Pipeline, written: Sequence[_Ending]) -> None:
        num_finished = sum(one.end.kind == "finished" for one in written)
        times = [(one.job.started_at, one.job.ended_at) for one in written]
        working_s = sum((ended - started).total_seconds() for started, ended in times if started and ended)
        self._worker_entry.write_counts(pipe, num_finished, len(written) - num_finished, working_s)
        if sum(self._runs.get(one.job.id) is one.end.run for one in written) == len(self._runs):
            self._worker_entry.write_state(pipe, WorkerStatus.IDLE)

    def _enqueue_dependents(self, parent: _Ending, pipe: Pipeline | None = None) -> None:
        """Enqueue the jobs that wait for this one, in the caller's transaction or in one of their own."""
        job, queue = parent.job, parent.end.run.source.queue
        job.damaged_dependents.clear()
        try:
            queue.enqueue_dependents(job, pipeline=pipe, refresh_job_status=False)
        except UnicodeDecodeError:
            found: Any = self._connection.smembers(job.dependents_key)
            invalid = [id_ for id_ in found if not RQ_JOB_ID.fullmatch(id_)]
            logger.error("%s: removed ids that RQ does not allow: %s", job.dependents_key, one_line(str(invalid)))
            self._connection.srem(job.dependents_key, *invalid)
            self._enqueue_dependents(parent, pipe)

    def _fail_dependents(self, parent: GatewayJob) -> None:
        """Fail the dependents that are damaged: nothing would enqueue them any more."""
        for job in parent.damaged_dependents.values():
            logger.error("job %.150s, which depends on %.150s, fails: %s", job.id, parent.id, job.damage)
            with isolated(f"job {job.id} cannot be failed"), self._connection.pipeline() as pipe:
                pipe.srem(parent.dependents_key, job.id)
                pipe.zrem(f"rq:deferred:{job.origin}", job.id)
                write_failure(pipe, job, JobStatus.FAILED, job.damage, {})
                write(pipe)
