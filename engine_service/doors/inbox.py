"""The open door: anything that can XADD a JSON object to the queue's inbox stream submits a job.

Every engine reads the inbox; whichever removes an entry has taken it, and the same script makes it a job. An entry that is
no valid request ends as a failed record under its id, or, when it has no usable one, in the stream of rejected entries.
"""

from __future__ import annotations

import logging
import threading

from producer.messages import InvalidRequest
from producer.wire import parse_body, refusal, to_submission, usable_id
from results.errors import QueueError, RedisUnavailable
from results.messages import InboxEntry, JobError
from results.queue import JobQueue

logger = logging.getLogger("millrace.engine")

_BLOCK_MS = 1000
_RETRY_S = 0.5
_AT_ONCE = 64


class Inbox:
    """Owns the thread that empties the inbox."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Take nothing more in; returns at once, the thread ends with its current wait."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if not self._take_all():
                    self._stopping.wait(_RETRY_S)
            except QueueError as error:
                logger.warning("%s; trying again", error)
                self._stopping.wait(_RETRY_S)
            except Exception:  # our bug: it must not end what nothing else does
                logger.exception("trying again")
                self._stopping.wait(_RETRY_S)

    def _take_all(self) -> bool:
        """One pass over the inbox. An entry for which there is no room stays, and keeps nobody else's out. False when there
        was something and nothing could be taken."""
        after, has_taken = "0", False
        full_tenants: set[str] = set()  # as many jobs as they may have: not asked again and again in one pass
        while entries := self._queue.read_inbox(after, _AT_ONCE, _BLOCK_MS if after == "0" else None):
            for entry in entries:
                after = entry.entry_id
                outcome = self._try_to_take(entry, full_tenants)
                if outcome.startswith("full max_queued_jobs") or self._stopping.is_set():
                    return has_taken
                has_taken = has_taken or not outcome.startswith("full")
        return has_taken or after == "0"

    def _try_to_take(self, entry: InboxEntry, full_tenants: set[str]) -> str:
        try:
            return self._take(entry, full_tenants)
        except RedisUnavailable:
            raise
        except Exception:  # our bug, or the scripts': the entry stays, for a version without it, and the others go on
            logger.exception("inbox entry %s stays where it is", entry.entry_id)
            return "full"

    def _take(self, entry: InboxEntry, full_tenants: set[str]) -> str:
        """What became of the entry, as `JobQueue.accept` and `reject` say it."""
        try:
            submission = to_submission(parse_body(entry.raw))
            if submission.tenant in full_tenants:
                return "full"
            outcome = self._queue.accept(entry.entry_id, submission)
            if invalid := refusal(submission.job_id, outcome):
                raise invalid
        except InvalidRequest as error:
            logger.warning("inbox entry %s: %s", entry.entry_id, error)
            job_error = JobError(kind="invalid_request", message=str(error), field=error.field)
            return self._queue.reject(entry.entry_id, usable_id(entry.raw), entry.raw, job_error)
        if outcome.startswith("full tenant_max_queued_jobs"):
            full_tenants.add(submission.tenant)
        return outcome
