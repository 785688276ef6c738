"""From requests to batches that one call submits, and from the answers to what the caller is told."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

from producer.checks import shown
from producer.errors import InvalidRequest
from producer.request import BATCH_PATTERN, GenerationRequest
from producer.wire import refusal, to_submission
from results import commands, replies
from results.durability import DURABILITIES, check_confirmed, confirmation
from results.errors import JobConflict, QueueFull
from results.keys import QueueKeys
from results.messages import Submission
from results.scripts import Command
from results.transport import Reply

BATCH_JOBS = 256
BATCH_BYTES = 4 * 1024 * 1024
BATCHES_CONFIRMED_TOGETHER = 16
"""A confirmation may take as long as an fsync, so one is asked for many batches."""


def batches(requests: Iterable[GenerationRequest], batch: str | None = None) -> Iterator[list[Submission]]:
    """Takes from `requests` only as they are needed, so a generator of millions is fine. `batch` names them all."""
    together: list[Submission] = []
    num_bytes = 0
    for request in requests:
        submission = to_submission(request, batch=batch)
        together.append(submission)
        num_bytes += len(submission.body)
        if len(together) == BATCH_JOBS or num_bytes >= BATCH_BYTES:
            yield together
            together, num_bytes = [], 0
    if together:
        yield together


class SubmitCall:
    """Owns the account of one call of `submit_many`: what to send next, and what has become of what was sent.

    Does no input or output, so that one logic serves sync and async clients alike. Raises InvalidRequest.
    """

    def __init__(
        self, keys: QueueKeys, requests: Iterable[GenerationRequest], batch: str | None, durability: str
    ) -> None:
        _check_batch(batch)
        if durability not in DURABILITIES:
            raise InvalidRequest("durability", f"must be one of {', '.join(DURABILITIES)}, got {shown(durability)}")
        self.job_ids: list[str] = []
        self.confirmation = confirmation(durability)
        """To be sent after the commands, on their connection; None where nothing has to be confirmed."""
        self._keys = keys
        self._batches = batches(requests, batch)
        self._durability = durability
        self._sent: list[list[Submission]] = []
        self._conflicting: list[str] = []
        self._invalid: list[InvalidRequest] = []

    def next_commands(self) -> list[Command]:
        """What to send next; nothing when all has been sent."""
        self._sent = list(islice(self._batches, BATCHES_CONFIRMED_TOGETHER if self.confirmation else 1))
        return [commands.submit(self._keys, batch) for batch in self._sent]

    def feed(self, answers: list[Reply], confirmed: Reply = None) -> None:
        """The answers to those commands. Raises QueueFull, after which nothing more is sent, and NotDurable."""
        outcomes = [outcome for answer in answers for outcome in replies.words(answer)]
        job_ids = [job.job_id for batch in self._sent for job in batch]
        refused: dict[str, str] = {}
        for job_id, outcome in zip(job_ids, outcomes, strict=True):
            if outcome.startswith("full "):
                refused[job_id] = outcome
                continue
            if invalid := refusal(job_id, outcome):
                self._invalid.append(invalid)
                continue
            self.job_ids.append(job_id)
            if outcome == "conflict":
                self._conflicting.append(job_id)
        if self.confirmation:
            check_confirmed(self._durability, confirmed, self._accepted())
        if refused:
            _, limit, value = next(iter(refused.values())).split(" ")
            raise QueueFull(limit, value, self._accepted(), list(refused))

    def end(self) -> list[str]:
        """The ids of all jobs, in order. Raises InvalidRequest for a job that the queue's scripts have refused, and
        JobConflict for ids that belong to other jobs."""
        if self._invalid:
            raise self._invalid[0]
        if self._conflicting:
            raise JobConflict(self._conflicting)
        return self.job_ids

    def _accepted(self) -> list[str]:
        conflicting = set(self._conflicting)
        return [job_id for job_id in self.job_ids if job_id not in conflicting]


_BATCH = re.compile(BATCH_PATTERN)


def _check_batch(batch: str | None) -> None:
    if batch is not None and (type(batch) is not str or not _BATCH.fullmatch(batch)):
        raise InvalidRequest("batch", f"must match {BATCH_PATTERN}, got {shown(batch)}")
