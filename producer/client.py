"""The client: submits jobs and reads their results."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Self, Unpack

from millrace.producer import arguments, calls
from millrace.producer.options import SubmitOptions, build_request
from millrace.producer.request import GenerationRequest
from millrace.producer.submitting import Submitted, Submitting, submitted
from millrace.producer.wire import to_submission
from millrace.results import commands, replies
from millrace.results.connection import Connection
from millrace.results.counts import BatchStatus, Position, QueueStats, RejectedEntry, TenantStats
from millrace.results.durability import Durability
from millrace.results.job import Job, StreamEvent
from millrace.results.reader import CompletionFollower, EventFollower
from millrace.results.transport import Call, T, Transport


class Client:
    """Submits jobs to a queue and reads them. Connects on first use. Several threads may use one Client.

    `url` is any URL that redis-py knows, or redis+cluster://. Without it, the first of these is used: MILLRACE_REDIS_URL,
    the text of the file that MILLRACE_REDIS_URL_FILE names, REDIS_URL, redis://localhost:6379/0. A `redis.Redis` or
    `redis.RedisCluster` can be given instead. It needs a socket_timeout of at least 10 s, and neither decode_responses nor
    protocol 3 (otherwise QueueError); closing the Client leaves it open.

    Every method raises RedisUnavailable when the server cannot be reached or cannot serve the call now, and InvalidRequest
    for an argument of a wrong type. If a server does not answer, the client asks a second time and gives up after 20 s, also
    if `timeout_s` is shorter. A cluster, and a connection of your own, follow redis-py's rules for retries.
    """

    def __init__(self, url: str | Connection | None = None, queue: str = "default") -> None:
        self._keys = arguments.queue_keys(queue)
        self._transport = self._connect(url)

    def _connect(self, url: str | Connection | None) -> Transport:
        return Transport.to(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    # --- submit and change jobs ------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | None = None,
        *,
        batch: str | None = None,
        durability: Durability = "memory",
        **options: Unpack[SubmitOptions],
    ) -> str:
        """Submit one job and return its id.

        `options` are fields of GenerationRequest (`job_id` is its `id`), and fields of SamplingParams or `sampling`. The
        same request under the same `job_id` is the same job, and a failed or cancelled one does not run again: use `retry`.
        With durability "disk" or "replica" the call returns when the server has the job in its append-only file, or on a
        replica.

        Raises InvalidRequest, which names the field; JobConflict if the id belongs to a job whose request has another value
        in any field; QueueFull; NotDurable if the server does not confirm the durability.
        """
        request = build_request(prompt, options)
        if arguments.durability(durability) != "memory":  # to be confirmed
            return self.submit_many([request], batch=batch, durability=durability)[0]
        job = to_submission(request, batch=arguments.new_batch(batch))
        (outcome,) = replies.outcomes(self._transport.send(commands.submit(self._keys, [job])))
        return submitted(job, outcome)

    def submit_many(
        self, requests: Iterable[GenerationRequest], *, batch: str | None = None, durability: Durability = "memory"
    ) -> Submitted:
        """Submit jobs, a few hundred in one round trip, and return their ids in order.

        `batch` is a name for `batch_status` and `cancel_batch`. Any call may add jobs to a batch. A job that the queue
        already knows stays in its first batch. It is not submitted again: `known` of the result has its state.

        Raises InvalidRequest with the index of a request that cannot be sent. Of a list or tuple, no job is submitted then.
        Of another iterable, which may be endless, the jobs before it are in the queue, and the error has their ids. The same
        holds when a generator raises an error of its own. If only the server can refuse a job, because of its clock, all
        others are in the queue.
        Raises JobConflict, after all are sent, for ids of other jobs; QueueFull at a limit, and NotDurable, both with the
        ids that are in the queue. After RedisUnavailable some may be in the queue: submit requests with ids again.
        """
        call = Submitting(self._keys, requests, batch, durability, calls_prepare=True)
        while to_send := call.next_commands():
            if call.confirmation:
                call.feed(*self._transport.send_together(to_send, call.confirmation))
            else:
                call.feed([self._transport.send(command, call.prepare) for command in to_send])
        return self._run(call.end())

    def cancel(self, job_id: str) -> str:
        """Cancel a job. Return "cancelled" if it had not begun, "cancelling" if its engine was notified (if that one is
        dead, the next one ends the job), or the state in which it had ended before. Raises JobNotFound."""
        reply = self._transport.send(commands.cancel(self._keys, arguments.job_id(self._keys, job_id)))
        return replies.cancelled(job_id, self._keys.queue, reply)

    def cancel_many(self, job_ids: Iterable[str]) -> dict[str, str]:
        """Cancel jobs. Return by id what `cancel` returns, and "unknown" for unknown ids."""
        return self._run(calls.change_many(self._keys, commands.cancel, job_ids))

    def cancel_batch(self, batch: str) -> dict[str, str]:
        """Cancel every job of a batch. Return what `cancel_many` returns. Raises BatchNotFound."""
        return self._run(calls.change_batch(self._keys, commands.cancel, batch))

    def cancel_waiting(self) -> dict[str, str]:
        """Cancel every job of the queue that waits, of all tenants; running jobs continue. Return what `cancel_many`
        returns."""
        return self._run(calls.cancel_waiting(self._keys))

    def delete(self, job_id: str) -> None:
        """Delete a job that has ended: its request, its output and its record, which `result_ttl_ms` and `record_ttl_ms`
        would keep for a while. What was counted stays counted. Raises JobNotFound, and QueueError if the job has not ended.
        """
        reply = self._transport.send(commands.delete(self._keys, arguments.job_id(self._keys, job_id)))
        replies.check_deleted(job_id, self._keys.queue, reply)

    def delete_many(self, job_ids: Iterable[str]) -> dict[str, str]:
        """Delete jobs that have ended. Return by id "deleted", "unknown", or the state of a job that stays, since it has not
        ended."""
        return self._run(calls.change_many(self._keys, commands.delete, job_ids))

    def delete_batch(self, batch: str) -> dict[str, str]:
        """Delete the jobs of a batch that have ended. Return what `delete_many` returns. Raises BatchNotFound."""
        return self._run(calls.change_batch(self._keys, commands.delete, batch))

    def retry(self, job_id: str) -> str:
        """Run a failed, expired or cancelled job again. Return the id of the new job, `<id>.r<n>`.

        A second call returns the same id. Raises JobNotFound and CannotRedrive.
        """
        reply = self._transport.send(commands.redrive(self._keys, arguments.job_id(self._keys, job_id)))
        return replies.redriven(job_id, self._keys.queue, reply)

    def retry_all(self) -> calls.Retried:
        """Run each failed job of the queue again, once, but none whose request is invalid, which would fail again.

        Return a dict of the new ids by the old ones; its `left_out` has the ids of the others.
        """
        return self._run(calls.retry_all(self._keys))

    def retry_batch(self, batch: str) -> calls.Retried:
        """Run each failed, expired or cancelled job of a batch again, in the same batch. Return what `retry_all` returns.

        A second call runs no job a second time. Raises BatchNotFound.
        """
        return self._run(calls.retry_batch(self._keys, batch))

    def pause(self) -> None:
        """Stop starting jobs of this queue. Running jobs finish, and new jobs are accepted."""
        self._transport.send(commands.pause(self._keys, True))

    def resume(self) -> None:
        """Start jobs of this queue again."""
        self._transport.send(commands.pause(self._keys, False))

    def settings(self) -> dict[str, str]:
        """Return the settings of the queue that are set, by name; docs/protocol.md has all names and their defaults."""
        return self._run(calls.settings(self._keys))

    def set_settings(self, settings: Mapping[str, float | None]) -> None:
        """Change settings, by name, such as {"max_queued_jobs": 1000, "weight:gold": 2}. None: the default again.
        Raises InvalidRequest for an unknown name or a value out of its range, and then changes nothing."""
        self._run(calls.set_settings(self._keys, settings))

    def sleep(self, level: int = 1, *, engine_id: str | None = None) -> list[str]:
        """Ask one engine, or all that run now, to free its device memory until `wake`. Return the ids of the engines.

        Level 1 keeps the weights in host memory, level 2 drops them. The jobs wait, or other engines continue them, with
        their tokens so far. `stats().sleep_levels` shows which engines sleep. Raises EngineNotFound.
        """
        return self._set_sleep(arguments.sleep_level(level), engine_id)

    def wake(self, *, engine_id: str | None = None) -> list[str]:
        """Ask one engine, or all, to use its device again and continue. Return the engines' ids. Raises EngineNotFound."""
        return self._set_sleep(0, engine_id)

    def reset_prefix_cache(self, *, engine_id: str | None = None) -> list[str]:
        """Ask one engine, or all that run now, to forget the cached blocks of earlier prompts. Running jobs continue.

        Each engine does it before its next step. Return the ids of the engines. Raises EngineNotFound.
        """
        command = commands.reset_cache(self._keys, arguments.engine_id(self._keys, engine_id))
        return replies.signalled_engines(engine_id, self._keys.queue, self._transport.send(command))

    def _set_sleep(self, level: int, engine_id: str | None) -> list[str]:
        command = commands.sleep(self._keys, level, arguments.engine_id(self._keys, engine_id))
        return replies.signalled_engines(engine_id, self._keys.queue, self._transport.send(command))

    # --- read jobs and the queue -----------------------------------------------------------------------------------

    def get(self, job_id: str) -> Job:
        """Return the job as it is now, with its output so far. Raises JobNotFound."""
        return self._run(calls.get(self._keys, job_id))

    def wait(self, job_id: str, timeout_s: float | None = None) -> Job:
        """Return the job when it has ended. Raises JobNotFound, and WaitTimeout after `timeout_s`; the job continues.

        A job that failed, was cancelled or has expired is returned too: see `Job.state` and `Job.error`. Each wait uses a
        connection, so wait for many jobs with `as_completed`.
        """
        return self._run(calls.wait(self._keys, arguments.job_id(self._keys, job_id), arguments.timeout(timeout_s)))

    def stream(
        self, job_id: str, after: str | None = None, timeout_s: float | None = None
    ) -> Generator[StreamEvent, None, None]:
        """Yield the job's events as they come, the terminal event last. `after` is the id of the last event already read.

        The texts join to `Job.text`. Raises JobNotFound, ResultExpired, and WaitTimeout if no event has come for
        `timeout_s`: the job continues, and another call goes on `after` the last event. So a server can send keep-alive
        messages.
        """
        after, timeout_s = arguments.event_id(after), arguments.timeout(timeout_s)
        follower = EventFollower(self._keys, arguments.job_id(self._keys, job_id), after, timeout_s)
        while events := self._run(follower.next_events()):
            yield from events

    def as_completed(self, job_ids: Iterable[str], timeout_s: float | None = None) -> Generator[Job, None, None]:
        """Yield each job once, when it has ended. Raises JobNotFound, and WaitTimeout after `timeout_s`."""
        known = [arguments.job_id(self._keys, job_id) for job_id in arguments.many_ids(job_ids)]
        follower = CompletionFollower(self._keys, known, arguments.timeout(timeout_s))
        while not follower.is_done:
            for some in calls.batched(self._run(follower.next_ended()), calls.READ_JOBS):
                yield from self._run(calls.get_many(self._keys, some))

    def position(self, job_id: str) -> Position:
        """Return how many jobs probably start before this one, and an estimate of when it starts. Raises JobNotFound."""
        reply = self._transport.send(commands.position(self._keys, arguments.job_id(self._keys, job_id)))
        return replies.position(job_id, self._keys.queue, reply)

    def batch_status(self, batch: str) -> BatchStatus:
        """Return the counts of a batch, and an estimate of when it ends. Raises BatchNotFound."""
        reply = self._transport.send(commands.batch_status(self._keys, arguments.batch(self._keys, batch)))
        return replies.batch_status(batch, self._keys.queue, reply)

    def batch_jobs(self, batch: str) -> dict[str, str]:
        """Return the states of a batch's jobs by id, without jobs whose records have expired. Raises BatchNotFound."""
        return self._run(calls.batch_jobs(self._keys, batch))

    def stats(self) -> QueueStats:
        """Return the counts of the queue."""
        return replies.queue_stats(self._transport.send(commands.stats(self._keys)))

    def tenants(self) -> dict[str, TenantStats]:
        """Return what waits of each tenant that has waiting jobs, by its name; those with the most tokens first."""
        return replies.tenants(self._transport.send(commands.waiting(self._keys)))

    def list_jobs(self, state: str, limit: int = 100) -> list[Job]:
        """Return at most `limit` jobs, up to 10,000, in a state: the next to start, those that run, or the last that ended,
        of the last 10,000 jobs that ended. "ended" stands for all states in which jobs end. Failed jobs that were not run
        again come first."""
        return self._run(calls.list_jobs(self._keys, state, limit))

    def list_rejected(self, limit: int = 100) -> list[RejectedEntry]:
        """Return at most `limit` of the last inbox entries that could not become a job. They are kept for 7 days."""
        return self._run(calls.list_rejected(self._keys, limit))

    def _run(self, call: Call[T]) -> T:
        try:
            to_send = next(call)
            while True:
                to_send = call.send(self._transport.send_many(to_send))
        except StopIteration as end:
            result: T = end.value
            return result
