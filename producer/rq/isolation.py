"""Keeps damage to one job's data from stopping the other jobs, and distinguishes it from an outage of the server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import redis

from millrace.results.errors import RedisUnavailable, one_line
from millrace.results.server_errors import as_unavailable

logger = logging.getLogger("millrace.gateway")

BATCH_JOBS = 256
"""Jobs that one transaction reads or writes."""

_Item = TypeVar("_Item")


def is_outage(error: Exception) -> bool:
    """Return whether the server, or the way to it, is at fault: the same call may succeed later."""
    if isinstance(error, redis.ResponseError | redis.DataError):
        # The text may quote a command, in which as_unavailable would find its key words.
        return "WRONGTYPE" not in str(error) and as_unavailable(error, "") is not None
    return isinstance(error, redis.RedisError | RedisUnavailable | OSError)


def in_batches(
    items: Sequence[_Item],
    act: Callable[[Sequence[_Item]], object],
    on_damage: Callable[[_Item, Exception], object],
    batch_size: int = BATCH_JOBS,
) -> None:
    """Act on the items, a batch at a time. If a batch fails, act on each of its items alone, and give an item that fails
    alone to `on_damage`. An outage is raised."""
    for first in range(0, len(items), batch_size):
        batch = items[first : first + batch_size]
        try:
            act(batch)
        except Exception as error:
            if is_outage(error):
                raise
            if len(batch) == 1:
                on_damage(batch[0], error)
            else:
                in_batches(batch, act, on_damage, batch_size=1)


@contextmanager
def isolated(what: str) -> Iterator[None]:
    """Log an error in data as one line, and continue. An outage is raised."""
    try:
        yield
    except Exception as error:
        if is_outage(error):
            raise
        logger.error("%s: %s: %s", what, type(error).__name__, one_line(str(error)))


def read(pipe: Any) -> list[Any]:
    """Execute a pipeline. Return its replies; where a command failed on its key, its error. An outage is raised."""
    replies: list[Any] = pipe.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception) and is_outage(reply):
            raise reply
    return replies


def write(pipe: Any) -> None:
    """Execute a pipeline. A command that fails on its key is logged: Redis has executed the others, also of a transaction.
    An outage is raised."""
    commands = pipe.command_stack
    for (command, _), reply in zip(commands, read(pipe), strict=True):
        if isinstance(reply, Exception):
            logger.error("redis: %s", one_line(f"{command[0]} {text(command[1])}: {reply}"))


def text(key: object) -> str:
    """Return a key or an id as text."""
    return key.decode(errors="replace") if isinstance(key, bytes) else str(key)
