"""The gateway's client of the Millrace queue: it submits jobs and reads their ends, many in one round trip."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import redis

from millrace.producer.arguments import queue_keys
from millrace.producer.submitting import command_loads
from millrace.results import commands, replies
from millrace.results.errors import JobNotFound, QueueError
from millrace.results.job import Job
from millrace.results.messages import Submission
from millrace.results.queue import JobQueue
from millrace.results.replies import Outcome
from millrace.results.transport import Transport
from millrace.results.waiting import describe_obstacle

logger = logging.getLogger("millrace.gateway")

_BLOCK_MS = 1000
_FEED_ENTRIES = 1000


class MillraceJobs:
    """Owns the position up to which the queue's feed of completions has been read."""

    def __init__(self, client: redis.Redis, blocking_client: redis.Redis, queue: str) -> None:
        self._keys = queue_keys(queue)
        self._queue = JobQueue(client, queue)
        self._transport = Transport(client)
        self._feed = Transport(blocking_client)
        self._after = "0"
        self._is_checked = False
        """Whether the queue was looked at for an engine that has ever served it."""

    def check_server(self) -> list[str]:
        """Return warnings about the server. Raises ServerUnsuitable when it would lose jobs."""
        return self._queue.check_server()

    def submit(self, submissions: Sequence[Submission]) -> list[Outcome]:
        """Return for each job what `JobQueue.submit` returns."""
        return [outcome for load in command_loads(submissions) for outcome in self._queue.submit(load)]

    def warn_if_never_served(self) -> None:
        """Log, at the first call, a queue that no engine has ever served, since its name may be mistyped."""
        if self._is_checked:
            return
        with suppress(QueueError, redis.RedisError):  # the next call tries again
            stats = self._queue.stats()
            self._is_checked = True
            if stats.obstacle == "never_served":
                logger.warning("%s", describe_obstacle(stats, self._keys.queue))

    def states(self, millrace_ids: Sequence[str]) -> list[str | None]:
        """Return the states of jobs; None for a job that is not known."""
        found = self._transport.send_many([commands.state(self._keys, millrace_id) for millrace_id in millrace_ids])
        return [state.decode() if state is not None else None for state in found]

    def get(self, millrace_ids: Sequence[str]) -> list[Job | None]:
        """Return jobs; None for a job that is not known."""
        found = self._transport.send_many([commands.get(self._keys, millrace_id) for millrace_id in millrace_ids])
        pairs = zip(millrace_ids, found, strict=True)
        return [replies.job(id_, self._keys.queue, reply) if reply else None for id_, reply in pairs]

    def cancel(self, millrace_id: str) -> None:
        with suppress(JobNotFound):  # not submitted yet, or its record has expired
            self._queue.cancel(millrace_id)

    def start_following(self) -> None:
        """Make `next_ended` return every job that ends from now on."""
        last = self._transport.send(commands.last_entry(self._keys.done))
        self._after = last[0][0].decode() if last else "0"

    def next_ended(self) -> list[str]:
        """Return the ids of jobs that have ended, also those of other producers; wait for a second at most."""
        reply = self._feed.send(commands.read_stream(self._keys.done, self._after, _FEED_ENTRIES, _BLOCK_MS))
        entries = replies.stream_entries(reply)
        if entries:
            self._after = entries[-1][0].decode()
        return [fields[b"id"].decode() for _, fields in entries]
