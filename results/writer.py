"""The writer: a thread that sends an engine's writes to Redis, so that the engine never waits for them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

from millrace.results.errors import QueueError
from millrace.results.logprobs import LazyJson
from millrace.results.messages import Append, Event, Finish, JobError, JobId, Lease, Release, Usage, Write
from millrace.results.outage import Outage
from millrace.results.queue import JobQueue

logger = logging.getLogger("millrace.results")

THREAD_NAME = "results-writer"
MAX_BATCH = 256
MAX_BACKOFF_S = 2.0
MAX_STALE_LEASES = 4096
"""Stale leases to remember; older writes of one are sent within a few batches."""


class Writer:
    """Owns the pending writes of an engine: sends them in batches, in order for each job, until they are written.

    Builds the log-probabilities of output tokens before it sends them. A second thread builds those of prompts (seconds for
    a long prompt), so that no other write waits for it.
    Calls `on_stale(job_id, lease)` in the writer's thread for a lease that is no longer the engine's, and drops all its
    writes.
    """

    def __init__(
        self,
        queue: JobQueue,
        on_stale: Callable[[JobId, Lease], None],
        *,
        max_pending_bytes: int = 64 * 1024 * 1024,
        outage: Outage | None = None,
    ) -> None:
        self._queue = queue
        self._on_stale = on_stale
        self._outage = outage or Outage()
        self._max_pending_bytes = max_pending_bytes
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._must_build = threading.Condition(lock)
        # Below: guarded by the lock.
        self._building: deque[Finish] = deque()
        """Ends of jobs, each the last write of its lease. They wait for the builder, which removes one when it is built."""
        self._waiting: deque[Write] = deque()
        self._in_flight: list[Write] = []
        self._pending_bytes = 0
        self._stale_leases: dict[Lease, None] = {}
        self._is_closing = False
        self._sender = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._builder = threading.Thread(target=self._run_builder, name="results-builder", daemon=True)
        self.threads = [self._sender, self._builder]
        for thread in self.threads:
            thread.start()

    @property
    def pending_bytes(self) -> int:
        """About how many bytes the pending writes occupy."""
        return self._pending_bytes

    @property
    def is_full(self) -> bool:
        """Whether the engine should pause until fewer bytes are pending."""
        return self._pending_bytes >= self._max_pending_bytes

    def put(self, write: Write) -> None:
        """Add a write; never waits."""
        with self._changed:
            if self._is_closing:
                raise RuntimeError("the writer is closed")
            if write.lease in self._stale_leases:
                return
            self._pending_bytes += _size(write)
            if isinstance(write, Finish) and write.prompt_logprobs is not None:
                self._building.append(write)
                self._must_build.notify()
            else:
                self._waiting.append(write)
                self._changed.notify_all()

    def pending(self) -> dict[JobId, Lease]:
        """Return the jobs with pending writes. The engine still holds them, so heartbeats have to name them."""
        with self._changed:
            return {write.job_id: write.lease for write in (*self._in_flight, *self._waiting, *self._building)}

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is pending; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(self._is_empty, timeout_s)

    def close(self, timeout_s: float = 5.0, *, build_timeout_s: float = 0.0) -> bool:
        """Flush and end the threads; False when writes were dropped. `timeout_s` begins when the log-probabilities of
        prompts are built, or after `build_timeout_s`."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._must_build.notify()
            self._changed.wait_for(lambda: not self._building, build_timeout_s)
            is_empty = self._changed.wait_for(self._is_empty, timeout_s)
            self._waiting.clear()
            self._building.clear()
            self._in_flight = []
            self._changed.notify_all()
        self._sender.join(timeout_s)
        if is_empty:  # else the builder may need seconds more for what is dropped
            self._builder.join(timeout_s)
        return is_empty

    def _run(self) -> None:
        while batch := self._take_batch():
            outcomes = self._send([_built(write, _output_logprobs(write)) for write in batch])
            if outcomes is None:
                return
            for lease, job_id in self._account(batch, outcomes).items():
                try:
                    self._on_stale(job_id, lease)
                except Exception:
                    logger.exception("the engine could not drop job %s", job_id)

    def _run_builder(self) -> None:
        while True:
            with self._must_build:
                self._must_build.wait_for(lambda: self._building or self._is_closing)
                if not self._building:
                    return
                write = self._building[0]
            built = _built(write, [write.prompt_logprobs])
            with self._changed:
                if not self._building:  # closed meanwhile
                    return
                self._building.popleft()
                self._waiting.append(built)
                self._pending_bytes += _size(built) - _size(write)
                self._changed.notify_all()

    def _take_batch(self) -> list[Write]:
        """Wait for writes, and return the next ones in order; none when the writer is closed."""
        with self._changed:
            while not self._in_flight:
                self._changed.wait_for(lambda: self._waiting or (self._is_closing and not self._building))
                if not self._waiting:
                    return []
                self._move_to_flight()
                self._changed.notify_all()
            return list(self._in_flight)

    def _move_to_flight(self) -> None:
        while self._waiting and len(self._in_flight) < MAX_BATCH:
            write = self._waiting.popleft()
            if write.lease in self._stale_leases:
                self._pending_bytes -= _size(write)
            else:
                self._in_flight.append(write)

    def _send(self, batch: list[Write]) -> list[str] | None:
        """Send until there are outcomes, and return them. None when the writer was closed before."""
        backoff_s = 0.05
        while True:
            try:
                outcomes = self._queue.write(batch)
                self._outage.note_success()
                return outcomes
            except QueueError as error:
                self._outage.note_failure(error)
            except Exception:  # our bug: it must not end the thread, which has more to write
                logger.exception("%d results wait to be written, next try in %.2f s", len(batch), backoff_s)
            with self._changed:
                if self._changed.wait_for(lambda: not self._in_flight, backoff_s):
                    return None
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    def _account(self, batch: list[Write], outcomes: list[str]) -> dict[Lease, JobId]:
        """Remove the batch, and return the leases that are no longer the engine's."""
        dropped: dict[Lease, JobId] = {}
        with self._changed:
            for write, outcome in zip(batch, outcomes, strict=True):
                self._pending_bytes -= _size(write)
                if outcome in ("ok", "already", "retrying"):
                    continue
                if outcome != "stale":
                    logger.error("a write of job %s was refused, so the job is dropped: %s", write.job_id, outcome)
                self._stale_leases[write.lease] = None
                dropped[write.lease] = write.job_id
            while len(self._stale_leases) > MAX_STALE_LEASES:
                self._stale_leases.pop(next(iter(self._stale_leases)))
            self._in_flight = []
            self._changed.notify_all()
        return dropped

    def _is_empty(self) -> bool:
        return not self._waiting and not self._in_flight and not self._building


