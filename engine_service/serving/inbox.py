"""The inbox: any client that can XADD a JSON object to the queue's inbox stream submits a job.

Every engine reads the inbox. The engine that removes an entry has taken it; the same script makes it a job. An entry that is
no valid request becomes a failed record under its id, or, without a usable id, an entry of the `rejected` stream.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Set

from millrace.producer import InvalidRequest, PayloadTooLarge
from millrace.producer.wire import MAX_BODY_BYTES, parse_body, refusal, to_submission, usable_id
from millrace.results.errors import RedisUnavailable
from millrace.results.messages import InboxEntry, JobError, Submission
from millrace.results.outage import RETRY_S, Outage
from millrace.results.queue import JobQueue
from millrace.results.replies import Outcome

logger = logging.getLogger("millrace.engine")

_BLOCK_MS = 1000
_PAUSE_S = 0.01
"""After a wait without a result, since a wait does not raise what the server refuses."""
_MAX_ENTRIES = 64
_FIRST = "0-0"
_REST = 10
"""The pause between two passes over all waiting entries, in durations of such a pass."""
_MAX_REST_S = 10.0
_MAX_REPORTED = 1000
_QUEUE_LIMIT = "max_queued_jobs"
_STAYS = Outcome("full")
"""The outcome of an entry that was not tried, or whose attempt failed."""


class _TenantLimits:
    """What one pass has learned about the limits of tenants, so that it tries only jobs that may fit."""

    def __init__(self) -> None:
        self._refused_cost: dict[str, int] = {}
        """The least cost, in tokens, that exceeded a tenant's limit; 0 when the tenant has its most jobs."""

    def may_fit(self, submission: Submission) -> bool:
        return submission.tenant not in self._refused_cost or submission.cost < self._refused_cost[submission.tenant]

    def note(self, submission: Submission, outcome: Outcome) -> None:
        if outcome.name == "tenant_max_queued_jobs":
            self._refused_cost[submission.tenant] = 0
        elif outcome.name == "tenant_max_queued_tokens":
            self._refused_cost[submission.tenant] = submission.cost  # less than before, else it was not tried


class Inbox:
    """Owns the thread that empties the inbox."""

    def __init__(self, queue: JobQueue, outage: Outage | None = None) -> None:
        self._queue = queue
        self._outage = outage or Outage()
        self._seen = _FIRST
        """The last entry that was tried since the last full pass. Entries up to it stay because of limits."""
        self._rest_until_s = 0.0
        """By the monotonic clock: when the next full pass is due."""
        self._waiting: set[str] = set()
        """The tenants of the entries that stay up to `_seen`."""
        self._reported: deque[str] = deque(maxlen=_MAX_REPORTED)
        """Entries with an error of our code that is in the log."""
        self._stopping = threading.Event()
        self.thread = threading.Thread(
            target=self._outage.repeat, args=(self._read_once, self._stopping), name="inbox", daemon=True
        )

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Request the end of the thread; returns at once. The thread ends with its current wait."""
        self._stopping.set()

    def _read_once(self) -> None:
        entries = self._read(_FIRST, _BLOCK_MS)
        if not entries:
            self._stopping.wait(_PAUSE_S)
        elif not self._take_all(entries):
            self._stopping.wait(RETRY_S)

    def _read(self, after: str, block_ms: int | None = None) -> list[InboxEntry]:
        return self._queue.read_inbox(after, _MAX_ENTRIES, block_ms, max_body_bytes=MAX_BODY_BYTES)

    def _take_all(self, entries: list[InboxEntry]) -> bool:
        """Take all entries that the limits allow. False when none could be taken. `entries` are the first ones.

        To try an entry that has to wait costs as much as to take it, and there may be many. So full passes take about a
        tenth of the time. In between, only the first entries and the new ones are tried, except those of tenants with older
        entries in the middle.
        """
        began_s = time.monotonic()
        is_resting = began_s < self._rest_until_s
        if not is_resting:
            self._seen = _FIRST
            self._waiting.clear()
        are_taken = list(self._pass(entries, skip_to=self._seen))
        if not is_resting:
            now_s = time.monotonic()
            rest_s = _REST * (now_s - began_s) * are_taken.count(False) / len(are_taken)
            self._rest_until_s = now_s + min(rest_s, _MAX_REST_S)
        return any(are_taken)

    def _pass(self, entries: list[InboxEntry], skip_to: str) -> Iterator[bool]:
        """Try the first entries and those after `skip_to`, and yield for each whether it was taken. An entry over a limit
        stays, and does not keep entries of others out."""
        limits = _TenantLimits()
        overtaken: frozenset[str] = frozenset()
        while entries:
            for entry in entries:
                outcome = self._try_to_take(entry, limits, overtaken)
                if outcome.name == _QUEUE_LIMIT or self._stopping.is_set():
                    yield False
                    return
                after = entry.entry_id
                self._seen = max(self._seen, after, key=_place)
                yield outcome.kind != "full"
            if _place(after) < _place(skip_to):
                after, overtaken = skip_to, frozenset(self._waiting)
            entries = self._read(after)

    def _try_to_take(self, entry: InboxEntry, limits: _TenantLimits, overtaken: Set[str]) -> Outcome:
        """`overtaken` are the tenants whose older entries are skipped in this pass."""
        try:
            return self._take(entry, limits, overtaken)
        except RedisUnavailable:
            raise
        except Exception:  # our bug, here or in a script: the entry stays for a fixed version, and the others continue
            if entry.entry_id not in self._reported:
                self._reported.append(entry.entry_id)
                logger.exception("inbox entry %s stays in the inbox", entry.entry_id)
            return _STAYS

    def _take(self, entry: InboxEntry, limits: _TenantLimits, overtaken: Set[str]) -> Outcome:
        """Take or reject an entry. Returns the outcome of `JobQueue.accept`."""
        try:
            if not entry.num_bytes:
                raise InvalidRequest(
                    "job", "is missing or empty; an entry has the request in this field, as a JSON object"
                )
            if entry.num_bytes > MAX_BODY_BYTES:  # `raw` is its beginning
                raise PayloadTooLarge(entry.num_bytes, MAX_BODY_BYTES)
            submission = to_submission(parse_body(entry.raw))
            outcome = _STAYS
            if submission.tenant not in overtaken and limits.may_fit(submission):
                outcome = self._queue.accept(entry.entry_id, submission)
            if outcome.kind == "conflict":
                raise InvalidRequest("id", "belongs to a job with another body; use another one, or none")
            if invalid := refusal(submission.job_id, outcome):
                raise invalid
        except InvalidRequest as error:
            logger.warning("inbox entry %s: %s", entry.entry_id, error)
            job_error = JobError(kind="invalid_request", message=str(error), field=error.field)
            self._queue.reject(entry.entry_id, usable_id(entry.raw), entry.raw, job_error)
            return Outcome("taken")
        if outcome.kind == "full" and outcome.name != _QUEUE_LIMIT:  # that outcome ends the pass
            self._waiting.add(submission.tenant)
        limits.note(submission, outcome)
        return outcome


def _place(entry_id: str) -> tuple[int, int]:
    """Return the key that orders entries: ids are compared as numbers, not as text."""
    time_ms, number = entry_id.split("-")
    return int(time_ms), int(number)
