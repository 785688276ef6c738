"""RQ's jobs as the gateway reads them: payloads stay closed, and damage to one job is noted instead of raised."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import redis
from rq.executions import ExecutionRegistry
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from millrace.producer.rq.isolation import is_outage, read, text
from millrace.results.errors import one_line

logger = logging.getLogger("millrace.gateway")

RQ_JOB_ID = re.compile(rb"[A-Za-z0-9_-]+")

_NOT_READ = frozenset({b"data", b"description", b"meta", b"exc_info", b"result", b"webhooks"})
_EMPTY_PAYLOAD = b"null"
_UNSUPPORTED = {
    b"success_callback_name": "on_success",
    b"failure_callback_name": "on_failure",
    b"stopped_callback_name": "on_stopped",
    b"webhooks": "webhooks",
}
_WAITS_FOR_PARENTS = (JobStatus.DEFERRED, JobStatus.CREATED)
_FINAL = (JobStatus.CANCELED, JobStatus.STOPPED, JobStatus.FINISHED)
_REMEDY = "delete this key, and enqueue the job again"
_TYPES = ("", "hash", "sorted set", "set", "stream")


class GatewayJob(Job):
    """An RQ job whose payload is not opened: RQ would inflate it without a limit. What its producer alone uses (payload,
    description, meta) is never written."""

    payload: bytes | None = None
    unsupported_options: tuple[str, ...] = ()
    """Arguments of `enqueue` that the producer has given and the gateway cannot honour."""
    damage: str = ""
    """Why the job cannot be read, and the remedy."""
    damaged_dependents: dict[str, GatewayJob]
    """Dependents that could not be enqueued when this job ended, by id."""

    @classmethod
    def blank(cls, job_id: str, connection: redis.Redis, origin: str) -> GatewayJob:
        """Return a job of which only the id and the queue are known."""
        job = cls(job_id, connection=connection, serializer=JSONSerializer)
        job.origin = origin
        job.data = _EMPTY_PAYLOAD
        job.damaged_dependents = {}
        return job

    @classmethod
    def load(cls, job_id: str, connection: redis.Redis, fields: dict[bytes, bytes], origin: str = "") -> GatewayJob:
        """Return the job with these fields of its hash, a blank one if they are malformed. `origin` is its queue when the
        hash names none."""
        origin = fields.get(b"origin", b"").decode(errors="ignore") or origin
        job = cls.blank(job_id, connection, origin)
        try:
            job.restore({**fields, b"origin": origin.encode()})
            if not origin:
                raise ValueError("origin names no queue")
        except Exception as error:  # RQ raises anything for a field that it has not written
            job = cls.blank(job_id, connection, origin)
            job.damage = job._explain(fields, error)
        return job

    @classmethod
    def fetch_many(cls, job_ids: Iterable[str], connection: redis.Redis, serializer: Any = None) -> list[Job | None]:
        """Return the jobs, None for those that do not exist. RQ calls this for the dependents of a job."""
        ids = [job_id for job_id in job_ids if RQ_JOB_ID.fullmatch(job_id.encode())]
        with connection.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.hgetall(cls.key_for(job_id))
            hashes = read(pipe)
        jobs: list[Job | None] = []
        for job_id, fields in zip(ids, hashes, strict=True):
            if isinstance(fields, Exception):
                logger.error("%s cannot be read: %s", cls.key_for(job_id), one_line(str(fields)))
            jobs.append(cls.load(job_id, connection, fields) if fields and isinstance(fields, dict) else None)
        return jobs

    def restore(self, raw_data: dict[bytes, bytes]) -> None:
        """Take the fields of the job's hash. Raises what RQ raises for a malformed field."""
        self.payload = raw_data.get(b"data")
        self.unsupported_options = tuple(option for name, option in _UNSUPPORTED.items() if raw_data.get(name))
        fields = {name: value for name, value in raw_data.items() if name not in _NOT_READ}
        super().restore({**fields, b"data": _EMPTY_PAYLOAD})
        dependency_ids: Any = self._dependency_ids
        if not isinstance(dependency_ids, list) or not all(isinstance(id_, str) for id_ in dependency_ids):
            raise ValueError("not a list of job ids")

    def to_dict(self, include_meta: bool = True, include_result: bool = True) -> dict[str, Any]:
        fields = super().to_dict(include_meta=False, include_result=False)
        del fields["data"]
        return fields

    def dependencies_are_met(self, parent_job: Job | None = None, *args: Any, **options: Any) -> bool:
        """Return whether the job can be enqueued now that its parent has ended. A damaged job is noted in its parent."""
        if not self.damage:
            # A job that was deleted and enqueued again may still be in the set of its former parent's dependents.
            if not self._dependency_ids or self.get_status(refresh=False) not in _WAITS_FOR_PARENTS:
                return False
            try:
                return bool(super().dependencies_are_met(parent_job, *args, **options))
            except Exception as error:
                if is_outage(error):
                    raise
                self.damage = f"{self.dependencies_key}: {one_line(str(error), 200)}; {_REMEDY}"
        if isinstance(parent_job, GatewayJob):
            parent_job.damaged_dependents[self.id] = self
        return False

    def _explain(self, fields: dict[bytes, bytes], error: Exception) -> str:
        """Name the malformed field."""
        place = self.key
        for name, value in fields.items():
            try:
                GatewayJob.blank(self.id, self.connection, "").restore({name: value})
            except Exception as cause:
                place, error = f"field {one_line(text(name), 50)} of {self.key}", cause
                break
        why = one_line(f"{type(error).__name__}: {error}", 200)
        return one_line(f"{place} is malformed ({why}); delete the job, and enqueue it again")


