"""Writes the ends of flights into RQ's records: hundreds in one transaction, each job once.

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
from millrace.producer.rq.run_table import Flights
from millrace.producer.rq.runs import (
    FlightEnd,
    GatewayJob,
    Standing,
    forget,
    new_job,
    read_executions,
    write_end,
)

logger = logging.getLogger("millrace.gateway")

_AT_ONCE = 256


class Settler:
    """Owns the last step of a flight. May be used by several threads, for different flights."""

    def __init__(self, connection: redis.Redis, presence: Presence, flights: Flights) -> None:
        self._connection = connection
        self._presence = presence
        self._flights = flights
        self._gateway = presence.name

    def settle(self, ends: Sequence[FlightEnd]) -> None:
        """Write these ends, and let go of the flights; also of those that turn out to be no longer ours."""
        for first in range(0, len(ends), _AT_ONCE):
            self._settle_some(ends[first : first + _AT_ONCE])

    def _settle_some(self, ends: Sequence[FlightEnd]) -> None:
        """A job whose fields, not written by RQ, make RQ fail at its end costs the others nothing, and ends."""
        try:
            for end in self._settle_together(ends):
                self._settle_parent(end)
        except (redis.RedisError, OSError):
            raise
        except Exception:
            if len(ends) > 1:
                for end in ends:
                    self._settle_some([end])
                return
            flight = ends[0].flight
            logger.exception("job %s, or one that depends on it, is malformed: only its end is written", flight.job.id)
            flight.job = new_job(flight.job.id, flight.ledger)
            self._settle_together(ends, with_dependents=False)

    def _settle_together(self, ends: Sequence[FlightEnd], *, with_dependents: bool = True) -> list[FlightEnd]:
        """Returns those that have to be settled alone."""
        parents: list[FlightEnd] = []
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
                        failed_parents.append((end.flight.ledger.queue, job))
            self._count(pipe, ended)

        standings = self._transaction(ends, write)
        self._let_go(ends, standings, parents)
        for queue, job in failed_parents:  # some dependents allow a failure; RQ, too, enqueues them afterwards
            queue.enqueue_dependents(job)
        return parents

    def _settle_parent(self, end: FlightEnd) -> None:
        """A success that others wait for: they are enqueued in the transaction that ends it."""

        def write(pipe: Pipeline, standings: list[Standing]) -> None:
            if standings[0].is_held_by(self._gateway):
                queue = end.flight.ledger.queue
                queue.enqueue_dependents(end.flight.job, pipeline=pipe, refresh_job_status=False)
            if not pipe.explicit_transaction:  # it begins one when there is something to enqueue
                pipe.multi()
            if job := self._write(pipe, end, standings[0]):
                self._count(pipe, [(end, job)])

        standings = self._transaction([end], write)
        self._let_go([end], standings, [])

    def _transaction(
        self, ends: Sequence[FlightEnd], write: Callable[[Pipeline, list[Standing]], None]
    ) -> list[Standing]:
        """Read where the jobs stand and write what follows, again and again until nobody has touched them in between."""
        jobs = [end.flight.job for end in ends]
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

    def _read(self, ends: Sequence[FlightEnd]) -> list[Standing]:
        with self._connection.pipeline(transaction=False) as pipe:
            for end in ends:
                flight = end.flight
                pipe.hmget(flight.job.key, "status", "worker_name")
                flight.ledger.read(pipe, flight.job.id)
                read_executions(pipe, flight.job.id)
                pipe.exists(flight.job.dependents_key)
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

    def _write(self, pipe: Pipeline, end: FlightEnd, standing: Standing) -> GatewayJob | None:
        """Returns the job as it ended, None when it did not."""
        if not standing.is_held_by(self._gateway):
            logger.info("job %s is no longer ours: %s, with %s", end.flight.job.id, standing.status, standing.owner)
            forget(pipe, end.flight)
            return None
        if end.kind == "dropped":
            return None
        job = copy.copy(end.flight.job)  # the transaction may have to be repeated, and begins anew then
        write_end(pipe, end, job, standing, self._gateway)
        return job

    def _count(self, pipe: Pipeline, ended: list[tuple[FlightEnd, GatewayJob]]) -> None:
        if not ended:
            return
        num_finished = sum(end.kind == "finished" for end, _ in ended)
        working_time = timedelta()
        for _, job in ended:
            if job.started_at and job.ended_at:
                working_time += job.ended_at - job.started_at
        self._presence.write_counts(pipe, num_finished, len(ended) - num_finished, working_time.total_seconds())
        num_ending = sum(self._flights.get(job.id) is end.flight for end, job in ended)
        if num_ending == len(self._flights):
            self._presence.write_idle(pipe)

    def _let_go(self, ends: Sequence[FlightEnd], standings: list[Standing], kept: list[FlightEnd]) -> None:
        self._flights.remove(
            end.flight
            for end, standing in zip(ends, standings, strict=True)
            if end not in kept and not (end.kind == "dropped" and standing.is_held_by(self._gateway))
        )
        self._presence.correct_state()
