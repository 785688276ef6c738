"""Writes the ends of runs into RQ's records: hundreds in one transaction, each job once.

What can go wrong between Millrace's end of a job and RQ's:
- The gateway dies before the transaction. The ledger still has the job, another gateway adopts it, finds that Millrace's
  job is over, and writes the end.
- The transaction went through and its reply was lost. Read again, the job is no longer started and has left the ledger.
- This gateway slept and another one has adopted the job. The name in the job's hash, which is under WATCH, is not ours.
- RQ's cleanup has declared the job abandoned meanwhile. The ledger still has it: it leaves RQ's failed jobs, and ends.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import redis
from redis.client import Pipeline
from redis.exceptions import WatchError
from rq import Queue
from rq.job import JobStatus

from millrace.producer.rq.presence import Presence
from millrace.producer.rq.run_table import RunTable
from millrace.producer.rq.runs import (
    GatewayJob,
    RunEnd,
    Standing,
    forget,
    new_job,
    read_executions,
    write_end,
)

logger = logging.getLogger("millrace.gateway")

_AT_ONCE = 256


class ResultWriter:
    """Owns the last step of a run. May be used by several threads, for different runs."""

    def __init__(self, connection: redis.Redis, presence: Presence, runs: RunTable) -> None:
        self._connection = connection
        self._presence = presence
        self._runs = runs
        self._gateway = presence.name

    def write_ends(self, ends: Sequence[RunEnd]) -> None:
        """Write these ends, and let go of the runs; also of those that turn out to be no longer ours."""
        for first in range(0, len(ends), _AT_ONCE):
            self._write_some(ends[first : first + _AT_ONCE])

    def _write_some(self, ends: Sequence[RunEnd]) -> None:
        """A job whose fields, not written by RQ, make RQ fail at its end costs the others nothing, and ends."""
        try:
            for end in self._write_together(ends):
                self._write_parent(end)
        except (redis.RedisError, OSError):
            raise
        except Exception:
            if len(ends) > 1:
                for end in ends:
                    self._write_some([end])
                return
            run = ends[0].run
            logger.exception("job %s, or one that depends on it, is malformed: only its end is written", run.job.id)
            run.job = new_job(run.job.id, run.ledger)
            self._write_together(ends, with_dependents=False)

    def _write_together(self, ends: Sequence[RunEnd], *, with_dependents: bool = True) -> list[RunEnd]:
        """Returns those that have to be settled alone."""
        parents: list[RunEnd] = []
        failed_parents: list[tuple[Queue, GatewayJob]] = []

        def write(pipe: Pipeline, standings: list[Standing]) -> None:
            parents.clear()
            failed_parents.clear()
            ended = []
            pipe.multi()
            for end, standing in zip(ends, standings, strict=True):
                is_parent = with_dependents and standing.has_dependents
                if is_parent and end.kind == "finished":
                    parents.append(end)
                elif job := self._write(pipe, end, standing):
                    ended.append((end, job))
                    if is_parent and job.get_status(refresh=False) == JobStatus.FAILED:
                        failed_parents.append((end.run.ledger.queue, job))
            self._count(pipe, ended)

        standings = self._transaction(ends, write)
        self._let_go(ends, standings, parents)
        for queue, job in failed_parents:  # some dependents allow a failure; RQ, too, enqueues them afterwards
            queue.enqueue_dependents(job)
        return parents

    def _write_parent(self, end: RunEnd) -> None:
        """A success that others wait for: they are enqueued in the transaction that ends it."""

        def write(pipe: Pipeline, standings: list[Standing]) -> None:
            if standings[0].is_held_by(self._gateway):
                queue = end.run.ledger.queue
                queue.enqueue_dependents(end.run.job, pipeline=pipe, refresh_job_status=False)
            if not pipe.explicit_transaction:  # it begins one when there is something to enqueue
                pipe.multi()
            if job := self._write(pipe, end, standings[0]):
                self._count(pipe, [(end, job)])

        standings = self._transaction([end], write)
        self._let_go([end], standings, [])

    def _transaction(self, ends: Sequence[RunEnd], write: Callable[[Pipeline, list[Standing]], None]) -> list[Standing]:
        """Read where the jobs stand and write what follows, again and again until nobody has touched them in between."""
        jobs = [end.run.job for end in ends]
        while True:
            pipe: Any = self._connection.pipeline()
            with pipe:
                try:
                    pipe.watch(*(job.key for job in jobs), *(job.dependents_key for job in jobs))
                    standings = self._read(ends)
                    write(pipe, standings)
                    pipe.execute()
                    return standings
                except WatchError:
                    continue

    def _read(self, ends: Sequence[RunEnd]) -> list[Standing]:
        with self._connection.pipeline(transaction=False) as pipe:
            for end in ends:
                run = end.run
                pipe.hmget(run.job.key, "status", "worker_name")
                run.ledger.read(pipe, run.job.id)
                read_executions(pipe, run.job.id)
                pipe.exists(run.job.dependents_key)
            replies = pipe.execute()
        fields = zip(replies[0::4], replies[1::4], replies[2::4], replies[3::4], strict=True)
        return [
            Standing(
                status=status.decode() if status else None,
                owner=(owner or b"").decode(),
                native_id=native_id.decode() if native_id is not None else None,
                execution_ids=[execution_id.decode() for execution_id in execution_ids],
                has_dependents=bool(has_dependents),
            )
            for (status, owner), native_id, execution_ids, has_dependents in fields
        ]

    def _write(self, pipe: Pipeline, end: RunEnd, standing: Standing) -> GatewayJob | None:
        """Returns the job as it ended, None when it did not."""
        if not standing.is_held_by(self._gateway):
            logger.info("job %s is no longer ours: %s, with %s", end.run.job.id, standing.status, standing.owner)
            forget(pipe, end.run)
            return None
        if end.kind == "dropped":
            return None
        job = copy.copy(end.run.job)  # the transaction may have to be repeated, and begins anew then
        write_end(pipe, end, job, standing, self._gateway)
        return job

    def _count(self, pipe: Pipeline, ended: list[tuple[RunEnd, GatewayJob]]) -> None:
        if not ended:
            return
        num_finished = sum(end.kind == "finished" for end, _ in ended)
        working_time = timedelta()
        for _, job in ended:
            if job.started_at and job.ended_at:
                working_time += job.ended_at - job.started_at
        self._presence.write_counts(pipe, num_finished, len(ended) - num_finished, working_time.total_seconds())
        num_ending = sum(self._runs.get(job.id) is end.run for end, job in ended)
        if num_ending == len(self._runs):
            self._presence.write_idle(pipe)

    def _let_go(self, ends: Sequence[RunEnd], standings: list[Standing], kept: list[RunEnd]) -> None:
        self._runs.remove(
            end.run
            for end, standing in zip(ends, standings, strict=True)
            if end not in kept and not (end.kind == "dropped" and standing.is_held_by(self._gateway))
        )
        self._presence.correct_state()
