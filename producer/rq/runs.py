"""One run of an RQ job in RQ's own records: how its start and its end are written, as an RQ worker writes them.

Only RQ's public calls are used, but put together anew: RQ writes one job at a time and a gateway hundreds, and RQ has no
fence. Everything here adds commands to the caller's transaction and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from redis.client import Pipeline
from rq.defaults import DEFAULT_RESULT_TTL
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job, JobStatus
from rq.repeat import Repeat
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import now

from millrace.producer.rq.ledger import Ledger

EXECUTION_TTL_S = 3600
"""RQ declares an execution abandoned, and its job failed, when nobody has renewed it for so long: the time that there may
be no gateway at all. The ledger notices a dead gateway in seconds and does not depend on it."""
RENEWAL_INTERVAL_S = 60.0

_KEPT_SHUT = frozenset({b"data", b"meta", b"exc_info", b"result"})
_NO_CALL = b"null"
_NOT_MIRRORED = {
    b"success_callback_name": "on_success",
    b"failure_callback_name": "on_failure",
    b"stopped_callback_name": "on_stopped",
    b"webhooks": "webhooks",
}


class GatewayJob(Job):
    """An RQ job whose payload stays shut: RQ would inflate it without a limit, and open it. It is the producer's: read
    from `payload`, and never written."""

    payload: bytes | None = None
    not_mirrored: tuple[str, ...] = ()
    """Arguments of `enqueue` that it was given and that a gateway cannot honour."""

    def restore(self, raw_data: dict[bytes, bytes]) -> None:
        """Take the fields of the job's hash."""
        self.payload = raw_data.get(b"data")
        self.not_mirrored = tuple(argument for name, argument in _NOT_MIRRORED.items() if raw_data.get(name))
        fields = {name: value for name, value in raw_data.items() if name not in _KEPT_SHUT}
        super().restore({**fields, b"data": _NO_CALL})

    def to_dict(self, include_meta: bool = True, include_result: bool = True) -> dict[str, Any]:
        fields = super().to_dict(include_meta=False, include_result=False)
        del fields["data"]
        return fields


@dataclass(slots=True, eq=False)
class GatewayRun:
    """One RQ job that this gateway has in flight: registered with RQ, submitted to Millrace, not yet ended."""

    job: GatewayJob
    ledger: Ledger
    native_id: str
    execution: Execution
    is_checked: bool = False
    """Until then its Millrace job may have ended before anybody followed it."""
    num_lookups_lost: int = 0
    """How often in a row Millrace did not know the job."""
    is_stopping: bool = False
    """Somebody has sent RQ's stop-job command."""


class RunEnd(NamedTuple):
    """How a run ends."""

    run: GatewayRun
    kind: Literal["finished", "failed", "stopped", "dropped"]
    """Dropped: RQ's job was cancelled, deleted or taken by another gateway; nothing is written about it."""
    value: dict[str, Any] | None = None
    reason: str = ""


class Standing(NamedTuple):
    """What RQ and the ledger say about a job, read while the job is under WATCH."""

    status: str | None
    """None: it has been deleted."""
    owner: str
    native_id: str | None
    """From the ledger: None when it is not in it, "" before it was registered."""
    execution_ids: list[str]
    has_dependents: bool = False

    def is_held_by(self, gateway: str) -> bool:
        """Whether the run is this gateway's to end.

        RQ's cleanup may have declared it abandoned meanwhile, so it failed or went back to its queue: as long as it is in
        the ledger it has not ended for us. Cancelled, stopped and finished are somebody's last word.
        """
        if self.owner != gateway:
            return False
        if self.status == JobStatus.STARTED:
            return True
        return self.native_id is not None and self.status in (JobStatus.FAILED, JobStatus.QUEUED, JobStatus.SCHEDULED)


# --- start ---------------------------------------------------------------------------------------------------------


def write_start(
    pipe: Pipeline, ledger: Ledger, job: GatewayJob, native_id: str, gateway: str, standing: Standing
) -> Execution:
    """The job is started by this gateway: queued, or wherever RQ's cleanup has put it, -> started."""
    if standing.native_id:  # it had been registered before, by a gateway that has died or by this one
        leave_registries(pipe, ledger, job, standing.status)
    # Left alone, an old execution would be found abandoned one day, and the job failed for it.
    delete_executions(pipe, job, standing.execution_ids)
    execution = Execution.create(job, EXECUTION_TTL_S, pipeline=pipe)
    pipe.hset(execution.key, "worker_name", gateway)  # RQ does it since 2.10
    job.prepare_for_execution(gateway, pipeline=pipe)
    pipe.persist(job.key)  # `ttl` is for the time in the queue
    ledger.leave_intermediate(pipe, job.id)
    ledger.write(pipe, job.id, native_id)
    return execution


