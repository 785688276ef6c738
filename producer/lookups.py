"""What a caller names to find something again. A name that nothing can have is refused before the server is asked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, get_args

from millrace.producer.checks import integer, matching, shown, text
from millrace.producer.errors import InvalidRequest
from millrace.producer.request import BATCH_PATTERN, ID_PATTERN, MAX_SECONDS
from millrace.results.errors import BatchNotFound, EngineNotFound, JobNotFound
from millrace.results.keys import QueueKeys
from millrace.results.messages import EndState

READ_BATCH = 64
"""Jobs that `as_completed` reads at a time."""
CANCEL_BATCH = 500
"""Jobs that are cancelled, or run again, in one round trip."""

STATES = ("queued", "delayed", "running", *get_args(EndState))
MAX_LISTED = 100_000
"""Jobs that one call names: the feed of ends goes back about as far."""

_ID = re.compile(ID_PATTERN)
_BATCH = re.compile(BATCH_PATTERN)
_ENTRY_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")


def queue_keys(queue: str) -> QueueKeys:
    """The names of a queue's keys. Raises InvalidRequest for a name that no queue has."""
    try:
        return QueueKeys(queue)
    except (ValueError, TypeError) as error:
        raise InvalidRequest("queue", f"must match [A-Za-z0-9._-]{{1,64}}, got {shown(queue)}") from error


def one_job(keys: QueueKeys, job_id: str) -> str:
    """The id. Raises JobNotFound for one that no job has, and InvalidRequest for what is not a string."""
    if not is_job_id(job_id):
        raise JobNotFound(job_id, keys.queue)
    return job_id


def is_job_id(job_id: str) -> bool:
    """Whether a job may have this id. Raises InvalidRequest for what is not a string."""
    return _ID.fullmatch(_string("job_id", job_id)) is not None


def many_ids(job_ids: Iterable[str]) -> Iterator[str]:
    """The ids, one by one. Raises InvalidRequest for what is not ids, such as one string, which would be its letters."""
    if isinstance(job_ids, str | bytes) or not isinstance(job_ids, Iterable):
        raise InvalidRequest("job_ids", f"must be a list, or another iterable, of ids, got {shown(job_ids)}")
    return (_string("job_ids", job_id) for job_id in job_ids)


def batched(job_ids: Iterable[str], size: int) -> Iterator[list[str]]:
    """Lists of at most `size` ids. Raises as `many_ids` does."""
    remaining = many_ids(job_ids)
    while some := list(islice(remaining, size)):
        yield some


def one_batch(keys: QueueKeys, batch: str) -> str:
    """The batch's name. Raises BatchNotFound for one that no batch has, and InvalidRequest for what is not a string."""
    if not _BATCH.fullmatch(_string("batch", batch)):
        raise BatchNotFound(batch, keys.queue)
    return batch


def new_batch(batch: str | None) -> str | None:
    """The name for a batch that may be new. Raises InvalidRequest."""
    if batch is not None and (wrong := matching(BATCH_PATTERN)(batch)):
        raise InvalidRequest("batch", wrong)
    return batch


def one_engine(keys: QueueKeys, engine_id: str | None) -> str | None:
    """The engine's id, or None for all. Raises EngineNotFound for one that no engine has, and InvalidRequest."""
    if engine_id is not None and text(_string("engine_id", engine_id)):
        raise EngineNotFound(engine_id, keys.queue)
    return engine_id


def one_event(after: str | None) -> str | None:
    """The id of an event to go on from; None and "" are the beginning. Raises InvalidRequest for what is none."""
    if after is not None and _string("after", after) and not _ENTRY_ID.fullmatch(after):
        raise InvalidRequest("after", f"must be the id of an event, such as 1700000000000-0, got {shown(after)}")
    return after


def one_state(state: str) -> str:
    """The state of a job. Raises InvalidRequest for one that there is not."""
    if _string("state", state) not in STATES:
        raise InvalidRequest("state", f"must be one of {', '.join(STATES)}, got {shown(state)}")
    return state


def at_most(limit: int) -> int:
    """How many jobs to name. Raises InvalidRequest."""
    if wrong := integer(1, MAX_LISTED)(limit):
        raise InvalidRequest("limit", wrong)
    return limit


def patience(timeout_s: Any) -> float | None:
    """How long to wait, in seconds; None for ever. Raises InvalidRequest."""
    if timeout_s is None or (isinstance(timeout_s, int | float) and -MAX_SECONDS <= timeout_s <= MAX_SECONDS):
        return timeout_s
    rule = f"must be a number of seconds up to {MAX_SECONDS:g}, or None to wait for ever"
    raise InvalidRequest("timeout_s", f"{rule}, got {shown(timeout_s)}")


def sleep_level(level: int) -> int:
    """The level. Raises InvalidRequest for one that there is not."""
    if wrong := integer(1, 2)(level):
        raise InvalidRequest("level", wrong)
    return level


def _string(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise InvalidRequest(name, f"must be a string, got {shown(value)}")
