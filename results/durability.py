"""How safe a submission is when `submit` returns: what the server is asked to confirm, and what its answer means."""

from __future__ import annotations

from typing import Literal

import redis

from millrace.results.errors import NotDurable
from millrace.results.scripts import Command, command
from millrace.results.transport import Reply

Durability = Literal["memory", "disk", "replica"]
"""In the memory of the server, in its append-only file on disk (fsync), or in the memory of a replica too."""

CONFIRM_LIMIT_MS = 8000
"""Less than a socket's timeout, so that the server answers first."""

_CONFIRMATIONS: dict[str, Command] = {
    "disk": command("WAITAOF", 1, 0, CONFIRM_LIMIT_MS),
    "replica": command("WAIT", 1, CONFIRM_LIMIT_MS),
}
DURABILITIES = ("memory", *_CONFIRMATIONS)


def confirmation(durability: str) -> Command | None:
    """What to send on the connection of a submission, after it; None where nothing has to be confirmed."""
    return _CONFIRMATIONS.get(durability)


def check_confirmed(durability: str, answer: Reply, job_ids: list[str]) -> None:
    """Raises NotDurable when the answer to `confirmation` does not confirm it."""
    if isinstance(answer, redis.RedisError):
        raise NotDurable(_refusal(durability, str(answer)), job_ids) from answer
    num_confirmed = answer[0] if durability == "disk" else answer
    if num_confirmed < 1:
        raise NotDurable(_TIMED_OUT[durability], job_ids)


_TIMED_OUT = {
    "disk": f"durability='disk': no fsync of the append-only file within {CONFIRM_LIMIT_MS / 1000:g} s",
    "replica": f"durability='replica': no replica has confirmed within {CONFIRM_LIMIT_MS / 1000:g} s, if any is connected",
}


def _refusal(durability: str, words: str) -> str:
    if "unknown command" in words:
        return f"durability='{durability}' needs WAITAOF, which Redis and Valkey have from 7.2 on: {words}"
    if "appendonly" in words:
        return f"durability='{durability}' needs an append-only file: set appendonly yes on the server ({words})"
    return f"durability='{durability}': the server did not confirm: {words}"