def _built(write: Write, logprobs: Iterable[LazyJson | None]) -> Write:
    """Build the log-probabilities of a write. Return the write, or a failure of the job if they cannot be built."""
    try:
        for each in logprobs:
            if each is not None:
                each.read()
    except Exception as error:  # our bug, or too little memory
        logger.exception("the log-probabilities of job %s could not be built", write.job_id)
        message = f"log-probabilities could not be built ({type(error).__name__}); the engine's log has the traceback"
        end = write if isinstance(write, Finish) else None
        return Finish(
            job_id=write.job_id,
            lease=write.lease,
            state="failed",
            finish_reason="error",
            usage=end.usage if end else Usage(prompt_tokens=0, completion_tokens=0),
            events=[event for event in end.events if event.logprobs is None] if end else [],
            error=JobError(kind="internal", message=message),
            is_retryable=True,
        )
    return write


def _output_logprobs(write: Write) -> list[LazyJson | None]:
    match write:
        case Append() | Release():
            events = [output.event.logprobs for output in write.outputs if output.event is not None]
            return [*events, *(output.logprobs for output in write.outputs)]
        case Finish():
            return [event.logprobs for event in write.events]
    return []


def _size(write: Write) -> int:
    """Return about how many bytes the write occupies in this process."""
    num_bytes = 256
    match write:
        case Append() | Release():
            for output in write.outputs:
                num_bytes += 8 * len(output.token_ids) + _event_size(output.event)
        case Finish():
            num_bytes += sum(map(_event_size, write.events))
            num_bytes += write.prompt_logprobs.num_bytes if write.prompt_logprobs else 0
    return num_bytes + sum(each.num_bytes for each in _output_logprobs(write) if each)


def _event_size(event: Event | None) -> int:
    return 0 if event is None else 8 * len(event.token_ids) + len(event.text) * (1 if event.chat is None else 2)
