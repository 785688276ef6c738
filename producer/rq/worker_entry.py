"""The gateway as RQ sees it: one worker with a heartbeat, a state and counts, which listens for commands."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import redis
from redis.client import Pipeline
from rq import Queue
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker
from rq.worker.base import WorkerStatus

from millrace.producer.rq.rq_job import GatewayJob
from millrace.producer.rq.runs import RunTable

logger = logging.getLogger("millrace.gateway")

WORKER_TTL_S = 15
"""RQ adds a minute. After that, or when its jobs are taken over, a killed gateway is off RQ's list of workers."""
_LISTEN_S = 5.0


class WorkerEntry:
    """Owns the gateway's entry among RQ's workers."""

    def __init__(self, connection: redis.Redis, queues: Sequence[Queue], name: str, runs: RunTable) -> None:
        self.name = name
        self._connection = connection
        self._queues = list(queues)
        self._worker = _worker(self._queues, name, is_ours=True)
        self._runs = runs
        self._lock = threading.Lock()  # so that the state that is written last is the right one
        self.is_suspended = False

    def heartbeat(self) -> None:
        """Write or renew the entry. It may have been lost, with the server's memory or by a takeover."""
        with self._lock, self._connection.pipeline() as pipe:
            if not self._connection.sismember(self._worker.redis_workers_keys, self._worker.key):
                self._connection.delete(self._worker.key)
                self._worker.register_birth()
            self._worker.heartbeat(pipeline=pipe)
            self.write_state(pipe, self._state())
            pipe.execute()

    def update_state(self) -> None:
        """Write the state that follows from the number of jobs in flight, if it has changed."""
        with self._lock, self._connection.pipeline() as pipe:
            if self._worker.get_state() != self._state():
                self.write_state(pipe, self._state())
                pipe.execute()

    def write_busy(self, pipe: Pipeline, job_id: str) -> None:
        """Show this job as the current one. There may be others: RQ shows one."""
        self._worker.set_state(WorkerStatus.BUSY, pipeline=pipe)
        self._worker.set_current_job_id(job_id, pipeline=pipe)

    def write_state(self, pipe: Pipeline, state: WorkerStatus) -> None:
        self._worker.set_state(state, pipeline=pipe)
        if state == WorkerStatus.IDLE:
            self._worker.set_current_job_id(None, pipeline=pipe)

    def write_counts(self, pipe: Pipeline, num_finished: int, num_failed: int, working_time_s: float) -> None:
        pipe.hincrby(self._worker.key, "successful_job_count", num_finished)
        pipe.hincrby(self._worker.key, "failed_job_count", num_failed)
        pipe.hincrbyfloat(self._worker.key, "total_working_time", working_time_s)

    def sign_off(self) -> None:
        self._worker.register_death()

    def remove_dead(self, gateway: str) -> None:
        """Remove the entry of a gateway that has died."""
        _worker(self._queues, gateway, is_ours=False).register_death()

    def _state(self) -> WorkerStatus:
        if self.is_suspended:
            return WorkerStatus.SUSPENDED
        return WorkerStatus.BUSY if len(self._runs) else WorkerStatus.IDLE


class CommandListener:
    """Owns the subscription to RQ's commands for this worker. Commands that come while the connection is lost are lost."""

    def __init__(self, connection: Any, name: str, stop_job: Callable[[str], None], stop: Callable[[], None]) -> None:
        self._pubsub = connection.pubsub(ignore_subscribe_messages=True)
        self._channel = f"rq:pubsub:{name}"
        self._stop_job = stop_job
        self._stop = stop

    def listen(self) -> None:
        """Handle the next command, if one comes within a few seconds."""
        if not self._pubsub.subscribed:
            self._pubsub.subscribe(self._channel)
        message = self._pubsub.get_message(timeout=_LISTEN_S)
        if message is None or message["type"] != "message":
            return
        try:
            command = json.loads(message["data"])
            kind, job_id = command["command"], command.get("job_id")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            logger.warning("ignored a command that RQ has not written: %r", message["data"][:200])
            return
        if kind == "stop-job" and isinstance(job_id, str):
            self._stop_job(job_id)
        elif kind == "shutdown":
            logger.info("RQ's shutdown command: stopping")
            self._stop()
        else:  # kill-horse: a gateway has no work-horse process
            logger.warning("ignored RQ's command %.100r: a gateway has stop-job and shutdown", kind)


def _worker(queues: list[Queue], name: str, *, is_ours: bool) -> Any:
    options: Any = {"connection": queues[0].connection, "job_class": GatewayJob, "serializer": JSONSerializer}
    return BaseWorker(queues, name=name, worker_ttl=WORKER_TTL_S, prepare_for_work=is_ours, **options)
