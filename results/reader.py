"""Followers of jobs, whose methods are generators as in `transport.Call`: sync and async clients share them."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from millrace.results import commands, replies
from millrace.results.errors import JobNotFound, QueueError, ResultExpired
from millrace.results.job import StreamEvent
from millrace.results.keys import QueueKeys
from millrace.results.transport import Call, Reply
from millrace.results.waiting import Deadline, JobWait, describe_obstacle

START = "0-0"
WATCH_REFRESH_S = 10.0
REREAD_INTERVAL_S = 30.0
MAX_ENTRIES = 500
MAX_STATES = 1000


class _Read(NamedTuple):
    """How much of a candidate's output was read: tokens, characters and calls."""

    num_tokens: int = 0
    num_chars: int = 0
    num_content: int = 0
    num_reasoning: int = 0
    num_calls: int = 0

    def with_event(self, event: StreamEvent) -> _Read:
        return _Read(
            self.num_tokens + len(event.token_ids),
            self.num_chars + len(event.text),
            self.num_content + len(event.content or ""),
            self.num_reasoning + len(event.reasoning or ""),
            self.num_calls + len(event.tool_calls),
        )


class EventFollower:
    """Follows one job's events from the beginning, or from after an event, to the terminal one.

    A long stream loses its oldest entries. A reader that has read from the beginning gets what it missed as one event; one
    that resumes after a trimmed entry gets all output from the start, in an event with `is_restart`.
    """

    def __init__(self, keys: QueueKeys, job_id: str, after: str | None, timeout_s: float | None = None) -> None:
        """`after` is the id of an event, which the caller has checked; None or "": from the beginning."""
        self._keys = keys
        self._job_id = job_id
        self._last_id = after or START
        self._wait = JobWait(keys, job_id, timeout_s)
        self._num_tokens: int | None = None if after else 0  # of all candidates, read so far; None: unknown
        self._read: dict[int, _Read] | None = None if after else {}
        """What was read, by candidate. None: unknown, after a resumption."""
        self._is_trimmed = False  # entries that were not read are trimmed
        self._has_ended = False  # the job has; entries may be left to read
        self._is_done = False
        self._watch_again_s = 0.0

    def next_events(self) -> Call[list[StreamEvent]]:
        """Return the next events as soon as there are some; none after the terminal one. Raises JobNotFound, ResultExpired,
        and WaitTimeout if none has come in time."""
        self._wait.restart()
        events: list[StreamEvent] = []
        try:
            while not events and not self._is_done:
                events = yield from self._look()
        except replies.CORRUPT as error:
            raise replies.corrupt(self._job_id, self._keys.queue, error) from error
        return events

    def _look(self) -> Call[list[StreamEvent]]:
        watch = commands.watch(self._keys, self._job_id)
        if not self._has_ended and time.monotonic() >= self._watch_again_s:
            self._take_watch((yield [watch])[0])
        if self._is_trimmed:
            return self._trimmed_events((yield [commands.trimmed(self._keys, self._job_id)])[0])

        stream = self._keys.result(self._job_id)
        block_ms = None if self._has_ended else self._wait.block_ms() or None
        found = yield [commands.read_stream(stream, self._last_id, MAX_ENTRIES, block_ms)]
        entries = replies.stream_entries(found[0])
        if entries and self._num_tokens is None:  # after a resumption these have no offset to compare with
            read, watched = yield [commands.read_stream(stream, self._last_id, MAX_ENTRIES, None), watch]
            self._take_watch(watched)
            entries = replies.stream_entries(read)
        elif not entries and self._has_ended:
            self._take_watch((yield [watch])[0])  # has the stream ended, or has it expired?
            self._is_done = True
        elif not entries and self._wait.block_ms():
            watched, stats = yield [watch, commands.stats(self._keys)]
            self._take_watch(watched)
            self._wait.note(replies.text(watched[0]), replies.queue_stats(stats))
        elif not entries:
            again = "call stream again, `after` the last event"
            raise (yield from self._wait.job_error(f"no event of job {self._job_id!r} has come", again))
        return self._events(entries)

    def _take_watch(self, watched: Reply) -> None:
        if watched is None:
            raise JobNotFound(self._job_id, self._keys.queue)
        state, _, trimmed_id, has_stream = watched
        if not has_stream:
            raise ResultExpired(self._job_id, self._keys.queue)
        self._watch_again_s = time.monotonic() + WATCH_REFRESH_S
        self._has_ended = replies.is_terminal(state)
        self._is_trimmed = bool(trimmed_id) and _is_later(trimmed_id.decode(), self._last_id)

    def _events(self, entries: list[replies.Entry]) -> list[StreamEvent]:
        """Return the events of the entries before the first gap."""
        events: list[StreamEvent] = []
        if self._is_trimmed:
            return events
        for entry in entries:
            position = replies.position_of(entry)
            if self._num_tokens is not None and position > self._num_tokens:
                self._is_trimmed = True  # the entries in between were trimmed since the last read
                break
            event = replies.stream_event(entry)
            events.append(event)
            self._last_id = event.id
            self._num_tokens = position + len(event.token_ids)
            if self._read is not None:
                self._read[event.index] = self._read.get(event.index, _Read()).with_event(event)
            self._is_done = event.state is not None
        return events

    def _trimmed_events(self, reply: Reply) -> list[StreamEvent]:
        trimmed_id, *trimmed = reply
        if not trimmed_id:
            raise QueueError(f"the stream of job {self._job_id!r} has lost entries; call get for its output")
        self._is_trimmed = False
        is_restart = self._read is None
        read = self._read or {}
        self._read, self._num_tokens = read, 0
        events: list[StreamEvent] = []
        for index, one in enumerate(trimmed):
            output, known = replies.Output(one), read.get(index, _Read())
            parts = output.parts()
            self._num_tokens += len(output.token_ids)
            if len(output.token_ids) > known.num_tokens or len(trimmed) == 1:
                event = StreamEvent(
                    id=self._last_id,  # a reader that stops in between lacks the rest
                    offset=known.num_tokens,
                    token_ids=output.token_ids[known.num_tokens :],
                    text=output.text()[known.num_chars :],
                    index=index,
                    content=(parts.content or "")[known.num_content :] or None,
                    reasoning=(parts.reasoning or "")[known.num_reasoning :] or None,
                    tool_calls=parts.tool_calls[known.num_calls :],
                    is_restart=is_restart and not events,
                    logprobs=output.logprobs[known.num_tokens :] or None,
                )
                events.append(event)
                read[index] = known.with_event(event)
        self._last_id = trimmed_id.decode()
        return [*events[:-1], *(msgspec.structs.replace(event, id=self._last_id) for event in events[-1:])]


