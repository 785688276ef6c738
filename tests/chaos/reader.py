"""A reader that follows its job during the faults, as a user's program does."""

from __future__ import annotations

import itertools
import threading
import time

from millrace import Client, Job, RedisUnavailable
from millrace.results.job import StreamEvent
from tests.chaos.processes import LIMIT_S


class LiveReader:
    """Owns a thread that follows one job to its end, and the events that it got.

    After an error it resumes after the last event; with `hangs_up_after` it also stops and resumes after every N events.
    """

    def __init__(self, url: str, queue: str, job_id: str, hangs_up_after: int | None = None) -> None:
        self.job_id = job_id
        self.num_resumed = 0
        """How often it resumed after an event."""
        self._url = url
        self._queue = queue
        self._hangs_up_after = hangs_up_after
        self._events: list[StreamEvent] = []
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reader of {job_id}", daemon=True)
        self._thread.start()

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens so far."""
        return sum(len(event.token_ids) for event in self._events)

    def check(self, job: Job) -> None:
        """Wait for the end. Check that each token came once, in order, and that all join to the result."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), f"a reader of {self.job_id} still waits, with {self.num_tokens} tokens"
        counts = [len(event.token_ids) for event in self._events]
        ends = itertools.accumulate(counts, initial=0)
        assert [event.offset for event in self._events] == list(ends)[:-1], f"{self.job_id}: gap or overlap"
        assert "".join(event.text for event in self._events) == job.text
        assert [token for event in self._events for token in event.token_ids] == job.token_ids
        assert [event.state for event in self._events if event.state is not None] == [job.state]

    def close(self) -> None:
        """Stop reading."""
        self._is_closed.set()

    def _run(self) -> None:
        with Client(self._url, queue=self._queue) as client:
            while not self._is_closed.is_set() and not self._has_ended():
                try:
                    self._read(client)
                except RedisUnavailable:
                    time.sleep(0.05)

    def _read(self, client: Client) -> None:
        after = self._events[-1].id if self._events else None
        self.num_resumed += after is not None
        for event in itertools.islice(client.stream(self.job_id, after), self._hangs_up_after):
            self._events.append(event)

    def _has_ended(self) -> bool:
        return bool(self._events) and self._events[-1].state is not None
