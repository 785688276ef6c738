"""What the server has to confirm before `submit` returns."""

from __future__ import annotations

from typing import Literal

import redis

from millrace.results.errors import NotDurable
from millrace.results.scripts import Command, command
from millrace.results.transport import Reply

Durability = Literal["memory", "disk", "replica"]
"""Where jobs are kept: in the server's memory, in its append-only file on disk (fsync), or in a replica's memory too."""

CONFIRM_LIMIT_MS = 8000
"""Less than a socket's timeout, so that the server replies first."""

_CONFIRMATIONS: dict[str, Command] = {
    "disk": command("WAITAOF", 1, 0, CONFIRM_LIMIT_MS),
    "replica": command("WAIT", 1, CONFIRM_LIMIT_MS),
}
DURABILITIES = ("memory", *_CONFIRMATIONS)


def confirmation(durability: str) -> Command | None:
    """Return the command to send after a submission, on its connection; None where nothing has to be confirmed."""
    return _CONFIRMATIONS.get(durability)


def check_confirmed(durability: str, answer: Reply, job_ids: list[str]) -> None:
    """Raise NotDurable when the reply to `confirmation` does not confirm the jobs."""
    if isinstance(answer, redis.RedisError):
        raise NotDurable(_refusal(durability, str(answer)), job_ids) from answer
    num_confirmed = answer[0] if durability == "disk" else answer
    if num_confirmed < 1:
        raise NotDurable(_TIMED_OUT[durability], job_ids)


_TIMED_OUT = {
    "disk": f"durability='disk': no fsync of the append-only file within {CONFIRM_LIMIT_MS / 1000:g} s",
    "replica": f"durability='replica': no replica has confirmed within {CONFIRM_LIMIT_MS / 1000:g} s; there may be none",
}


def _refusal(durability: str, error: str) -> str:
    if "unknown command" in error:
        return f"durability='{durability}' needs WAITAOF, which Redis and Valkey have from 7.2 on: {error}"
    if "appendonly" in error:
        return f"durability='{durability}' needs an append-only file: set appendonly yes on the server ({error})"
    return f"durability='{durability}': the server did not confirm: {error}"