class CompletionFollower:
    """Finds which of many jobs have ended: it reads all states once, then follows the feed of completions.

    The feed is capped: if it may have lost entries that were not read, all states are read again. In case an end was missed
    in another way, the states of MAX_STATES jobs are read every REREAD_INTERVAL_S.
    """

    def __init__(
        self, keys: QueueKeys, job_ids: Iterable[str], timeout_s: float | None, *, skips_unknown: bool = False
    ) -> None:
        """`skips_unknown`: an unknown job counts as one that has ended, instead of JobNotFound."""
        self._keys = keys
        self._skips_unknown = skips_unknown
        self._missing = OrderedDict.fromkeys(job_ids)
        """Those whose states were read longest ago first."""
        self._num_jobs = self._num_unread = len(self._missing)
        self._deadline = Deadline(timeout_s)
        self._last_id: str | None = None  # in the feed; read before the first states, so that no completion is missed
        self._next_reread_s = time.monotonic() + REREAD_INTERVAL_S

    @property
    def is_done(self) -> bool:
        return not self._missing

    @property
    def num_missing(self) -> int:
        """Number of jobs that have not ended, as far as is known."""
        return len(self._missing)

    def add(self, job_ids: Sequence[str]) -> None:
        """Follow more jobs. They may have ended already."""
        for job_id in job_ids:
            self._missing[job_id] = None
            self._missing.move_to_end(job_id, last=False)
        self._num_jobs += len(job_ids)
        self._num_unread += len(job_ids)

    def limit(self, timeout_s: float | None) -> None:
        """Raise WaitTimeout when this time is over, from now on."""
        self._deadline = Deadline(timeout_s)

    def next_ended(self, most_s: float = math.inf) -> Call[list[str]]:
        """Return ids that have ended, none if nothing happens for `most_s` or some seconds. Raises JobNotFound for an
        unknown id, and WaitTimeout."""
        if self._last_id is None:
            last_entry = (yield [commands.last_entry(self._keys.done)])[0]
            self._last_id = last_entry[0][0].decode() if last_entry else START
        if not self._num_unread and time.monotonic() >= self._next_reread_s:
            self._num_unread = MAX_STATES
            self._next_reread_s = time.monotonic() + REREAD_INTERVAL_S
        unread = list(islice(self._missing, min(self._num_unread, MAX_STATES)))
        look = [commands.state(self._keys, job_id) for job_id in unread]
        if look or self._deadline.block_ms():
            block_ms = None if look else int(min(self._deadline.block_ms(), most_s * 1000))
            done = self._keys.done
            read = commands.read_stream(done, self._last_id, MAX_ENTRIES, block_ms)
            *states, feed, first = yield [*look, read, commands.first_entry(done)]
            entries = replies.stream_entries(feed)
            ended = self._take_states(unread, states)
            # The cap leaves far more than MAX_ENTRIES. If it has removed unread ones, all that are left are unread.
            if len(entries) == MAX_ENTRIES and first and _is_later(first[0][0].decode(), self._last_id):
                self._num_unread = len(self._missing)
            if entries:
                self._last_id = entries[-1][0].decode()
            return ended + self._take_ended(fields[b"id"].decode() for _, fields in entries)
        stats = yield [commands.stats(self._keys)]
        reason = describe_obstacle(replies.queue_stats(stats[0]), self._keys.queue)
        what = f"only {self._num_jobs - len(self._missing)} of {self._num_jobs} jobs have ended"
        raise self._deadline.error(what, reason, has_obstacle=reason is not None)

    def _take_states(self, job_ids: Sequence[str], states: Sequence[bytes | None]) -> list[str]:
        self._num_unread = max(0, self._num_unread - MAX_STATES)
        ended = []
        for job_id, state in zip(job_ids, states, strict=True):
            if state is None and not self._skips_unknown:
                raise JobNotFound(job_id, self._keys.queue)
            if state is None or replies.is_terminal(state):
                ended.append(job_id)
            else:
                self._missing.move_to_end(job_id)
        return self._take_ended(ended)

    def _take_ended(self, job_ids: Iterable[str]) -> list[str]:
        ended = [job_id for job_id in job_ids if job_id in self._missing]
        for job_id in ended:
            del self._missing[job_id]
        return ended


def _is_later(entry_id: str, other: str) -> bool:
    return _numbers(entry_id) > _numbers(other)


def _numbers(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)
