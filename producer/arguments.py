"""Checks of the arguments of both clients' methods.

Each function checks one argument and returns it. It raises InvalidRequest for a wrong type or value, and JobNotFound,
BatchNotFound or EngineNotFound for a string that cannot be a name of one: the server is not asked then.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from millrace.producer.checks import Check, integer, matching, optional, remedy, text
from millrace.producer.errors import InvalidRequest
from millrace.producer.request import BATCH_PATTERN, ID_PATTERN, MAX_SECONDS
from millrace.results.durability import DURABILITIES
from millrace.results.errors import BatchNotFound, EngineNotFound, JobNotFound, shown
from millrace.results.keys import NAME_PATTERN, QueueKeys
from millrace.results.messages import EndState
from millrace.results.settings import SETTINGS, TENANT_SETTINGS, WEIGHT, setting

ENDED = "ended"
"""Any of the states in which jobs end."""
STATES = ("queued", "delayed", "running", *get_args(EndState), ENDED)
MAX_LISTED = 10_000
"""Jobs that one call lists, and ends that it reads."""

_JOB_ID = re.compile(ID_PATTERN)
_BATCH = re.compile(BATCH_PATTERN)
_NEW_BATCH = optional(matching(BATCH_PATTERN))
_EVENT_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")
_MAX_EVENT_NUMBER = 2**64 - 1

T = TypeVar("T")


def queue_keys(queue: str) -> QueueKeys:
    """Return the names of a queue's keys. Raises InvalidRequest."""
    try:
        return QueueKeys(queue)
    except (ValueError, TypeError) as error:
        raise InvalidRequest("queue", f"must match {NAME_PATTERN}, got {shown(queue)}") from error


def job_id(keys: QueueKeys, job_id: str) -> str:
    if not is_job_id(job_id):
        raise JobNotFound(job_id, keys.queue)
    return job_id


def is_job_id(job_id: str) -> bool:
    """Return whether a job may have this id. Raises InvalidRequest if it is not a string."""
    return _JOB_ID.fullmatch(_string("job_id", job_id)) is not None


def many(name: str, values: Iterable[T]) -> Iterator[T]:
    """Return the values one by one. Raises InvalidRequest, also for one string, which would be read letter by letter."""
    if not isinstance(values, str | bytes):
        with contextlib.suppress(TypeError):
            return iter(values)
    raise InvalidRequest(name, f"must be a list or another iterable, got {shown(values)}")


def many_ids(job_ids: Iterable[str]) -> Iterator[str]:
    return (_string("job_ids", job_id) for job_id in many("job_ids", job_ids))


def batch(keys: QueueKeys, batch: str) -> str:
    if not _BATCH.fullmatch(_string("batch", batch)):
        raise BatchNotFound(batch, keys.queue)
    return batch


def new_batch(batch: str | None) -> str | None:
    """A batch that may be new. None: no batch."""
    return _checked("batch", batch, _NEW_BATCH)


def engine_id(keys: QueueKeys, engine_id: str | None) -> str | None:
    """None: all engines."""
    if engine_id is not None and text(_string("engine_id", engine_id)):
        raise EngineNotFound(engine_id, keys.queue)
    return engine_id


def event_id(after: str | None) -> str | None:
    """The id of the event after which a stream continues. None or "": from the beginning."""
    if after is None or not _string("after", after):
        return after
    if not _EVENT_ID.fullmatch(after) or max(map(int, after.split("-"))) > _MAX_EVENT_NUMBER:
        raise InvalidRequest("after", f"must be the id of an event, such as 1700000000000-0, got {shown(after)}")
    return after


def durability(durability: str) -> str:
    return _one_of("durability", durability, DURABILITIES)


def state(state: str) -> str:
    return _one_of("state", state, STATES)


def limit(limit: int) -> int:
    return _checked("limit", limit, integer(1, MAX_LISTED))


def timeout(timeout_s: float | None) -> float | None:
    """None: no limit. At 0 or less a call does not wait."""
    if timeout_s is None or (type(timeout_s) in (int, float) and -MAX_SECONDS <= timeout_s <= MAX_SECONDS):
        return timeout_s
    rule = f"must be a number of seconds up to {MAX_SECONDS:g}, or None to wait without a limit"
    raise InvalidRequest("timeout_s", f"{rule}, got {shown(timeout_s)}")


def sleep_level(level: int) -> int:
    return _checked("level", level, integer(1, 2))


def settings(settings: Mapping[str, float | None]) -> dict[str, float | None]:
    """Settings of a queue, by name. None: the default."""
    if not isinstance(settings, Mapping):
        raise InvalidRequest("settings", f"must be an object of names and numbers, got {shown(settings)}")
    return {name: _setting(name, value) for name, value in settings.items()}


def _setting(name: str, value: Any) -> float | None:
    found = setting(_string("settings", name))
    if name == "paused":
        raise InvalidRequest("settings", "paused is set by pause and resume; leave it out")
    if found is None:
        known = (*SETTINGS, *(f"{kind}TENANT" for kind in TENANT_SETTINGS))
        rule = f"there are {', '.join(known)}; {remedy(name, known)}"
        raise InvalidRequest("settings", f"{shown(name)} is not a setting of a queue; {rule}")
    is_weight = name.startswith(WEIGHT)
    is_number = type(value) is int or (type(value) is float and is_weight)
    if value is not None and not (is_number and found.low <= value <= found.high):
        rule = f"must be a {'number' if is_weight else 'whole number'} from {found.low:g} to {found.high:.16g}"
        raise InvalidRequest("settings", f"{name} {rule}, got {shown(value)}")
    number: float | None = value
    return number


def _checked(name: str, value: T, check: Check) -> T:
    if wrong := check(value):
        raise InvalidRequest(name, wrong)
    return value


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    if _string(name, value) not in choices:
        raise InvalidRequest(name, f"must be one of {', '.join(choices)}, got {shown(value)}")
    return value


def _string(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise InvalidRequest(name, f"must be a string, got {shown(value)}")
