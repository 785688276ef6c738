"""Pure functions from the server's replies to an engine's calls to the types of `messages`."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

import msgspec

from millrace.results.messages import (
    PROTOCOL,
    Checkpoint,
    Claim,
    ClaimedJob,
    EngineId,
    InboxEntry,
    JobId,
    Lease,
    Reconciliation,
    Recovery,
    Signal,
    SignalKind,
)
from millrace.results.replies import decode_list, text
from millrace.results.tokens import unpack_tokens


def claim(reply: list[Any]) -> Claim:
    num_ready, num_set_aside, *jobs = reply
    return Claim(jobs=[_claimed_job(fields) for fields in jobs], num_ready=num_ready, num_set_aside=num_set_aside)


def _claimed_job(fields: list[Any]) -> ClaimedJob:
    """Return the job; a corrupt record sets `corruption`, so that the claim's other jobs are not lost."""
    job_id, lease, attempt, body, seed, cost, crashes, tokens, num_published, watched, created, *more = fields
    protocol, tenant, priority, *others = more
    has_logprobs = len(others) % 2 == 1  # those of each candidate, behind pairs
    wrong, logprobs = None, [lines.splitlines() for lines in others.pop()] if has_logprobs else []
    saved = [tokens, num_published, *others]  # of each candidate
    is_intact = seed and created and protocol == _PROTOCOL and (seed + created).isdigit()  # as nearly always
    if not is_intact or len(seed) > 19 or len(created) > 19 or len(tokens) % 4 or others:
        wrong = _corruption({"seed": seed, "created": created, "v": protocol}, saved[::2])
    if wrong:
        seed, created, protocol, saved = 0, 0, PROTOCOL, [b"", num_published]
    return ClaimedJob(
        job_id=JobId(job_id.decode(errors="replace")),
        lease=Lease(int(lease)),
        attempt=attempt,
        body=body or b"",
        seed=int(seed),
        cost=cost,
        crash_count=crashes,
        checkpoints=list(map(Checkpoint, map(unpack_tokens, saved[::2]), saved[1::2])),
        is_watched=bool(watched),
        created_ms=int(created),
        protocol=int(protocol),
        tenant=(tenant or b"").decode(errors="replace"),
        priority=0 if priority == b"0" or not _INTEGER.fullmatch(priority or b"") else int(priority),
        corruption=wrong,
        logprobs=logprobs,
    )


def _corruption(numbers: dict[str, Any], checkpoints: list[bytes]) -> str | None:
    """Return what is wrong with fields of a record, or None."""
    wrong = [f"{name} is {value!r:.50}" for name, value in numbers.items() if not _INTEGER.fullmatch(value or b"")]
    wrong += [f"the checkpoint has {len(one)} bytes" for one in checkpoints if len(one) % 4]
    return ", ".join(wrong) or None


_INTEGER = re.compile(rb"-?\d{1,20}")


_PROTOCOL = str(PROTOCOL).encode()


def reconciliation(reply: list[Any]) -> Reconciliation:
    *jobs, sleep_level, next_beat_ms, reset_number = reply
    lost, cancelled, watched, expired = ([JobId(job_id) for job_id in decode_list(part)] for part in jobs)
    return Reconciliation(
        lost=lost,
        cancelled=cancelled,
        watched=watched,
        expired=expired,
        sleep_level=sleep_level,
        next_beat_ms=next_beat_ms,
        reset_number=reset_number,
    )


def signal(reply: tuple[bytes, bytes] | None, wake_key: str) -> Signal | Literal["wake", "beat"] | None:
    if reply is None:
        return None
    key, value = reply
    if key.decode() == wake_key:
        return "wake"
    kind, _, job_id = text(value).partition(" ")
    if kind == "beat":
        return "beat"
    if kind not in get_args(SignalKind):
        return None  # of a newer version
    return msgspec.convert({"kind": kind, "job_id": job_id}, Signal)


def inbox_entries(reply: Any) -> list[InboxEntry]:
    return [InboxEntry(entry_id=at.decode(), raw=raw, num_bytes=num_bytes) for at, num_bytes, raw in reply]


def recoveries(reply: list[list[Any]]) -> list[Recovery]:
    return [
        Recovery(EngineId(text(engine)), num_jobs, [JobId(each) for each in decode_list(failed)])
        for engine, num_jobs, *failed in reply
    ]
