"""The errors of the queue; each names the remedy."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

_JOINERS = "\u200c\u200d"
"""They stand in words of Persian and Indic languages, and in emoji."""
MAX_MESSAGE = 400
"""Characters of an error's message: what users put into it may be longer."""


def one_line(text: str, limit: int = MAX_MESSAGE) -> str:
    """Return the text printable and at most `limit` characters long: escaped, and without its middle where it is longer."""
    text = _without_middle(text, limit)
    if text.isprintable():
        return text
    return _without_middle("".join(c if c.isprintable() or c in _JOINERS else repr(c)[1:-1] for c in text), limit)


def _without_middle(text: str, limit: int) -> str:
    num_last = limit // 3
    return text if len(text) <= limit else f"{text[: limit - num_last - 3]}...{text[-num_last:]}"


def shown(value: Any) -> str:
    """Return any value for a message: at most 60 characters, all printable."""
    try:
        return one_line(_repr.repr(value), 60)
    except Exception:  # from the value's own class, or an integer too large to be printed
        return f"a value of type {one_line(type(value).__name__, 40)}"


_repr = reprlib.Repr()  # it does not print the whole of a large list first
_repr.maxstring = _repr.maxother = 100


def some_ids(job_ids: Sequence[str]) -> str:
    """Return the first five of some ids, and how many follow."""
    return ", ".join(job_ids[:5]) + (f" and {len(job_ids) - 5} more" if len(job_ids) > 5 else "")


class MillraceError(Exception):
    """Base of every error that Millrace raises on purpose. Its message is one printable line of at most MAX_MESSAGE."""

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles, as between processes, keep the message: they do not make it again from its parts."""
        return _copy_of, (type(self), self.args, self.__dict__)


def _copy_of(kind: type[MillraceError], args: tuple[Any, ...], fields: dict[str, Any]) -> MillraceError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class QueueError(MillraceError):
    """Base of the errors of the queue in Redis."""


class JobNotFound(QueueError):
    """Raised when no record has this id: the job was never submitted, or deleted, its result has expired, no engine has
    accepted it from the inbox yet, or the Redis has lost its data."""

    def __init__(self, job_id: str, queue: str) -> None:
        super().__init__(
            f"no job {job_id!r} in queue {queue!r}: never submitted, or deleted, or its result has expired, "
            "or no engine has accepted it from the inbox yet, or the Redis has lost its data"
        )
        self.job_id = job_id


class JobFailed(MillraceError):
    """Raised by `Job.raise_for_state` for a job that has failed, was cancelled, has expired, or has not ended yet."""

    def __init__(self, job_id: str, state: str, kind: str | None = None, reason: str = "") -> None:
        what = {
            "failed": "has failed" + (f": {kind}: {reason}" if kind else ", and its error has expired"),
            "cancelled": "was cancelled",
            "expired": "has expired: its deadline passed before its end",
        }
        super().__init__(f"job {job_id!r} {what.get(state, f'is {state}; wait for its end')}")
        self.job_id = job_id
        self.state = state
        self.kind = kind
        """`JobError.kind` of a job that has failed. None in any other state, and after the result has expired."""
        self.reason = reason
        """`JobError.message` of a job that has failed."""


class OutputNotParsed(MillraceError, ValueError):
    """Raised by `parsed` when an output was cut, or does not parse."""

    def __init__(self, finish_reason: str | None, error: str = "") -> None:
        cut = {None: "there is no output yet", "length": "max_tokens has cut the output; ask for more tokens"}
        super().__init__(
            error or cut.get(finish_reason, f"the output is not complete: finish_reason is {finish_reason}")
        )
        self.finish_reason = finish_reason


class ResultExpired(QueueError):
    """Raised by readers when a job's result has expired and its record has not."""

    def __init__(self, job_id: str, queue: str) -> None:
        super().__init__(
            f"job {job_id!r} of queue {queue!r} has ended, and its result has expired; get returns its state"
        )
        self.job_id = job_id


class JobConflict(QueueError):
    """Raised when other jobs have these ids; the other jobs of the call are in the queue."""

    def __init__(self, job_ids: list[str]) -> None:
        which = "another request (prompt, sampling, meta, tenant, deadline, or another field)"
        super().__init__(f"id: already taken by a job of {which}; use another id, or none: {some_ids(job_ids)}")
        self.job_ids = job_ids


class BatchNotFound(QueueError):
    """Raised when no job of a batch of this name is known: never submitted, or its records have expired."""

    def __init__(self, batch: str, queue: str) -> None:
        super().__init__(f"no batch {batch!r} in queue {queue!r}: never submitted, or its records have expired")
        self.batch = batch


class EngineNotFound(QueueError):
    """Raised when no engine with this id, or none at all, has a heartbeat on the queue."""

    def __init__(self, engine_id: str | None, queue: str) -> None:
        who = "no engine" if engine_id is None else f"no engine {engine_id!r}"
        super().__init__(f"{who} runs on queue {queue!r}; `millrace stats` names those that do")
        self.engine_id = engine_id


class QueueFull(QueueError):
    """Raised when jobs were not taken because of a limit of the queue or of a tenant."""

    def __init__(self, limit: str, value: str, job_ids: list[str], refused: list[str]) -> None:
        whose = "the tenant has" if limit.startswith("tenant_") else "the queue has"
        what = "tokens" if limit.endswith("_tokens") else "jobs"
        accepted = f"; {len(job_ids)} jobs of this call are in the queue" if job_ids else ""
        super().__init__(
            f"{whose} as many {what} waiting as {limit} allows, {value}{accepted}. "
            f"Submit the rest again, under the same ids, when some have ended; or raise {limit} in the queue's settings"
        )
        self.limit = limit
        self.value = value
        self.job_ids = job_ids
        """In the queue, in the order of the call."""
        self.refused = refused
        """Not in the queue, of those that the call took from its iterable."""


class NotDurable(QueueError):
    """Raised when jobs are in the queue, but the server did not confirm the requested durability."""

    def __init__(self, reason: str, job_ids: list[str]) -> None:
        super().__init__(f"{reason}. The jobs are in the queue: {some_ids(job_ids)}")
        self.job_ids = job_ids


class CannotRedrive(QueueError):
    """Raised when a job cannot be redriven: it has not ended, it has finished, or it has no valid request."""


class RedisUnavailable(QueueError):
    """Raised when the server cannot be reached, does not reply in time, or cannot execute the command now: it is loading,
    read-only or out of memory, or denies this user the login or the command. Also for a malformed URL."""

    def __init__(self, message: str = "", *, is_outage: bool = False) -> None:
        super().__init__(message)
        self.is_outage = is_outage
        """Whether the server could not be reached, did not answer, is loading or fails over: the same call may succeed
        later. False for what somebody has to mend, such as a wrong password, a full server or a full connection pool."""


class InvalidRedisURL(RedisUnavailable):
    """Raised for a malformed URL, and for a file of one that cannot be read: another attempt ends the same way."""


class ServerUnsuitable(QueueError):
    """Raised when the server would lose jobs or is too old; names the setting to change."""


class WaitTimeout(QueueError, TimeoutError):
    """Raised when a job has not ended within the timeout of `wait`, or no event has come within that of `stream`. The job
    continues."""

    def __init__(self, message: str, job_id: str | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id
        """None where several jobs were waited for."""
