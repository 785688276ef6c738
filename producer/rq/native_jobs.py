"""Millrace's side of the gateway: jobs go in, their ends come out; many in one round trip, none with a poll of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import redis

from millrace.producer.arguments import queue_keys
from millrace.producer.batches import batches
from millrace.results import commands, replies
from millrace.results.errors import JobNotFound
from millrace.results.messages import TERMINAL_STATES, Job, Submission
from millrace.results.queue import JobQueue
from millrace.results.transport import Transport

_BLOCK_MS = 1000
_FEED_ENTRIES = 1000


class NativeJobs:
    """Owns the place in the queue's feed of completions up to which it has been read."""

    def __init__(self, client: redis.Redis, blocking_client: redis.Redis, queue: str) -> None:
        self._keys = queue_keys(queue)
        self._queue = JobQueue(client, queue)
        self._transport = Transport(client)
        self._feed = Transport(blocking_client)
        self._after = "0"

    def check_server(self) -> list[str]:
        """Warnings about the server. Raises ServerUnsuitable when it would lose jobs."""
        return self._queue.check_server()

    def submit(self, submissions: Sequence[Submission]) -> list[str]:
        """For each job what `JobQueue.submit` says."""
        return [outcome for batch in batches(submissions) for outcome in self._queue.submit(batch)]

    def states(self, native_ids: Sequence[str]) -> list[str | None]:
        """None for a job that is not known."""
        found = self._transport.send_many([commands.state(self._keys, native_id) for native_id in native_ids])
        return [state.decode() if state is not None else None for state in found]

    def get(self, native_ids: Sequence[str]) -> list[Job | None]:
        """None for a job that is not known."""
        found = self._transport.send_many([commands.get(self._keys, native_id) for native_id in native_ids])
        pairs = zip(native_ids, found, strict=True)
        return [replies.job(id_, self._keys.queue, reply) if reply else None for id_, reply in pairs]

    def cancel(self, native_id: str) -> None:
        with suppress(JobNotFound):  # not submitted yet, or long over
            self._queue.cancel(native_id)

    def start_following(self) -> None:
        """From here on `next_ended` tells every end."""
        last = self._transport.send(commands.last_entry(self._keys.done))
        self._after = last[0][0].decode() if last else "0"

    def next_ended(self) -> list[str]:
        """The ids of jobs that have ended, of this gateway and others; empty after a second without."""
        reply = self._feed.send(commands.read_stream(self._keys.done, self._after, _FEED_ENTRIES, _BLOCK_MS))
        entries = replies.stream_entries(reply)
        if entries:
            self._after = entries[-1][0].decode()
        return [fields[b"id"].decode() for _, fields in entries]


def is_over(state: str | None) -> bool:
    return state in TERMINAL_STATES
