"""The open door: anything that can XADD a JSON object to the queue's inbox stream submits a job.

Every engine reads the inbox; whichever removes an entry has taken it, and the same script makes it a job. An entry that is
no valid request ends as a failed record under its id, or, when it has no usable one, in the stream of rejected entries.
"""

from __future__ import annotations

import logging
import threading

from producer.messages import InvalidRequest
from producer.wire import parse_body, refusal, to_submission, usable_id
from results.errors import QueueError
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
                if not all(map(self._take, self._queue.read_inbox("0", _AT_ONCE, _BLOCK_MS))):
                    self._stopping.wait(_RETRY_S)
            except QueueError as error:
                logger.warning("%s; trying again", error)
                self._stopping.wait(_RETRY_S)
            except Exception:  # our bug: it must not end what nothing else does
                logger.exception("trying again")
                self._stopping.wait(_RETRY_S)

    def _take(self, entry: InboxEntry) -> bool:
        """Whether the entry is dealt with; it stays while the queue is full."""
        try:
            submission = to_submission(parse_body(entry.raw))
            outcome = self._queue.accept(entry.entry_id, submission)
            if invalid := refusal(submission.job_id, outcome):
                raise invalid
        except InvalidRequest as error:
            logger.warning("inbox entry %s: %s", entry.entry_id, error)
            job_error = JobError(kind="invalid_request", message=str(error), field=error.field)
            self._queue.reject(entry.entry_id, usable_id(entry.raw), entry.raw, job_error)
            return True
        return not outcome.startswith("full")
