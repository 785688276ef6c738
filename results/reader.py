"""Followers of jobs: each returns the next commands to send, and reads the replies.

They do no input or output, so sync and async clients share them:

    while not follower.is_done:
        for found in follower.feed(transport.send_many(follower.next_commands())):
            ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from millrace.results import commands, replies
from millrace.results.errors import JobNotFound, QueueError, ResultExpired
from millrace.results.job import StreamEvent
from millrace.results.keys import QueueKeys
from millrace.results.scripts import Command
from millrace.results.transport import Reply
from millrace.results.waiting import Deadline, JobDeadline, WaitLog, describe_obstacle

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
        self.is_done = False
        self._keys = keys
        self._job_id = job_id
        self._last_id = after or START
        self._deadline = JobDeadline(keys, job_id, timeout_s)
        self._must_restart = True  # the deadline, when the caller has read all events and asks for the next one
        self._is_late = False
        self._log = WaitLog(job_id, keys.queue)
        self._must_look = False  # nothing came for a while: is there an obstacle?
        self._num_tokens: int | None = None if after else 0  # of all candidates, read so far; None: unknown
        self._read: dict[int, _Read] | None = None if after else {}
        """What was read, by candidate. None: unknown, after a resumption."""
        self._take: Callable[[Sequence[Reply]], list[StreamEvent]] = self._take_watch
        """Reads the replies to the last commands."""
        self._can_resume = False
        self._must_fill = False
        self._has_ended = False
        self._is_at_end = False  # after the terminal entry, or the stream has expired: `watch` distinguishes them
        self._watch_again_s = 0.0

    def next_commands(self) -> list[Command]:
        if self._must_restart:
            self._deadline.restart()
            self._must_restart = False
        if self._is_late:
            self._take = self._take_late
            return self._deadline.last_commands()
        watch = commands.watch(self._keys, self._job_id)
        if self._must_look:
            self._must_look = False
            self._take = self._take_look
            return [watch, commands.stats(self._keys)]
        if self._is_at_end or (not self._has_ended and time.monotonic() >= self._watch_again_s):
            self._take = self._take_watch
            return [watch]
        if self._must_fill:
            self._take = self._take_trimmed
            return [commands.trimmed(self._keys, self._job_id)]
        stream = self._keys.result(self._job_id)
        if self._can_resume:  # the first entries after a resumption have no offset to compare with
            self._take = self._take_resumption
            read = commands.read_stream(stream, self._last_id, MAX_ENTRIES, None)
            return [read, watch]
        self._take = self._take_read
        block_ms = None if self._has_ended else self._deadline.block_ms() or None
        return [commands.read_stream(stream, self._last_id, MAX_ENTRIES, block_ms)]

    def feed(self, answers: Sequence[Reply]) -> list[StreamEvent]:
        """Return the next events. Raises JobNotFound, ResultExpired, and WaitTimeout if none has come in time."""
        try:
            events = self._take(answers)
        except replies.CORRUPT as error:
            raise replies.corrupt(self._job_id, self._keys.queue, error) from error
        self._must_restart = bool(events)
        return events

    def _take_late(self, answers: Sequence[Reply]) -> list[StreamEvent]:
        again = "call stream again, `after` the last event"
        raise self._deadline.job_error(f"no event of job {self._job_id!r} has come", answers, again)

    def _take_look(self, answers: Sequence[Reply]) -> list[StreamEvent]:
        self._take_watch(answers)
        self._log.note(replies.text(answers[0][0]), replies.queue_stats(answers[1]))
        return []

    def _take_watch(self, answers: Sequence[Reply]) -> list[StreamEvent]:
        if answers[0] is None:
            raise JobNotFound(self._job_id, self._keys.queue)
        state, _, trimmed_id, has_stream = answers[0]
        if not has_stream:
            raise ResultExpired(self._job_id, self._keys.queue)
        self.is_done = self._is_at_end
        self._watch_again_s = time.monotonic() + WATCH_REFRESH_S
        self._has_ended = replies.is_terminal(state)
        self._must_fill = bool(trimmed_id) and _is_later(trimmed_id.decode(), self._last_id)
        return []

    def _take_read(self, answers: Sequence[Reply]) -> list[StreamEvent]:
        entries = replies.stream_entries(answers[0])
        if not entries and not self._has_ended:
            self._must_look = self._deadline.block_ms() > 0
            self._is_late = not self._must_look
        self._can_resume = self._num_tokens is None and bool(entries)
        return [] if self._can_resume else self._take_entries(entries)

    def _take_resumption(self, answers: Sequence[Reply]) -> list[StreamEvent]:
        self._can_resume = False
        read, watched = answers
        self._take_watch([watched])
        return [] if self._must_fill else self._take_entries(replies.stream_entries(read))

    def _take_entries(self, entries: list[replies.Entry]) -> list[StreamEvent]:
        events = []
        for entry in entries:
            position = replies.position_of(entry)
            if self._num_tokens is not None and position > self._num_tokens:
                self._must_fill = True  # the entries in between were trimmed since the last read
                break
            events.append(self._advance(replies.stream_event(entry), position))
        self._is_at_end = self._has_ended and not entries
        return events

    def _take_trimmed(self, answers: Sequence[Reply]) -> list[StreamEvent]:
        trimmed_id, *trimmed = answers[0]
        if not trimmed_id:
            raise QueueError(f"the stream of job {self._job_id!r} has lost entries; call get for its output")
        self._must_fill = False
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

    def _advance(self, event: StreamEvent, position: int) -> StreamEvent:
        self._last_id = event.id
        self._num_tokens = position + len(event.token_ids)
        if self._read is not None:
            self._read[event.index] = self._read.get(event.index, _Read()).with_event(event)
        self.is_done = event.state is not None
        return event


class CompletionFollower:
    """Finds which of many jobs have ended: it reads all states once, then follows the feed of completions.

    The feed is capped, so the states of the missing jobs are read again every REREAD_INTERVAL_S.
    """

    def __init__(self, keys: QueueKeys, job_ids: Iterable[str], timeout_s: float | None) -> None:
        self._keys = keys
        self._missing = dict.fromkeys(job_ids)
        self._num_jobs = len(self._missing)
        self._deadline = Deadline(timeout_s)
        self._is_late = False
        self._last_id: str | None = None  # in the feed; read before the first states, so that no completion is missed
        self._unread: list[str] = []
        self._next_reread_s = 0.0

    @property
    def is_done(self) -> bool:
        return not self._missing

    @property
    def num_missing(self) -> int:
        """Number of jobs that have not ended, as far as is known."""
        return len(self._missing)

    def add(self, job_ids: Sequence[str]) -> None:
        """Follow more jobs. They may have ended already."""
        self._missing.update(dict.fromkeys(job_ids))
        self._unread += job_ids

    def next_commands(self) -> list[Command]:
        if self._last_id is None:
            return [commands.last_entry(self._keys.done)]
        if not self._unread and time.monotonic() >= self._next_reread_s:
            self._unread = list(self._missing)
            self._next_reread_s = time.monotonic() + REREAD_INTERVAL_S
        if self._unread:
            return [commands.state(self._keys, job_id) for job_id in self._unread[:MAX_STATES]]
        if block_ms := self._deadline.block_ms():
            return [commands.read_stream(self._keys.done, self._last_id, MAX_ENTRIES, block_ms)]
        self._is_late = True
        return [commands.stats(self._keys)]

    def feed(self, answers: Sequence[Reply]) -> list[str]:
        """Return the ids that have ended. Raises JobNotFound for an unknown id, and WaitTimeout."""
        if self._is_late:
            reason = describe_obstacle(replies.queue_stats(answers[0]), self._keys.queue)
            num_ended = self._num_jobs - len(self._missing)
            what = f"only {num_ended} of {self._num_jobs} jobs have ended"
            raise self._deadline.error(what, reason, has_obstacle=reason is not None)
        if self._last_id is None:
            self._last_id = answers[0][0][0].decode() if answers[0] else START
            return []
        if self._unread:
            return self._take_states(answers)
        entries = replies.stream_entries(answers[0])
        if entries:
            self._last_id = entries[-1][0].decode()
        return self._take_ended([fields[b"id"].decode() for _, fields in entries])

    def _take_states(self, states: Sequence[bytes | None]) -> list[str]:
        read, self._unread = self._unread[: len(states)], self._unread[len(states) :]
        ended = []
        for job_id, state in zip(read, states, strict=True):
            if state is None and job_id in self._missing:
                raise JobNotFound(job_id, self._keys.queue)
            if replies.is_terminal(state):
                ended.append(job_id)
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
