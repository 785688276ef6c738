"""The client of the verbs that wait: an outage of the server does not end them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from millrace.cli.output import remark
from millrace.producer import Client, GenerationRequest, InvalidRequest
from millrace.producer.calls import READ_JOBS, batched, get_many, look_up
from millrace.results.connection import Connection
from millrace.results.errors import QueueFull
from millrace.results.messages import Job
from millrace.results.reader import CompletionFollower
from millrace.results.reconnect import ReconnectingTransport
from millrace.results.transport import Transport

SUBMITTED_JOBS = 256
"""Jobs that are submitted in one round trip."""
FULL_QUEUE_INTERVAL_S = 1.0
"""Between two attempts to submit to a queue that is full of the jobs of others."""


class ReconnectingClient(Client):
    """Continues after an outage, except one that the first call meets. Reports outages on stderr."""

    def _connect(self, url: str | Connection | None) -> Transport:
        self._reconnecting = ReconnectingTransport.to(url)
        self._reconnecting.report = remark
        return self._reconnecting

    def limit_waiting(self, timeout_s: float | None) -> None:
        """Give up an outage, too, when this time is over."""
        if timeout_s is not None:
            self._reconnecting.ends_s = time.monotonic() + timeout_s

    def look_up(self, job_ids: Iterable[str]) -> dict[str, tuple[str, str | None]]:
        """Return the state and the batch of each job that the queue knows, by id."""
        return self._run(look_up(self._keys, job_ids))

    def run_all(
        self, requests: Iterable[GenerationRequest], *, batch: str, max_open: int, check: Callable[[], None]
    ) -> Iterator[tuple[str, Job | InvalidRequest]]:
        """Submit requests with ids, at most `max_open` at a time. Yield each id with its job when that has ended, or with
        the error of the queue.

        Takes a request only when it can be submitted, so that memory holds `max_open` of them at most. Waits for space in a
        full queue. `check` is called at least every few seconds.
        """
        remaining, waiting = iter(requests), list[GenerationRequest]()
        follower = CompletionFollower(self._keys, [], None)
        while True:
            is_full = False
            while not is_full and follower.num_missing < max_open:
                waiting = waiting or list(islice(remaining, min(SUBMITTED_JOBS, max_open - follower.num_missing)))
                if not waiting:
                    break
                accepted, refused = self._submit_some(waiting, batch)
                follower.add(accepted)
                yield from refused.items()
                known = {*accepted, *refused}
                waiting = [request for request in waiting if request.id not in known]
                is_full = bool(waiting)
            check()
            if not follower.is_done:
                ended = follower.feed(self._transport.send_many(follower.next_commands()))
                for some in batched(ended, READ_JOBS):
                    yield from ((job.id, job) for job in self._run(get_many(self._keys, some)))
            elif is_full:
                time.sleep(FULL_QUEUE_INTERVAL_S)
            else:
                return

    def _submit_some(
        self, requests: list[GenerationRequest], batch: str
    ) -> tuple[list[str], dict[str, Job | InvalidRequest]]:
        """Return the ids that the queue has now, and the errors of those that it refuses. It may be full for the others."""
        try:
            return self.submit_many(requests, batch=batch), {}
        except QueueFull as error:
            return error.job_ids, {}
        except InvalidRequest as error:
            if len(requests) == 1:
                return [], {str(requests[0].id): error}
            accepted, refused = list(error.job_ids), dict[str, Job | InvalidRequest]()
        for request in requests:  # one by one: the error names the first only
            if request.id not in accepted:
                more_accepted, more_refused = self._submit_some([request], batch)
                accepted += more_accepted
                refused |= more_refused
        return accepted, refused
