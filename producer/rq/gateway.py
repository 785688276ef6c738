"""The RQ gateway: a process that is a well-behaved RQ worker on the outside and a producer of Millrace's on the inside.

    RQ's queue --take--> ledger --register--> RQ's started jobs --submit--> Millrace ... done --write_ends--> RQ's result

It holds up to `max_in_flight` jobs and computes nothing. What it knows is in Redis: after a kill -9 another gateway on
the same queues goes on within seconds (`rq_ledger` says how), and two of them share a queue.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import redis
from rq import Queue
from rq.serializers import JSONSerializer

from millrace.producer.rq.completions import Completions
from millrace.producer.rq.intake import RQIntake
from millrace.producer.rq.ledger import Ledger
from millrace.producer.rq.monitor import Monitor
from millrace.producer.rq.native_jobs import NativeJobs
from millrace.producer.rq.presence import CommandListener, Presence
from millrace.producer.rq.result_writer import ResultWriter
from millrace.producer.rq.run_table import RunTable
from millrace.producer.rq.runs import GatewayJob
from millrace.results.connection import as_unavailable, connect, server_name
from millrace.results.errors import QueueError

logger = logging.getLogger("millrace.gateway")

_BEAT_INTERVAL_S = 1.0
_TEND_INTERVAL_S = 1.5
_WAIT_S = 1
_MAX_RETRY_S = 4.0
_CLOSE_LIMIT_S = 15.0


def serve(redis_url: str | None, rq_queues: Sequence[str], to_queue: str, max_in_flight: int) -> None:
    """Be the gateway until SIGTERM, SIGINT or RQ's shutdown command. Raises RedisUnavailable or ServerUnsuitable when it
    cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    client = connect(redis_url)
    try:
        gateway = Gateway(client, connect(redis_url, blocking=True), list(rq_queues), to_queue, max_in_flight)
        with _stop_on_signal(gateway.stop):
            gateway.run()
    except redis.RedisError as error:
        raise as_unavailable(error, server_name(client)) or error from error


class Gateway:
    """Holds together what one gateway is made of, and its threads."""

    def __init__(
        self, client: redis.Redis, blocking_client: redis.Redis, rq_queues: list[str], to_queue: str, max_in_flight: int
    ) -> None:
        self.name = _new_name()
        self._client = client
        self._blocking_client = blocking_client
        self._stopping = threading.Event()
        self._stop_requests: queue.SimpleQueue[None] = queue.SimpleQueue()  # unlike an Event, safe in a signal handler

        native = NativeJobs(client, blocking_client, to_queue)
        for warning in native.check_server():
            logger.warning("redis: %s", warning)
        queues = [_open(name, client) for name in dict.fromkeys(rq_queues)]
        self._ledgers = [Ledger(client, one, to_queue, self.name) for one in queues]
        self._native = native
        self._runs = RunTable(max_in_flight)
        self._presence = Presence(client, queues, self.name, self._runs)
        result_writer = ResultWriter(client, self._presence, self._runs)
        self._intake = RQIntake(client, self._ledgers, native, self._presence, self._runs, result_writer)
        self._completions = Completions(native, self._runs, result_writer, self._intake)
        self._monitor = Monitor(client, self._ledgers, native, self._presence, self._runs, self._intake, result_writer)
        self._command_listener = CommandListener(client, self.name, self._monitor.stop_job, self.stop)
        self._title = f"{', '.join(one.name for one in queues)} -> Millrace queue {to_queue}"

    def stop(self) -> None:
        """Begin to leave. May be called from a signal handler."""
        self._stop_requests.put(None)

    def run(self) -> None:
        """Until `stop`."""
        self._native.start_following()
        self._presence.sign_on()
        self._monitor.beat()
        threads = [
            self._thread("heartbeat", self._monitor.beat, _BEAT_INTERVAL_S, on_error=self._monitor.hold_adoptions)
        ]
        self._adopt()
        threads += [
            *(self._thread(f"intake-{ledger.queue.name}", self._take_from(ledger)) for ledger in self._ledgers),
            self._thread("completions", self._completions.follow, on_error=self._completions.sweep_soon),
            self._thread("monitor", self._monitor.tend, _TEND_INTERVAL_S),
        ]
        self._thread("commands", self._command_listener.listen)
        logger.info("gateway %s: RQ queues %s", self.name, self._title)
        self._wait_for_stop()
        self._stopping.set()
        self._close(threads)

    def _wait_for_stop(self) -> None:
        """In turns: a signal that arrives while Python is on its way into a wait is only handled after that wait."""
        while True:
            try:
                return self._stop_requests.get(timeout=_WAIT_S)
            except queue.Empty:
                continue

    def _adopt(self) -> None:
        """Before anything is taken: RQ may have put an adopted job back into its queue."""
        try:
            for ledger in self._ledgers:
                self._intake.adopt(ledger)
        except Exception:
            logger.exception("could not adopt; the monitor will try again")

    def _close(self, threads: list[threading.Thread]) -> None:
        """What is in flight goes on in Millrace; its ends are for the next gateway to write."""
        for thread in threads:
            thread.join(_CLOSE_LIMIT_S)
        try:
            for ledger in self._ledgers:
                ledger.sign_off()
            self._presence.sign_off()
        except redis.RedisError as error:
            logger.warning("could not sign off: %s; the next gateway will wait for this one's heartbeat", error)
        logger.info("gateway %s: done, %d jobs left in flight for the next one", self.name, len(self._runs))

    def _take_from(self, ledger: Ledger) -> Callable[[], None]:
        def take() -> None:
            if not self._runs.wait_for_room(_WAIT_S):
                return
            match self._intake.take():
                case "empty":
                    self._wait_for_jobs(ledger.queue)
                case "suspended" | "full":
                    self._stopping.wait(_WAIT_S)

        return take

    def _wait_for_jobs(self, rq_queue: Queue) -> None:
        """Block until the queue has something. Moving its first element to where it is changes nothing, so there is no
        moment in which a job is nowhere."""
        self._blocking_client.blmove(rq_queue.key, rq_queue.key, _WAIT_S, "LEFT", "LEFT")

    def _thread(
        self, name: str, step: Callable[[], None], interval_s: float = 0.0, on_error: Callable[[], None] | None = None
    ) -> threading.Thread:
        """Start a thread that repeats the step until `stop`, whatever happens to Redis meanwhile."""

        def repeat() -> None:
            retry_s = 0.1
            while not self._stopping.is_set():
                try:
                    step()
                    retry_s = 0.1
                    self._stopping.wait(interval_s)
                except Exception as error:
                    is_expected = isinstance(error, redis.RedisError | QueueError | OSError)
                    logger.warning("%s: %s; again in %.1f s", name, error, retry_s, exc_info=not is_expected)
                    if on_error is not None:
                        on_error()
                    self._stopping.wait(retry_s)
                    retry_s = min(2 * retry_s, _MAX_RETRY_S)

        thread = threading.Thread(target=repeat, name=name, daemon=True)
        thread.start()
        return thread


def _open(name: str, connection: redis.Redis) -> Queue:
    return Queue(name, connection=connection, job_class=GatewayJob, serializer=JSONSerializer)


def _new_name() -> str:
    """RQ's name of this worker: one incarnation, where it runs, and something that no other incarnation has."""
    return f"millrace-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


@contextmanager
def _stop_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """The first SIGTERM or SIGINT is a request; the second one has its usual effect."""

    def ask(number: int, frame: FrameType | None) -> None:
        restore()
        stop()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        restore()