class JobSnapshot(NamedTuple):
    """What RQ and the record of taken jobs have about a job, read while its hash is under WATCH."""

    status: str | None
    """None: there is no such job. "": its hash has no status."""
    worker_name: str
    millrace_id: str | None
    """From the record: None when the job is not in it, "" before the job is registered."""
    execution_ids: list[str]
    has_dependents: bool
    damage: str
    """Names a key of the job that has a wrong type, and the remedy; otherwise empty."""

    @property
    def has_ended(self) -> bool:
        """Whether a taken job was cancelled or deleted, or, once registered, ended by others."""
        return self.status in (None, JobStatus.CANCELED) or (bool(self.millrace_id) and self.status in _FINAL)

    def is_owned_by(self, gateway: str) -> bool:
        """Return whether this gateway has to write the job's end.

        RQ's cleanup may have failed the job as abandoned, or put it back into its queue: as long as the job is in the
        record, it has not ended for us. Cancelled, stopped and finished are final.
        """
        if self.status is None or self.worker_name != gateway:
            return False
        return self.status == JobStatus.STARTED or (self.millrace_id is not None and self.status not in _FINAL)


def read_snapshots(connection: redis.Redis, records: Sequence[str], job_ids: Sequence[str]) -> list[JobSnapshot]:
    """Return a snapshot of each job. `records` has, for each job, the key of the record that it may be in."""
    keys: list[str] = []
    for record, job_id in zip(records, job_ids, strict=True):
        executions, dependents = ExecutionRegistry.key_template.format(job_id), Job.dependents_key_for(job_id)
        keys += record, Job.key_for(job_id), executions, dependents, f"rq:results:{job_id}"
    script: Any = connection.register_script(_READ)
    return [
        JobSnapshot(
            None if status is None else text(status),
            text(worker_name or b""),
            None if millrace_id is None else text(millrace_id),
            [text(execution_id) for execution_id in execution_ids],
            has_dependents == 1,
            f"{keys[5 * i + damaged]} is not a {_TYPES[damaged]}: {_REMEDY}" if damaged else "",
        )
        for i, (status, worker_name, millrace_id, execution_ids, has_dependents, damaged) in enumerate(
            script(keys, job_ids)
        )
    ]


_READ = """
-- Reads the state of jobs and changes nothing. A key of a wrong type is reported and does not fail the script.
-- KEYS  for each job: the record of taken jobs, the job's hash, its executions, its dependents, its results
-- ARGV  for each job: its id
-- Returns for each job: its status ('': none, false: no such job), its worker's name, its entry in the record, the ids of
--       its executions, 1 when it has dependents, and which of its keys has a wrong type (0: none, 1: the hash, ...)

local types, replies = {'hash', 'zset', 'set', 'stream'}, {}
for i, id in ipairs(ARGV) do
  local first, damaged, is = 5 * i - 4, 0, {}
  for key = 4, 1, -1 do
    local type = redis.call('TYPE', KEYS[first + key]).ok
    is[key] = type == types[key]
    if not is[key] and type ~= 'none' then damaged = key end
  end
  local fields = is[1] and redis.call('HMGET', KEYS[first + 1], 'status', 'worker_name') or {}
  local execution_ids = is[2] and redis.call('ZRANGE', KEYS[first + 2], 0, -1) or {}
  local entry = redis.call('HGET', KEYS[first], id)
  replies[i] = {is[1] and (fields[1] or ''), fields[2] or false, entry, execution_ids, is[3] and 1 or 0, damaged}
end
return replies
"""
