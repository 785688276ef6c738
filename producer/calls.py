"""The clients' calls that take several round trips: generators, so that sync and async clients share them.

A generator yields the commands of one round trip, receives their replies, and returns the result of the call.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from millrace.producer import arguments
from millrace.results import commands, replies
from millrace.results.errors import BatchNotFound, JobNotFound
from millrace.results.keys import QueueKeys
from millrace.results.messages import Job
from millrace.results.reader import MAX_ENTRIES, START, Deadline
from millrace.results.scripts import Command
from millrace.results.transport import Reply

T = TypeVar("T")
Call = Generator[list[Command], list[Reply], T]

READ_JOBS = 64
"""Jobs that are read in one round trip: each comes with its whole text."""
CHANGED_JOBS = 500
"""Jobs that are cancelled, or run again, in one round trip."""


def batched(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of at most `size` values."""
    remaining = iter(values)
    while some := list(islice(remaining, size)):
        yield some


def cancel_many(keys: QueueKeys, job_ids: Iterable[str]) -> Call[dict[str, str]]:
    outcomes: dict[str, str] = {}
    for some in batched(arguments.many_ids(job_ids), CHANGED_JOBS):
        outcomes |= dict.fromkeys(some, "unknown")
        possible = list(filter(arguments.is_job_id, some))
        found = yield [commands.cancel(keys, job_id) for job_id in possible]
        outcomes |= {job_id: reply.decode() for job_id, reply in zip(possible, found, strict=True) if reply}
    return outcomes


def cancel_batch(keys: QueueKeys, batch: str) -> Call[dict[str, str]]:
    arguments.batch(keys, batch)
    outcomes: dict[str, str] = {}
    first = 0
    while members := (yield [commands.batch_members(keys, batch, first, CHANGED_JOBS)])[0]:
        outcomes |= yield from cancel_many(keys, replies.decode_list(members))
        first += len(members)
    if not outcomes:
        raise BatchNotFound(batch, keys.queue)
    return outcomes


def retry_all(keys: QueueKeys) -> Call[dict[str, str]]:
    new_ids: dict[str, str] = {}
    made: set[str] = set()
    after = 0
    while failed := replies.decode_list((yield [commands.dead(keys, after, CHANGED_JOBS)])[0]):
        # Without `made`, a job that always fails would be retried for ever.
        old = [job_id for job_id in failed if job_id not in made]
        redriven = replies.all_redriven(old, (yield [commands.redrive(keys, job_id) for job_id in old]))
        new_ids |= redriven
        made.update(redriven.values())
        after += len(failed) - len(redriven)  # the redriven ones have left the list
    return new_ids


def list_jobs(keys: QueueKeys, state: str, limit: int) -> Call[list[Job]]:
    (listed,) = yield [commands.list_jobs(keys, arguments.state(state), arguments.limit(limit))]
    jobs: list[Job] = []
    for some in batched(replies.decode_list(listed), READ_JOBS):
        found = yield [commands.get(keys, job_id) for job_id in some]
        pairs = zip(some, found, strict=True)  # a record may have expired since
        jobs += [replies.job(job_id, keys.queue, reply) for job_id, reply in pairs if reply is not None]
    return jobs


def wait(keys: QueueKeys, job_id: str, timeout_s: float | None) -> Call[Job]:
    stream, deadline = keys.result(job_id), Deadline(timeout_s, f"job {job_id!r} is not done")
    last_id = None  # None: read the job's state before waiting, since the record may have expired
    while True:
        if last_id is None:
            state, entries = yield [commands.state(keys, job_id), commands.last_entry(stream)]
            if state is None:
                raise JobNotFound(job_id, keys.queue)
            last_id = START
        else:
            read = yield [commands.read_stream(stream, last_id, MAX_ENTRIES, deadline.block_ms())]
            state, entries, last_id = None, replies.stream_entries(read[0]), None
        if replies.is_terminal(state) or any(b"state" in fields for _, fields in entries):
            return (yield from get_many(keys, [job_id]))[0]
        if entries:
            last_id = entries[-1][0].decode()


def get_many(keys: QueueKeys, job_ids: list[str]) -> Call[list[Job]]:
    found = yield [commands.get(keys, job_id) for job_id in job_ids]
    return [replies.job(job_id, keys.queue, reply) for job_id, reply in zip(job_ids, found, strict=True)]
