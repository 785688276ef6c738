"""The writer: a thread that sends an engine's writes to Redis, so that the engine never waits for them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from millrace.results.errors import QueueError
from millrace.results.messages import Append, Event, Finish, JobId, Lease, Release, Write
from millrace.results.outage import Outage
from millrace.results.queue import JobQueue

log = logging.getLogger(__name__)

MAX_BATCH = 256
MAX_BACKOFF_S = 2.0
MAX_STALE_LEASES = 4096
"""Stale leases to remember; older writes of one are sent within a few batches."""


class Writer:
    """Owns the pending writes of an engine: sends them in batches, in order for each job, until they are written.

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
        self._changed = threading.Condition()
        # Below: guarded by _changed.
        self._waiting: deque[Write] = deque()
        self._in_flight: list[Write] = []
        self._pending_bytes = 0
        self._stale_leases: dict[Lease, None] = {}
        self._is_closing = False
        self.thread = threading.Thread(target=self._run, name="results-writer", daemon=True)
        self.thread.start()

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
            self._waiting.append(write)
            self._pending_bytes += _size(write)
            self._changed.notify_all()

    def pending(self) -> dict[JobId, Lease]:
        """Return the jobs with pending writes. The engine still holds them, so heartbeats have to name them."""
        with self._changed:
            return {write.job_id: write.lease for write in (*self._in_flight, *self._waiting)}

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is pending; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(self._is_empty, timeout_s)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Flush and end the thread; False when writes were dropped."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            is_empty = self._changed.wait_for(self._is_empty, timeout_s)
            self._waiting.clear()
            self._in_flight = []
            self._changed.notify_all()
        self.thread.join(timeout_s)
        return is_empty

    def _run(self) -> None:
        while batch := self._take_batch():
            outcomes = self._send(batch)
            if outcomes is None:
                return
            for lease, job_id in self._account(batch, outcomes).items():
                try:
                    self._on_stale(job_id, lease)
                except Exception:
                    log.exception("the engine could not drop job %s", job_id)

    def _take_batch(self) -> list[Write]:
        """Wait for writes, and return the next ones in order; none when the writer is closed."""
        with self._changed:
            while not self._in_flight:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
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
                log.exception("%d results wait to be written, next try in %.2f s", len(batch), backoff_s)
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
                    log.error("a write of job %s was refused, so the job is dropped: %s", write.job_id, outcome)
                self._stale_leases[write.lease] = None
                dropped[write.lease] = write.job_id
            while len(self._stale_leases) > MAX_STALE_LEASES:
                self._stale_leases.pop(next(iter(self._stale_leases)))
            self._in_flight = []
            self._changed.notify_all()
        return dropped

    def _is_empty(self) -> bool:
        return not self._waiting and not self._in_flight


def _size(write: Write) -> int:
    """Return about how many bytes the write occupies in this process."""
    num_bytes = 256
    match write:
        case Append() | Release():
            for output in write.outputs:
                num_bytes += 8 * len(output.token_ids) + sum(map(len, output.logprobs)) + _event_size(output.event)
        case Finish():
            num_bytes += sum(map(_event_size, write.events)) * (2 if write.chat else 1)
            num_bytes += write.prompt_logprobs.num_bytes if write.prompt_logprobs else 0
    return num_bytes


def _event_size(event: Event | None) -> int:
    return 0 if event is None else 8 * len(event.token_ids) + len(event.text) + len(event.logprobs or "")
