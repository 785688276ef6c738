"""The client of the verbs that wait: an outage of the server does not end them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from millrace.cli.output import remark
from millrace.producer import Client, InvalidRequest
from millrace.producer.calls import CHANGED_JOBS, READ_JOBS, KnownJob, add_jobs, batched, get_many, look_up, members
from millrace.producer.submitting import command_loads, refused
from millrace.results import commands, replies
from millrace.results.connection import Connection
from millrace.results.durability import Durability, check_confirmed, confirmation
from millrace.results.errors import JobNotFound, QueueError, QueueFull, RedisUnavailable
from millrace.results.job import Job
from millrace.results.messages import Submission
from millrace.results.reader import CompletionFollower
from millrace.results.replies import Outcome
from millrace.results.scripts import Command
from millrace.results.server_errors import is_refusal
from millrace.results.transport import Call, Reply, T, Transport

SUBMITTED_JOBS = 256
"""Jobs that are submitted in one round trip."""
FULL_QUEUE_INTERVAL_S = 1.0
"""Between two attempts to submit to a queue that is full of the jobs of others."""
RETRY_INTERVAL_S = 0.5
"""Between two attempts in an outage, each of which makes the transport's own retries."""


class ReconnectingClient(Client):
    """Continues after an outage, except one that the first call meets. Reports outages on stderr."""

    def _connect(self, url: str | Connection | None) -> Transport:
        self._reconnecting = ReconnectingTransport.to(url)
        return self._reconnecting

    @property
    def has_connected(self) -> bool:
        """Whether a call may have reached the server."""
        return self._reconnecting.has_connected

    def limit_waiting(self, timeout_s: float | None) -> None:
        """Give up an outage, too, when this time is over."""
        if timeout_s is not None:
            self._reconnecting.ends_s = time.monotonic() + timeout_s

    def look_up(self, job_ids: Iterable[str]) -> dict[str, KnownJob]:
        """Return each job that the queue knows, by id."""
        return self._run(look_up(self._keys, job_ids))

    def batch_members(self, batch: str) -> list[str]:
        """Return the ids of a batch's jobs, also of those whose records have expired. Raises BatchNotFound."""
        return self._run(members(self._keys, batch))

    def find(self, job_ids: Iterable[str], limit: int) -> list[Job]:
        """Return the jobs that have a record, in order, up to the limit."""
        jobs: dict[str, Job] = {}
        self._run(add_jobs(self._keys, jobs, job_ids, limit))
        return list(jobs.values())

    def change(self, call: Callable[..., Call[T]], *arguments: object) -> T:
        """Run one of the calls that change many jobs."""
        return self._run(call(self._keys, *arguments))

    def follower(self) -> CompletionFollower:
        """Return a follower of jobs for `ended`."""
        return CompletionFollower(self._keys, [], None, skips_unknown=True)

    def ended(self, follower: CompletionFollower, most_s: float = math.inf) -> Iterator[Job | JobNotFound]:
        """Wait at most `most_s`, or some seconds. Yield the jobs that have ended, and for an unknown one its error."""
        for some in batched(self._run(follower.next_ended(most_s)), READ_JOBS):
            found = self._transport.send_many([commands.get(self._keys, job_id) for job_id in some])
            for job_id, reply in zip(some, found, strict=True):
                queue = self._keys.queue
                yield JobNotFound(job_id, queue) if reply is None else replies.job(job_id, queue, reply)

    def run_all(
        self, jobs: Iterable[Submission], *, max_open: int, check: Callable[[], None]
    ) -> Iterator[tuple[str, Job | InvalidRequest]]:
        """Submit jobs, at most `max_open` at a time. Yield each id with its job when that has ended, or with the error of
        the queue.

        Takes a job only when it can be submitted, so that memory holds `max_open` of them at most. Waits for space in a
        full queue. `check` is called at least every few seconds. If the server refuses a submission, such as one that is
        out of memory, the jobs in the queue are waited for before that is raised.

        A job that was run again ends when its last redrive does. One that was cancelled before this call runs again.
        """
        remaining, waiting = iter(jobs), list[Submission]()
        follower = CompletionFollower(self._keys, [], None)
        first_ids: dict[str, str] = {}  # by the id of the job to follow: the job itself, or its last redrive
        while True:
            is_full = False
            while not is_full and follower.num_missing < max_open:
                waiting = waiting or list(islice(remaining, min(SUBMITTED_JOBS, max_open - follower.num_missing)))
                if not waiting:
                    break
                try:
                    refused_jobs, accepted, waiting = self._submit_some(waiting)
                except RedisUnavailable as error:
                    if follower.is_done or not is_refusal(error):
                        raise
                    break
                yield from refused_jobs
                first_ids |= accepted
                follower.add(list(accepted))
                is_full = bool(waiting)
            check()
            if not follower.is_done:
                for some in batched(self._run(follower.next_ended()), READ_JOBS):
                    for ended_job in self._run(get_many(self._keys, some)):
                        job_id = first_ids.pop(ended_job.id)
                        if ended_job.redriven_as:
                            first_ids[ended_job.redriven_as] = job_id
                            follower.add([ended_job.redriven_as])
                        else:
                            yield job_id, ended_job
            elif is_full:
                time.sleep(FULL_QUEUE_INTERVAL_S)
            else:
                return

    def _submit_some(
        self, jobs: Sequence[Submission]
    ) -> tuple[list[tuple[str, InvalidRequest]], dict[str, str], list[Submission]]:
        """Return the errors of refused jobs; the ids of accepted ones, by the id of the job to follow; and those that a full
        queue has no space for."""
        refused_jobs, accepted, left = list[tuple[str, InvalidRequest]](), dict[str, str](), list[Submission]()
        found: list[str] = []
        for job, end in zip(jobs, self.submit_each(jobs), strict=True):
            if isinstance(end, InvalidRequest):
                refused_jobs.append((job.job_id, end))
            elif isinstance(end, QueueFull):
                left.append(job)
            elif isinstance(end, QueueError):
                raise end
            elif end.kind == "exists":
                found.append(job.job_id)
            else:
                accepted[job.job_id] = job.job_id
        accepted |= {last_id: job_id for job_id, last_id in self._last_redrives(found).items()}
        return refused_jobs, accepted, left

    def _last_redrives(self, job_ids: Sequence[str]) -> dict[str, str]:
        """Return for each job its last redrive, or its own id. Cancelled jobs are run again."""
        last_ids = {job_id: job_id for job_id in job_ids}
        new_ids = last_ids
        while new_ids:
            known = self.look_up(new_ids.values())
            old = [one for one, job in known.items() if job.redriven_as or job.state == "cancelled"]
            redriven: dict[str, str] = {}
            for some in batched(old, CHANGED_JOBS):
                found = self._transport.send_many([commands.redrive(self._keys, one) for one in some])
                redriven |= replies.all_redriven(some, found)
            new_ids = {job_id: redriven[one] for job_id, one in new_ids.items() if one in redriven}
            last_ids |= new_ids
        return last_ids

    def submit_each(
        self, jobs: Sequence[Submission], durability: Durability = "memory"
    ) -> list[Outcome | QueueError | InvalidRequest]:
        """Submit jobs. Return for each one the outcome if the queue has it now, else the error. At a limit nothing more is
        sent. Raises NotDurable."""
        to_send = [commands.submit(self._keys, some) for some in command_loads(jobs)]
        outcomes: list[Outcome] = []
        if to_send and (to_confirm := confirmation(durability)):
            answers, confirmed = self._transport.send_together(to_send, to_confirm)
            outcomes = [outcome for answer in answers for outcome in replies.outcomes(answer)]
            to_send = []
        while to_send and not any(outcome.kind == "full" for outcome in outcomes):
            outcomes += replies.outcomes(self._transport.send(to_send.pop(0)))
        if full := [outcome for outcome in outcomes if outcome.kind == "full"][:1]:
            outcomes += full * (len(jobs) - len(outcomes))
        accepted = [str(job.job_id) for job, outcome in zip(jobs, outcomes, strict=True) if outcome.is_accepted]
        if jobs and durability != "memory":
            check_confirmed(durability, confirmed, accepted)
        return [refused(job, outcome, accepted) or outcome for job, outcome in zip(jobs, outcomes, strict=True)]


