"""Submitting requests: what each command takes, and the results and errors of a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from millrace.producer import arguments
from millrace.producer.calls import look_up
from millrace.producer.errors import InvalidRequest
from millrace.producer.request import GenerationRequest
from millrace.producer.wire import refusal, to_submission
from millrace.results import commands, replies
from millrace.results.durability import check_confirmed, confirmation
from millrace.results.errors import JobConflict, QueueError, QueueFull, shown
from millrace.results.keys import QueueKeys
from millrace.results.messages import Submission
from millrace.results.replies import Outcome
from millrace.results.scripts import Command
from millrace.results.transport import Call, Reply

LOAD_JOBS = 256
LOAD_BYTES = 4 * 1024 * 1024
LOADS_CONFIRMED_TOGETHER = 16
"""A confirmation may take as long as an fsync, so one covers many commands."""


def command_loads(submissions: Iterable[Submission], num_parts: int = 1) -> Iterator[list[Submission]]:
    """Yield the jobs of one command each, bounded in number and bytes: the server serves no other client while a command
    runs. Takes submissions only as they are needed. With `num_parts` of 2, each load is half as large: 128 jobs or 2 MiB."""
    max_jobs, max_bytes = LOAD_JOBS // num_parts, LOAD_BYTES // num_parts
    together: list[Submission] = []
    num_bytes = 0
    for submission in submissions:
        together.append(submission)
        num_bytes += len(submission.body)
        if len(together) == max_jobs or num_bytes >= max_bytes:
            yield together
            together, num_bytes = [], 0
    if together:
        yield together


def submitted(job: Submission, outcome: Outcome) -> str:
    """Return the id of a job that was sent alone. Raises what `refused` returns."""
    if error := refused(job, outcome, []):
        raise error
    return job.job_id


def refused(job: Submission, outcome: Outcome, accepted: list[str]) -> QueueError | InvalidRequest | None:
    """Return the error for a job that the queue has not taken, else None. `accepted`: other jobs of the call."""
    if outcome.is_accepted:
        return None
    if outcome.kind == "conflict":
        return JobConflict([job.job_id])
    return refusal(job.job_id, outcome) or QueueFull(outcome.name, outcome.limit, accepted, [job.job_id])


class Submitted(list[str]):
    """The ids of the jobs of one call of `submit_many`, in order."""

    known: dict[str, str]
    """By id the state of each job that the queue had before this call: it is not submitted again, whatever its state."""


class Submitting:
    """Owns the state of one call of `submit_many`: what to send next, and the outcome of what was sent.

    Does no I/O, so that sync and async clients share it. A list or tuple is checked whole before its first job is sent
    (raises InvalidRequest). Another iterable may be endless: only one load is taken from it ahead of the answers, and the
    jobs before an invalid request are in the queue when `end` raises. The server may refuse single jobs, such as one whose
    `run_at` is after its deadline by the server's clock; all others are in the queue then.
    """

    def __init__(
        self,
        keys: QueueKeys,
        requests: Iterable[GenerationRequest],
        batch: str | None,
        durability: str,
        *,
        calls_prepare: bool = False,
    ) -> None:
        """`calls_prepare`: the caller calls `prepare` while the server works on the last commands."""
        self.confirmation = confirmation(arguments.durability(durability))
        """To send after the commands, on the same connection. None: nothing to confirm."""
        self._keys = keys
        self._durability = durability
        self._batch = arguments.new_batch(batch)
        self._num_taken = self._num_answered = 0
        self._stopped_by: Exception | None = None
        self._sent: list[list[Submission]] = []
        self._next: list[list[Submission]] | None = None
        """Prepared to be sent."""
        self._accepted: list[str] = []
        self._known_ids: list[str] = []
        """Of the accepted jobs those that were in the queue before."""
        self._conflicting: list[str] = []
        self._invalid: list[tuple[int, InvalidRequest]] = []
        """Refused by the server, with the index of the request."""
        submissions: Iterable[Submission] = self._submissions(arguments.many("requests", requests))
        self._is_one = isinstance(requests, list | tuple) and len(requests) == 1
        if isinstance(requests, list | tuple):
            submissions = list(submissions)
            self._raise_stop_error()
        # One half of a load is prepared while the server works on the other.
        self._loads = command_loads(submissions, 2 if calls_prepare and not self.confirmation else 1)

    def prepare(self) -> None:
        """Take what is to be sent next, if it is not taken yet."""
        if self._next is None:
            self._next = list(islice(self._loads, LOADS_CONFIRMED_TOGETHER if self.confirmation else 1))
            self._commands = [commands.submit(self._keys, load) for load in self._next]

    def next_commands(self) -> list[Command]:
        """Return what to send next. Empty: all is sent."""
        self.prepare()
        self._sent, self._next = self._next or [], None
        return self._commands

    def feed(self, answers: list[Reply], confirmed: Reply = None) -> None:
        """Take the answers to those commands. Raises QueueFull, after which nothing more is to be sent, and NotDurable.
        What is prepared by then counts as refused."""
        outcomes = [outcome for answer in answers for outcome in replies.outcomes(answer)]
        job_ids = [job.job_id for load in self._sent for job in load]
        full: dict[str, Outcome] = {}
        for index, (job_id, outcome) in enumerate(zip(job_ids, outcomes, strict=True), start=self._num_answered):
            if outcome.is_accepted:
                self._accepted.append(job_id)
                if outcome.kind == "exists":
                    self._known_ids.append(job_id)
            elif outcome.kind == "conflict":
                self._conflicting.append(job_id)
            elif outcome.kind == "full":
                full[job_id] = outcome
            elif invalid := refusal(job_id, outcome):
                self._invalid.append((index, invalid))
        self._num_answered += len(job_ids)
        if self.confirmation:
            check_confirmed(self._durability, confirmed, self._accepted)
        if full:
            first = next(iter(full.values()))
            prepared = [job.job_id for load in self._next or [] for job in load]
            raise QueueFull(first.name, first.limit, self._accepted, [*full, *prepared])

    def end(self) -> Call[Submitted]:
        """Return the ids of all jobs, in order. Raises the error of the first request that could not be sent, InvalidRequest
        for a job that the server refused, or JobConflict for ids of other jobs."""
        self._raise_stop_error()
        if self._invalid:
            raise self._located(*self._invalid[0])
        if self._conflicting:
            raise JobConflict(self._conflicting)
        job_ids = Submitted(self._accepted)
        known = yield from look_up(self._keys, self._known_ids)
        job_ids.known = {job_id: job.state for job_id, job in known.items()}
        return job_ids

    def _submissions(self, requests: Iterator[GenerationRequest]) -> Iterator[Submission]:
        """Yield submissions up to a request that cannot be sent, or an error of the caller's generator. Keep that error."""
        try:
            for request in requests:
                if not isinstance(request, GenerationRequest):
                    raise InvalidRequest("requests", f"must be of type GenerationRequest, got {shown(request)}")
                yield to_submission(request, batch=self._batch)
                self._num_taken += 1
        except Exception as error:
            self._stopped_by = error

    def _raise_stop_error(self) -> None:
        if isinstance(self._stopped_by, InvalidRequest):
            raise self._located(self._num_taken, self._stopped_by)
        if self._stopped_by is not None:
            raise self._stopped_by

    def _located(self, index: int, invalid: InvalidRequest) -> InvalidRequest:
        if not self._is_one:
            invalid.index, invalid.job_ids = index, self._accepted
        return invalid
