"""The RQ gateway: a process that is a worker for RQ and a producer for Millrace.

    RQ's queue --take--> record --register--> RQ's started jobs --submit--> Millrace ... done --write_ends--> RQ's result

It holds up to `max_in_flight` jobs and computes nothing. Its state is in Redis: after a kill -9 another gateway on the same
queues continues within seconds (see `source_queue`), and two gateways can share a queue.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import redis
from rq import Queue
from rq.serializers import JSONSerializer

from millrace.producer.rq.intake import Intake
from millrace.producer.rq.isolation import is_outage
from millrace.producer.rq.millrace_jobs import MillraceJobs
from millrace.producer.rq.monitor import Monitor
from millrace.producer.rq.result_writer import ResultWriter
from millrace.producer.rq.rq_job import GatewayJob
from millrace.producer.rq.runs import RunTable
from millrace.producer.rq.source_queue import SourceQueue
from millrace.producer.rq.worker_entry import CommandListener, WorkerEntry
from millrace.results.connection import connect, is_cluster, resolve_url, server_name
from millrace.results.errors import InvalidRedisURL, QueueError, RedisUnavailable, one_line
from millrace.results.outage import Outage
from millrace.results.server_errors import as_unavailable, is_of_replica

logger = logging.getLogger("millrace.gateway")

_HEARTBEAT_INTERVAL_S = 1.0
_CHECK_INTERVAL_S = 1.5
_WAIT_S = 1
_MAX_RETRY_S = 4.0
_CLOSE_LIMIT_S = 15.0


def serve(redis_url: str | None, rq_queues: Sequence[str], to_queue: str, max_in_flight: int) -> None:
    """Run a gateway until SIGTERM, SIGINT or RQ's shutdown command. Raises RedisUnavailable or ServerUnsuitable when it
    cannot start."""
    client = _connect(redis_url)
    try:
        gateway = Gateway(client, _connect(redis_url, blocking=True), list(rq_queues), to_queue, max_in_flight)
        _stop_on_signal(gateway.stop)
        gateway.run()
    except redis.RedisError as error:
        raise as_unavailable(error, server_name(client)) or error from error


def is_running_here(redis_url: str | None, rq_queues: Sequence[str], to_queue: str) -> bool:
    """Return whether a gateway on this host has sent a heartbeat for each of the queues just now."""
    client = _connect(redis_url)
    try:
        sources = [SourceQueue(client, Queue(name, connection=client), to_queue, "") for name in rq_queues]
        ours = re.compile(re.escape(_name_start()) + r"\d+-[0-9a-f]+")  # and not those of a host "<ours>-1"
        return all(any(map(ours.fullmatch, source.living())) for source in sources)
    except redis.RedisError as error:
        raise as_unavailable(error, server_name(client)) or error from error


def _connect(redis_url: str | None, *, blocking: bool = False) -> redis.Redis:
    if is_cluster(resolve_url(redis_url)):
        raise InvalidRedisURL("RQ cannot use a cluster: give the URL of a single server, which RQ and Millrace share")
    return connect(redis_url, blocking=blocking)


def _name_start() -> str:
    """Return how the names of all gateways on this host begin."""
    return f"millrace-{socket.gethostname()}-"


class Gateway:
    """Owns the parts of one gateway, and its threads."""

    def __init__(
        self, client: redis.Redis, blocking_client: redis.Redis, rq_queues: list[str], to_queue: str, max_in_flight: int
    ) -> None:
        self.name = f"{_name_start()}{os.getpid()}-{secrets.token_hex(3)}"
        self._client, self._blocking_client = client, blocking_client
        self._server = server_name(client)
        self._outage = Outage()
        self._stopping = threading.Event()
        self._stop_requests: queue.SimpleQueue[None] = queue.SimpleQueue()  # unlike an Event, safe in a signal handler
        self._millrace = millrace = MillraceJobs(client, blocking_client, to_queue)
        for warning in millrace.check_server():
            logger.warning("redis: %s", warning)
        options: Any = {"connection": client, "job_class": GatewayJob, "serializer": JSONSerializer}
        queues = [Queue(name, **options) for name in dict.fromkeys(rq_queues)]
        self._sources = [SourceQueue(client, one, to_queue, self.name) for one in queues]
        self._runs = RunTable(max_in_flight)
        self._worker_entry = WorkerEntry(client, queues, self.name, self._runs)
        writer = ResultWriter(client, self._worker_entry, self._runs)
        self._intake = Intake(client, self._sources, millrace, self._worker_entry, self._runs, writer)
        self._monitor = Monitor(client, self._sources, millrace, self._worker_entry, self._runs, self._intake, writer)
        self._command_listener = CommandListener(client, self.name, self._monitor.stop_job, self.stop)
        self._title = f"{', '.join(one.name for one in queues)} -> Millrace queue {to_queue}"

    def stop(self) -> None:
        """Make `run` return. May be called from a signal handler."""
        self._stop_requests.put(None)

    def run(self) -> None:
        """Run until `stop`."""
        monitor = self._monitor
        self._millrace.start_following()
        monitor.heartbeat()
        threads = [self._thread("heartbeat", monitor.heartbeat, _HEARTBEAT_INTERVAL_S, monitor.delay_takeovers)]
        self._take_over()
        threads += [self._thread(f"intake-{source.queue.name}", self._take_from(source)) for source in self._sources]
        threads.append(self._thread("completions", monitor.follow_ends, 0.0, monitor.look_up_all))
        threads.append(self._thread("monitor", monitor.check, _CHECK_INTERVAL_S))
        self._thread("commands", self._command_listener.listen)
        logger.info("gateway %s: RQ queues %s", self.name, self._title)
        self._wait_for_stop()
        self._stopping.set()
        self._close(threads)

    def _wait_for_stop(self) -> None:
        while True:  # with a timeout: a signal that comes just before a wait is handled after it
            try:
                return self._stop_requests.get(timeout=_WAIT_S)
            except queue.Empty:
                continue

    def _take_over(self) -> None:
        """Take over jobs before any are taken: RQ may have put such a job back into its queue."""
        try:
            for source in self._sources:
                self._intake.take_over(source)
        except Exception:
            logger.exception("could not take over jobs; the monitor will try again")

    def _close(self, threads: list[threading.Thread]) -> None:
        """Sign off. Jobs in flight continue in Millrace, and the next gateway writes their ends."""
        for thread in threads:
            thread.join(_CLOSE_LIMIT_S)
        try:
            for source in self._sources:
                source.sign_off()
            self._worker_entry.sign_off()
        except redis.RedisError as error:
            logger.warning("could not deregister: %s; its jobs are taken over when its heartbeat expires", error)
        logger.info("gateway %s: stopped; the next gateway takes over %d jobs", self.name, len(self._runs))

    def _take_from(self, source: SourceQueue) -> Callable[[], None]:
        def take() -> None:
            if not self._runs.wait_for_capacity(_WAIT_S):
                return
            match self._intake.take():
                case "empty":  # block until there are jobs: this moves the first id of the list to its own place
                    self._blocking_client.blmove(source.queue.key, source.queue.key, _WAIT_S, "LEFT", "LEFT")
                case "suspended" | "full":
                    self._stopping.wait(_WAIT_S)

        return take

    def _thread(
        self, name: str, step: Callable[[], None], interval_s: float = 0.0, on_error: Callable[[], None] | None = None
    ) -> threading.Thread:
        """Start a thread that repeats the step until `stop`, also after errors."""

        def repeat() -> None:
            retry_s = 0.1
            while not self._stopping.is_set():
                try:
                    step()
                    self._outage.note_success()
                    retry_s = 0.1
                    self._stopping.wait(interval_s)
                except Exception as error:
                    self._log(error, retry_s)
                    if is_of_replica(error):
                        self._reconnect()
                    if on_error is not None:
                        on_error()
                    self._stopping.wait(retry_s)
                    retry_s = min(2 * retry_s, _MAX_RETRY_S)

        thread = threading.Thread(target=repeat, name=name, daemon=True)
        thread.start()
        return thread

    def _reconnect(self) -> None:
        """Close the idle connections to a server that has become a replica: its name may lead to the new primary by now."""
        for client in (self._client, self._blocking_client):
            client.connection_pool.disconnect(inuse_connections=False)

    def _log(self, error: Exception, retry_s: float) -> None:
        if is_outage(error):
            unavailable = None if isinstance(error, RedisUnavailable) else as_unavailable(error, self._server)
            self._outage.note_failure(unavailable or error)
        else:
            name = threading.current_thread().name
            is_expected = isinstance(error, redis.RedisError | QueueError)
            logger.warning("%s: %s; again in %.1f s", name, one_line(str(error)), retry_s, exc_info=not is_expected)


def _stop_on_signal(stop: Callable[[], None]) -> None:
    """Call `stop` at the first SIGTERM or SIGINT. The second one has its usual effect."""

    def handle(number: int, frame: FrameType | None) -> None:
        for name, handler in before.items():
            signal.signal(name, handler)
        stop()

    before = {name: signal.signal(name, handle) for name in (signal.SIGTERM, signal.SIGINT)}
