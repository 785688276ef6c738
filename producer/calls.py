"""The clients' calls that are more than one command and its reply, or check their arguments first: generators, so that sync
and async clients share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

import msgspec

from millrace.producer import arguments
from millrace.producer.prompt_start import prompt_start
from millrace.results import commands, replies
from millrace.results.counts import RejectedEntry
from millrace.results.errors import BatchNotFound, JobNotFound
from millrace.results.job import Job
from millrace.results.keys import QueueKeys
from millrace.results.messages import TERMINAL_STATES, WITHOUT_RESULT
from millrace.results.reader import MAX_ENTRIES, START
from millrace.results.scripts import Command
from millrace.results.transport import Call, Reply
from millrace.results.waiting import JobWait

T = TypeVar("T")
Report = Callable[[dict[str, str]], None]
"""Called with the outcomes of some jobs, by id, as soon as they are known."""

READ_JOBS = 64
"""Jobs that are read in one round trip: each comes with its whole text."""
CHANGED_JOBS = 64
"""Jobs that are cancelled, deleted, or run again, in one round trip: the server answers nobody else meanwhile."""
READ_FIELDS = 500
"""Ids, entries, or fields of jobs, that are read in one round trip."""


def batched(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of at most `size` values."""
    remaining = iter(values)
    while some := list(islice(remaining, size)):
        yield some


def no_report(outcomes: dict[str, str]) -> None:
    pass


def change_many(
    keys: QueueKeys,
    change: Callable[[QueueKeys, str], Command],
    job_ids: Iterable[str],
    report: Report = no_report,
) -> Call[dict[str, str]]:
    """Cancel or delete jobs. Return the outcome of each, "unknown" for unknown ids."""
    outcomes: dict[str, str] = {}
    for some in batched(arguments.many_ids(job_ids), CHANGED_JOBS):
        new = dict.fromkeys(some, "unknown")
        possible = list(filter(arguments.is_job_id, some))
        found = yield [change(keys, job_id) for job_id in possible]
        new |= {job_id: reply.decode() for job_id, reply in zip(possible, found, strict=True) if reply}
        report(new)
        outcomes |= new
    return outcomes


def change_batch(keys: QueueKeys, change: Callable[[QueueKeys, str], Command], batch: str) -> Call[dict[str, str]]:
    return (yield from change_many(keys, change, (yield from members(keys, batch))))


def cancel_waiting(keys: QueueKeys, report: Report = no_report) -> Call[dict[str, str]]:
    outcomes: dict[str, str] = {}
    for state in ("delayed", "queued"):  # in this order, since a delayed job may become due meanwhile
        while True:
            listed = replies.decode_list((yield [commands.list_jobs(keys, state, READ_FIELDS)])[0])
            new = [job_id for job_id in listed if job_id not in outcomes]
            if not new:
                break
            outcomes |= yield from change_many(keys, commands.cancel, new, report)
    return outcomes


def members(keys: QueueKeys, batch: str) -> Call[list[str]]:
    """Return the ids of a batch's jobs, also of those whose records have expired. Raises BatchNotFound."""
    arguments.batch(keys, batch)
    job_ids: list[str] = []
    while found := (yield [commands.batch_members(keys, batch, len(job_ids), READ_FIELDS)])[0]:
        job_ids += replies.decode_list(found)
    if not job_ids:
        raise BatchNotFound(batch, keys.queue)
    return list(dict.fromkeys(job_ids))  # one that was deleted and submitted again is there twice


class KnownJob(NamedTuple):
    """A job that the queue has had before."""

    state: str
    batch: str | None
    redriven_as: str | None
    error_kind: str | None


def look_up(keys: QueueKeys, job_ids: Iterable[str]) -> Call[dict[str, KnownJob]]:
    """Return each job that the queue knows, by id."""
    found: dict[str, KnownJob] = {}
    for some in batched(job_ids, READ_FIELDS):
        for job_id, fields in zip(some, (yield [commands.look_up(keys, one) for one in some]), strict=True):
            state, *others = (replies.text(field) if field else None for field in fields)
            if state:
                found[job_id] = KnownJob(state, *others)
    return found


def settings(keys: QueueKeys) -> Call[dict[str, str]]:
    (found,) = yield [commands.settings(keys)]
    return {replies.text(name): replies.text(value) for name, value in sorted(found.items()) if name != b"paused"}


def set_settings(keys: QueueKeys, values: Mapping[str, float | None]) -> Call[None]:
    given = arguments.settings(values)
    changed = {name: value for name, value in given.items() if value is not None}
    reset = given.keys() - changed.keys()
    sent = [commands.set_settings(keys, changed)] if changed else []
    if found := sent + ([commands.reset_settings(keys, sorted(reset))] if reset else []):
        yield found


def batch_jobs(keys: QueueKeys, batch: str) -> Call[dict[str, str]]:
    state_by_id: dict[str, str] = {}
    for ids in batched((yield from members(keys, batch)), READ_FIELDS):
        states = yield [commands.state(keys, job_id) for job_id in ids]
        state_by_id |= {job_id: replies.text(state) for job_id, state in zip(ids, states, strict=True) if state}
    return state_by_id


class Retried(dict[str, str]):
    """The new ids of jobs that run again, by the old ones."""

    def __init__(self) -> None:
        self.left_out: list[str] = []
        """Failed jobs whose requests are invalid: they would fail again."""


def retry_all(keys: QueueKeys, report: Report = no_report) -> Call[Retried]:
    new_ids = Retried()
    made: set[str] = set()
    after = 0
    while failed := replies.decode_list((yield [commands.dead(keys, after, READ_FIELDS)])[0]):
        # Without `made`, a job that always fails would be retried for ever.
        old = [job_id for job_id in failed if job_id not in made]
        redriven = yield from _retry_valid(keys, old, new_ids, report)
        made.update(redriven.values())
        after += len(failed) - len(redriven)  # the redriven ones have left the list
    return new_ids


