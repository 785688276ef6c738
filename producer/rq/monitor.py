"""Keeps what must not lapse while jobs are in flight, and notices what others do to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import redis
from rq.job import JobStatus

from millrace.producer.rq.intake import RQIntake
from millrace.producer.rq.ledger import GATEWAY_TTL_MS, Ledger
from millrace.producer.rq.native_jobs import NativeJobs
from millrace.producer.rq.presence import Presence
from millrace.producer.rq.result_writer import ResultWriter
from millrace.producer.rq.run_table import RunTable
from millrace.producer.rq.runs import RENEWAL_INTERVAL_S, GatewayRun, RunEnd, renew

logger = logging.getLogger("millrace.gateway")

_AT_ONCE = 256


class Monitor:
    """Owns the heartbeats of one gateway, and the second looks."""

    def __init__(
        self,
        connection: redis.Redis,
        ledgers: Sequence[Ledger],
        native: NativeJobs,
        presence: Presence,
        runs: RunTable,
        intake: RQIntake,
        result_writer: ResultWriter,
    ) -> None:
        self._connection = connection
        self._ledgers = ledgers
        self._native = native
        self._presence = presence
        self._runs = runs
        self._intake = intake
        self._result_writer = result_writer
        self._gateway = presence.name
        self._adopt_after_s = 0.0
        self._next_renewal_s = time.monotonic() + RENEWAL_INTERVAL_S

    def beat(self) -> None:
        """Stay alive for the other gateways and for RQ."""
        for ledger in self._ledgers:
            ledger.beat()
        self._presence.beat()

    def hold_adoptions(self) -> None:
        """The server was away: the others could not beat either, and get the time to do it."""
        self._adopt_after_s = time.monotonic() + GATEWAY_TTL_MS / 1000

    def tend(self) -> None:
        """Everything that has to be done every few seconds, and can be late."""
        for ledger in self._ledgers:
            if ledger.num_jobs() > len(self._runs.of(ledger)):
                self._intake.reconcile(ledger)
            if time.monotonic() >= self._adopt_after_s:
                self._intake.adopt(ledger)
        for runs in _batches(self._runs.all()):
            self._look(runs)
        if time.monotonic() >= self._next_renewal_s:
            for runs in _batches(self._runs.all()):
                self._renew(runs)
            self._forget_old_ends()
            self._next_renewal_s = time.monotonic() + RENEWAL_INTERVAL_S

    def stop_job(self, job_id: str) -> None:
        """RQ's stop-job command: the job ends as stopped when Millrace has let go of it."""
        run = self._runs.get(job_id)
        if run is None:
            logger.info("told to stop job %s, which is not in flight here", job_id)
            return
        run.is_stopping = True
        self._native.cancel(run.native_id)

    def _look(self, runs: Sequence[GatewayRun]) -> None:
        """What RQ says about the jobs: `job.cancel()` and `job.delete()` do not tell the worker."""
        dropped, abandoned = [], []
        for run, (status, owner) in zip(runs, self._read(runs), strict=True):
            is_ours = owner == self._gateway.encode()
            if status is None or (is_ours and status.decode() in (JobStatus.CANCELED, JobStatus.STOPPED)):
                self._native.cancel(run.native_id)
                dropped.append(RunEnd(run, "dropped"))
            elif not is_ours:
                dropped.append(RunEnd(run, "dropped"))
            elif status.decode() == JobStatus.FAILED:
                abandoned.append(run)  # by RQ's cleanup; or it has just ended, and left the ledger
            elif run.is_stopping:
                self._native.cancel(run.native_id)
        self._result_writer.write_ends(dropped)
        if abandoned:
            self._intake.begin_again(abandoned)

    def _read(self, runs: Sequence[GatewayRun]) -> list[tuple[bytes | None, bytes | None]]:
        with self._connection.pipeline(transaction=False) as pipe:
            for run in runs:
                pipe.hmget(run.job.key, "status", "worker_name")
            return [(status, owner) for status, owner in pipe.execute()]

    def _renew(self, runs: Sequence[GatewayRun]) -> None:
        with self._connection.pipeline(transaction=False) as pipe:
            for run in runs:
                renew(pipe, run)
            pipe.execute()

    def _forget_old_ends(self) -> None:
        """As every RQ worker does now and then: ids whose time is over leave the registries of finished and failed jobs."""
        for ledger in self._ledgers:
            ledger.queue.finished_job_registry.cleanup()
            ledger.queue.failed_job_registry.cleanup()


def _batches(runs: list[GatewayRun]) -> list[list[GatewayRun]]:
    return [runs[first : first + _AT_ONCE] for first in range(0, len(runs), _AT_ONCE)]