def renew(pipe: Pipeline, run: GatewayRun) -> None:
    """The execution lives."""
    run.execution.heartbeat(run.job.started_job_registry, EXECUTION_TTL_S, pipeline=pipe)


# --- end -----------------------------------------------------------------------------------------------------------


def write_end(pipe: Pipeline, end: RunEnd, job: GatewayJob, standing: Standing, gateway: str) -> None:
    """started -> finished, failed or stopped, or back to the queue when the producer gave it a Retry. `job` is changed."""
    run = end.run
    leave_registries(pipe, run.ledger, job, standing.status)
    delete_executions(pipe, job, standing.execution_ids)
    forget(pipe, run)
    job.ended_at = now()
    if end.kind == "finished":
        _write_success(pipe, run, job, end.value, gateway)
    elif end.kind == "failed" and job.should_retry:
        _write_retry(pipe, run, job)
    else:
        status = JobStatus.STOPPED if end.kind == "stopped" else JobStatus.FAILED
        _write_failure(pipe, run, job, status, end.reason, gateway)


def forget(pipe: Pipeline, run: GatewayRun) -> None:
    """This gateway has nothing to do with the run any more."""
    run.execution.delete(run.job, pipe)
    run.ledger.remove(pipe, run.job.id)


def leave_registries(pipe: Pipeline, ledger: Ledger, job: GatewayJob, status: str | None) -> None:
    """Out of where RQ's cleanup may have put a job that it took for abandoned."""
    if status == JobStatus.FAILED:
        job.failed_job_registry.remove(job, pipeline=pipe)
    elif status == JobStatus.SCHEDULED:
        ledger.queue.scheduled_job_registry.remove(job, pipeline=pipe)
    elif status == JobStatus.QUEUED:
        ledger.queue.remove(job, pipeline=pipe)
        ledger.leave_intermediate(pipe, job.id)


def read_executions(pipe: Pipeline, job_id: str) -> None:
    """Asks for the ids of the job's executions; RQ's own call takes a round trip for each."""
    pipe.zrange(ExecutionRegistry.key_template.format(job_id), 0, -1)


def delete_executions(pipe: Pipeline, job: GatewayJob, execution_ids: Iterable[str]) -> None:
    for execution_id in execution_ids:
        Execution(execution_id, job.id, job.connection).delete(job, pipe)


def _write_success(
    pipe: Pipeline, run: GatewayRun, job: GatewayJob, value: dict[str, Any] | None, gateway: str
) -> None:
    ttl = job.get_result_ttl(DEFAULT_RESULT_TTL)
    if ttl != 0:
        job.set_status(JobStatus.FINISHED, pipeline=pipe)
        job.save(pipeline=pipe)
        Result.create(job, Result.Type.SUCCESSFUL, ttl, return_value=value, pipeline=pipe, **_stamps(run, job, gateway))
        job.finished_job_registry.add(job, ttl, pipe)
    if job.repeats_left:
        Repeat.schedule(job, run.ledger.queue, pipeline=pipe)
    else:
        job.cleanup(ttl, pipeline=pipe, remove_from_queue=False)


def _write_retry(pipe: Pipeline, run: GatewayRun, job: GatewayJob) -> None:
    queue = run.ledger.queue
    interval_s = job.get_retry_interval()
    if not interval_s:
        job.retry(queue, pipe)
        return
    assert job.retries_left
    job.retries_left -= 1  # job.retry would write the new status outside of the transaction
    queue.schedule_job(job, now() + timedelta(seconds=interval_s), pipeline=pipe)


def _write_failure(
    pipe: Pipeline, run: GatewayRun, job: GatewayJob, status: JobStatus, reason: str, gateway: str
) -> None:
    job.set_status(status, pipeline=pipe)
    job.failed_job_registry.add(job, ttl=job.failure_ttl, exc_string=reason, pipeline=pipe)
    Result.create_failure(job, job.failure_ttl, exc_string=reason, pipeline=pipe, **_stamps(run, job, gateway))


def _stamps(run: GatewayRun, job: GatewayJob, gateway: str) -> dict[str, Any]:
    return {
        "worker_name": gateway,
        "execution_id": run.execution.id,
        "execution_started_at": run.execution.created_at,
        "execution_ended_at": job.ended_at,
    }


def new_job(job_id: str, ledger: Ledger) -> GatewayJob:
    """A job of this id of which nothing else is known."""
    job = GatewayJob(job_id, connection=ledger.queue.connection, serializer=JSONSerializer)
    job.origin = ledger.queue.name
    job.data = _NO_CALL
    return job
