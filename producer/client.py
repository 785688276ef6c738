"""The client: submit jobs, and read what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Unpack

from millrace.producer.batches import SubmitCall, submitted
from millrace.producer.lookups import (
    CANCEL_BATCH,
    READ_BATCH,
    at_most,
    batched,
    is_job_id,
    many_ids,
    new_batch,
    one_batch,
    one_engine,
    one_event,
    one_job,
    one_state,
    patience,
    queue_keys,
    sleep_level,
)
from millrace.producer.options import SubmitOptions, build_request
from millrace.producer.request import GenerationRequest
from millrace.producer.wire import to_submission
from millrace.results import commands, replies
from millrace.results.connection import Connection
from millrace.results.durability import Durability
from millrace.results.errors import BatchNotFound
from millrace.results.messages import BatchStatus, Job, Position, QueueStats, StreamEvent
from millrace.results.reader import CompletionFollower, EndFollower, EventFollower
from millrace.results.transport import Transport


class Client:
    """A queue as a producer sees it. Connects on first use; may be used by several threads.

    `url` is any that redis-py knows, and redis+cluster://; without it MILLRACE_REDIS_URL, then REDIS_URL, then
    redis://localhost:6379/0 count. It may be a `redis.Redis` or `redis.RedisCluster` instead, with a socket_timeout of at
    least 10 s, without decode_responses and protocol 3 (else QueueError says so); closing the Client leaves it open.
    Every method raises RedisUnavailable when the server cannot be reached, or cannot do it now, and InvalidRequest for an
    argument of a kind that it does not take. A server at a URL that does not answer is asked twice and given up after 20 s,
    also when a `timeout_s` is shorter; a cluster, and a client that was there already, try as often as redis-py does.
    """

    def __init__(self, url: str | Connection | None = None, queue: str = "default") -> None:
        self._keys = queue_keys(queue)
        self._transport = Transport.to(url)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    # --- jobs in ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | None = None,
        *,
        batch: str | None = None,
        durability: Durability = "memory",
        **options: Unpack[SubmitOptions],
    ) -> str:
        """Queue one generation and return its id. `options` are fields of GenerationRequest, `job_id` for its id, and of
        SamplingParams, or `sampling` as a whole.

        The same request under the same `job_id` again is the same job. Raises InvalidRequest with the field at fault,
        JobConflict when the id belongs to another job, and QueueFull. With durability "disk" or "replica" it returns when
        the server has the job in its append-only file, or on a replica; otherwise it raises NotDurable.
        """
        request = build_request(prompt, options)
        if durability != "memory":  # to be confirmed
            return self.submit_many([request], batch=batch, durability=durability)[0]
        job = to_submission(request, batch=new_batch(batch))
        (outcome,) = replies.words(self._transport.send(commands.submit(self._keys, [job])))
        return submitted(job, outcome)

    def submit_many(
        self, requests: Iterable[GenerationRequest], *, batch: str | None = None, durability: Durability = "memory"
    ) -> list[str]:
        """Queue many, a few hundred at a time, and return their ids in order.

        `batch` names them all, for `batch_status` and `cancel_batch`; a batch may be added to at any time, by anybody, so
        two calls with one name share it. A job that the queue knows already stays in the batch that it came with.
        Raises InvalidRequest with the index of a request that cannot be sent: of a list or tuple nothing is submitted
        then; of another iterable, which may be endless, what comes before it, and the error has those ids. So it is too
        when a generator raises an error of its own. Where only the server can tell, by its clock, all others are in the
        queue. Raises JobConflict, when all have been sent, for ids that belong to other jobs; QueueFull at a limit, with
        what is in the queue; NotDurable, with the same, when the server does not confirm what `durability` asks for.
        After RedisUnavailable some may be in the queue: requests with ids can be submitted again.
        """
        call = SubmitCall(self._keys, requests, batch, durability)
        while to_send := call.next_commands():
            if call.confirmation:
                call.feed(*self._transport.send_together(to_send, call.confirmation))
            else:
                call.feed([self._transport.send(command) for command in to_send])
        return call.end()

    def cancel(self, job_id: str) -> str:
        """Ask for a job's end: "cancelled" when it had not begun, "cancelling" when its engine has been told, else the
        state that it had ended in. Raises JobNotFound."""
        reply = self._transport.send(commands.cancel(self._keys, one_job(self._keys, job_id)))
        return replies.cancelled(job_id, self._keys.queue, reply)

    def cancel_many(self, job_ids: Iterable[str]) -> dict[str, str]:
        """By id, what `cancel` returns, and "unknown" for an id that the queue does not know."""
        outcomes: dict[str, str] = {}
        for some in batched(job_ids, CANCEL_BATCH):
            outcomes |= dict.fromkeys(some, "unknown")
            to_ask = list(filter(is_job_id, some))
            found = self._transport.send_many([commands.cancel(self._keys, job_id) for job_id in to_ask])
            outcomes |= {job_id: reply.decode() for job_id, reply in zip(to_ask, found, strict=True) if reply}
        return outcomes

    def cancel_batch(self, batch: str) -> dict[str, str]:
        """Cancel every job of a batch; returns what `cancel_many` does. Raises BatchNotFound."""
        outcomes: dict[str, str] = {}
        one_batch(self._keys, batch)
        first = 0
        while members := self._transport.send(commands.batch_members(self._keys, batch, first, CANCEL_BATCH)):
            outcomes |= self.cancel_many(replies.words(members))
            first += len(members)
        if not outcomes:
            raise BatchNotFound(batch, self._keys.queue)
        return outcomes

    def retry(self, job_id: str) -> str:
        """Run a job again that has failed, expired or been cancelled; returns the id of the new one, `<id>.r<n>`.

        Calling it twice is calling it once. Raises JobNotFound and CannotRedrive.
        """
        reply = self._transport.send(commands.redrive(self._keys, one_job(self._keys, job_id)))
        return replies.redriven(job_id, self._keys.queue, reply)

    def retry_all(self) -> dict[str, str]:
        """Run every failed job again that is still known, once; returns the new ids by the old ones."""
        new_ids: dict[str, str] = {}
        made: set[str] = set()
        after = 0
        while failed := replies.words(self._transport.send(commands.dead(self._keys, after, CANCEL_BATCH))):
            fresh = [job_id for job_id in failed if job_id not in made]  # else what fails again would go round for ever
            found = self._transport.send_many([commands.redrive(self._keys, job_id) for job_id in fresh])
            redriven = replies.all_redriven(fresh, found)
            new_ids |= redriven
            made.update(redriven.values())
            after += len(failed) - len(redriven)  # those have left the list
        return new_ids

    def pause(self) -> None:
        """Let engines claim nothing more from this queue; what runs goes on, and jobs still come in."""
        self._transport.send(commands.pause(self._keys, True))

    def resume(self) -> None:
        """Let engines claim again."""
        self._transport.send(commands.pause(self._keys, False))

    def sleep(self, level: int = 1, *, engine_id: str | None = None) -> list[str]:
        """Have one engine, or all that run now, give their devices back until `wake`; returns who was told.

        Level 1 keeps the weights in host memory, level 2 drops them. The jobs wait, or go to other engines, with their
        tokens so far. `stats().sleep_levels` shows who sleeps. Raises EngineNotFound.
        """
        return self._tell_engines(sleep_level(level), engine_id)

    def wake(self, *, engine_id: str | None = None) -> list[str]:
        """Have one engine, or all, take their devices back and claim again; returns who was told. Raises EngineNotFound."""
        return self._tell_engines(0, engine_id)

    def _tell_engines(self, level: int, engine_id: str | None) -> list[str]:
        to_tell = one_engine(self._keys, engine_id)
        reply = self._transport.send(commands.sleep(self._keys, level, to_tell))
        return replies.engines_told(engine_id, self._keys.queue, reply)

    # --- results out -----------------------------------------------------------------------------------------------

    def get(self, job_id: str) -> Job:
        """The job as it is now, with what it has shown so far. Raises JobNotFound."""
        return self._get_many([one_job(self._keys, job_id)])[0]

    def wait(self, job_id: str, timeout_s: float | None = None) -> Job:
        """The job when it is done. Raises JobNotFound, and WaitTimeout after `timeout_s`; the job then goes on."""
        follower = EndFollower(self._keys, one_job(self._keys, job_id), patience(timeout_s))
        while not follower.is_done:
            follower.feed(self._transport.send_many(follower.next_commands()))
        return self.get(job_id)

    def stream(self, job_id: str, after: str | None = None) -> Iterator[StreamEvent]:
        """The job's events as they come, ending after the terminal one. `after` is the id of an event to go on from.

        The texts join to `Job.text`. Raises JobNotFound and ResultExpired.
        """
        follower = EventFollower(self._keys, one_job(self._keys, job_id), one_event(after))
        while not follower.is_done:
            yield from follower.feed(self._transport.send_many(follower.next_commands()))

    def as_completed(self, job_ids: Iterable[str], timeout_s: float | None = None) -> Iterator[Job]:
        """Each of the jobs once, as it ends. Raises JobNotFound, and WaitTimeout after `timeout_s`."""
        known = [one_job(self._keys, job_id) for job_id in many_ids(job_ids)]
        follower = CompletionFollower(self._keys, known, patience(timeout_s))
        while not follower.is_done:
            ended = follower.feed(self._transport.send_many(follower.next_commands()))
            for first in range(0, len(ended), READ_BATCH):
                yield from self._get_many(ended[first : first + READ_BATCH])

    def position(self, job_id: str) -> Position:
        """How many jobs are likely to begin before this one, and when it begins. Raises JobNotFound."""
        reply = self._transport.send(commands.position(self._keys, one_job(self._keys, job_id)))
        return replies.position(job_id, self._keys.queue, reply)

    def batch_status(self, batch: str) -> BatchStatus:
        """The counts of a batch, and when it ends. Raises BatchNotFound."""
        reply = self._transport.send(commands.batch_status(self._keys, one_batch(self._keys, batch)))
        return replies.batch_status(batch, self._keys.queue, reply)

    def stats(self) -> QueueStats:
        """Counts of the queue."""
        return replies.queue_stats(self._transport.send(commands.stats(self._keys)))

    def list_jobs(self, state: str, limit: int = 100) -> list[Job]:
        """Some jobs in a state, at most `limit`: the next in line, those that run, or those that ended last; of the failed
        ones first those that were not run again. Raises InvalidRequest."""
        listed = self._transport.send(commands.list_jobs(self._keys, one_state(state), at_most(limit)))
        jobs: list[Job] = []
        for some in batched(replies.words(listed), READ_BATCH):
            found = self._transport.send_many([commands.get(self._keys, job_id) for job_id in some])
            jobs += replies.known_jobs(some, self._keys.queue, found)
        return jobs

    def _get_many(self, job_ids: list[str]) -> list[Job]:
        found = self._transport.send_many([commands.get(self._keys, job_id) for job_id in job_ids])
        return [replies.job(job_id, self._keys.queue, reply) for job_id, reply in zip(job_ids, found, strict=True)]