class ReconnectingTransport(Transport):
    """Repeats a call until the server answers again. Reports each outage on stderr, when it begins and when it ends.

    Every call may be repeated, so nothing is submitted twice. Until the first reply an outage is an error, as in Transport:
    the URL may be wrong. Not thread-safe.
    """

    ends_s = math.inf
    """On the monotonic clock. From then on, an outage raises RedisUnavailable."""
    _has_answered = False

    def send(self, command: Command, meanwhile: Callable[[], None] | None = None) -> Reply:
        return self._repeat(lambda: super(ReconnectingTransport, self).send(command, meanwhile))

    def send_many(self, commands: Sequence[Command]) -> list[Reply]:
        return self._repeat(lambda: super(ReconnectingTransport, self).send_many(commands))

    def send_together(self, commands: Sequence[Command], last: Command) -> tuple[list[Reply], Reply]:
        return self._repeat(lambda: super(ReconnectingTransport, self).send_together(commands, last))

    def _repeat(self, call: Callable[[], T]) -> T:
        is_reported = False
        while True:
            try:
                result = call()
                break
            except RedisUnavailable as error:
                if not (self._has_answered and error.is_outage) or time.monotonic() >= self.ends_s:
                    raise
                if not is_reported:
                    remark(f"{error} Trying again until the server answers.")
                is_reported = True
                time.sleep(RETRY_INTERVAL_S)
        if is_reported:
            remark(f"Redis at {self._server} answers again.")
        self._has_answered = True
        return result