def retry_batch(keys: QueueKeys, batch: str, report: Report = no_report) -> Call[Retried]:
    new_ids = Retried()
    state_by_id = yield from batch_jobs(keys, batch)
    without_result = [job_id for job_id, state in state_by_id.items() if state in WITHOUT_RESULT]
    for some in batched(without_result, READ_FIELDS):
        yield from _retry_valid(keys, some, new_ids, report)
    return new_ids


def _retry_valid(keys: QueueKeys, old: Sequence[str], new_ids: Retried, report: Report) -> Call[dict[str, str]]:
    """Run these jobs again, except those whose requests are invalid. Add them to `new_ids`, and return what was added."""
    known = yield from look_up(keys, old)
    invalid = {job_id for job_id, job in known.items() if job.error_kind == "invalid_request"}
    new_ids.left_out += invalid
    valid = [job_id for job_id in old if job_id not in invalid]
    redriven: dict[str, str] = {}
    for some in batched(valid, CHANGED_JOBS):
        new = replies.all_redriven(some, (yield [commands.redrive(keys, job_id) for job_id in some]))
        report(new)
        redriven |= new
    new_ids |= redriven
    return redriven


def list_jobs(keys: QueueKeys, state: str, limit: int) -> Call[list[Job]]:
    state, limit = arguments.state(state), arguments.limit(limit)
    jobs: dict[str, Job] = {}
    if state not in (arguments.ENDED, *TERMINAL_STATES):
        (listed,) = yield [commands.list_jobs(keys, state, limit)]
        yield from add_jobs(keys, jobs, replies.decode_list(listed), limit)
        return list(jobs.values())
    if state in (arguments.ENDED, "failed"):  # `dead` reaches further back than `done`, but has no redriven jobs
        (dead,) = yield [commands.last_dead(keys, limit)]
        yield from add_jobs(keys, jobs, replies.decode_list(dead), limit)
    num_read, end = 0, "+"
    while len(jobs) < limit and num_read < arguments.MAX_LISTED:
        (entries,) = yield [commands.last_entries(keys.done, READ_FIELDS, end)]
        if not entries:
            break
        num_read, end = num_read + len(entries), "(" + entries[-1][0].decode()
        ends = [(replies.text(fields[b"id"]), replies.text(fields[b"state"])) for _, fields in entries]
        ids = [job_id for job_id, ended_as in ends if state in (arguments.ENDED, ended_as)]
        yield from add_jobs(keys, jobs, ids, limit)
    return list(jobs.values())


def add_jobs(keys: QueueKeys, jobs: dict[str, Job], job_ids: Iterable[str], limit: int) -> Call[None]:
    """Add the jobs that have a record, up to the limit."""
    new = (job_id for job_id in dict.fromkeys(job_ids) if job_id not in jobs)
    while some := list(islice(new, min(READ_JOBS, limit - len(jobs)))):
        found = yield _get_with_prompts(keys, some)
        for job_id, reply, body in zip(some, found[::2], found[1::2], strict=True):
            if reply is not None:
                jobs[job_id] = _with_prompt(keys, job_id, reply, body)


def list_rejected(keys: QueueKeys, limit: int) -> Call[list[RejectedEntry]]:
    (reply,) = yield [commands.last_entries(keys.rejected, arguments.limit(limit))]
    return replies.rejected_entries(reply)


def get(keys: QueueKeys, job_id: str) -> Call[Job]:
    reply, body = yield _get_with_prompts(keys, [arguments.job_id(keys, job_id)])
    return _with_prompt(keys, job_id, reply, body)


def _get_with_prompts(keys: QueueKeys, job_ids: list[str]) -> list[Command]:
    return [one(keys, job_id) for job_id in job_ids for one in (commands.get, commands.body_start)]


def _with_prompt(keys: QueueKeys, job_id: str, reply: Reply, body: bytes) -> Job:
    return msgspec.structs.replace(replies.job(job_id, keys.queue, reply), prompt=prompt_start(body))


def wait(keys: QueueKeys, job_id: str, timeout_s: float | None) -> Call[Job]:
    stream, job_wait = keys.result(job_id), JobWait(keys, job_id, timeout_s)
    last_id = None  # None: read the job's state before waiting, since the record may have expired
    look: list[Command] = []  # after a wait: why the job has not ended
    while True:
        if last_id is None:
            state, entries, *stats = yield [commands.state(keys, job_id), commands.last_entry(stream), *look]
            if state is None:
                raise JobNotFound(job_id, keys.queue)
            if stats:
                job_wait.note(replies.text(state), replies.queue_stats(stats[0]))
            last_id = START
        elif block_ms := job_wait.block_ms():
            read = yield [commands.read_stream(stream, last_id, MAX_ENTRIES, block_ms)]
            state, entries, last_id = None, replies.stream_entries(read[0]), None
            look = [commands.stats(keys)] if job_wait.block_ms() else []
        else:
            raise (yield from job_wait.job_error(f"job {job_id!r} has not ended"))
        if replies.is_terminal(state) or any(b"state" in fields for _, fields in entries):
            return (yield from get_many(keys, [job_id]))[0]
        if entries:
            last_id = entries[-1][0].decode()


def get_many(keys: QueueKeys, job_ids: list[str]) -> Call[list[Job]]:
    found = yield [commands.get(keys, job_id) for job_id in job_ids]
    return [replies.job(job_id, keys.queue, reply) for job_id, reply in zip(job_ids, found, strict=True)]
