"""What the server's replies mean: pure functions from replies to the types of `messages`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec

from millrace.results.errors import BatchNotFound, CannotRedrive, EngineNotFound, JobNotFound
from millrace.results.messages import (
    PROTOCOL,
    TERMINAL_STATES,
    BatchStatus,
    Claim,
    ClaimedJob,
    InboxEntry,
    Job,
    JobError,
    JobId,
    Lease,
    Position,
    QueueStats,
    Reconciliation,
    Signal,
    SignalKind,
    StreamEvent,
    Timings,
    Usage,
)
from millrace.results.tokens import unpack_tokens

_decode_error = msgspec.json.Decoder(JobError).decode
_decode_meta = msgspec.json.Decoder(dict[str, Any]).decode
_decode_token_ids = msgspec.json.Decoder(list[int]).decode

Entry = tuple[bytes, Any]
"""A stream entry: its id and its fields, flat from a script, a dict from XREAD."""


def words(reply: Sequence[bytes]) -> list[str]:
    return [word.decode() for word in reply]


# --- engine side ---------------------------------------------------------------------------------------------------


def claim(reply: list[Any]) -> Claim:
    num_ready, num_set_aside, *jobs = reply
    return Claim(jobs=[_claimed_job(fields) for fields in jobs], num_ready=num_ready, num_set_aside=num_set_aside)


def _claimed_job(fields: list[Any]) -> ClaimedJob:
    """A record that somebody has corruption must not cost its batch-mates the claim: it comes with what is wrong with it."""
    job_id, lease, attempt, body, seed, cost, crashes, tokens, num_published, watched, created, protocol, tenant = (
        fields
    )
    numbers = {"seed": seed, "created": created, "v": protocol}
    wrong = [f"{name} is {value!r}" for name, value in numbers.items() if not _INTEGER.fullmatch(value or b"")]
    if len(tokens) % 4:
        wrong.append(f"the checkpoint has {len(tokens)} bytes")
    if wrong:
        seed, created, protocol, tokens = 0, 0, PROTOCOL, b""
    return ClaimedJob(
        job_id=JobId(job_id.decode(errors="replace")),
        lease=Lease(int(lease)),
        attempt=attempt,
        body=body or b"",
        seed=int(seed),
        cost=cost,
        crash_count=crashes,
        token_ids=unpack_tokens(tokens),
        num_published=num_published,
        is_watched=bool(watched),
        created_ms=int(created),
        protocol=int(protocol),
        tenant=(tenant or b"").decode(errors="replace"),
        corruption=", ".join(wrong)[:200] or None,
    )


_INTEGER = re.compile(rb"-?\d{1,20}")


def reconciliation(reply: list[Any]) -> Reconciliation:
    *jobs, sleep_level, next_lapse_ms = reply
    lost, cancelled, watched, expired = ([JobId(job_id) for job_id in words(part)] for part in jobs)
    return Reconciliation(
        lost=lost,
        cancelled=cancelled,
        watched=watched,
        expired=expired,
        sleep_level=sleep_level,
        next_lapse_ms=next_lapse_ms,
    )


def signal(reply: tuple[bytes, bytes] | None, wake_key: str) -> Signal | Literal["wake", "beat"] | None:
    if reply is None:
        return None
    key, value = reply
    if key.decode() == wake_key:
        return "wake"
    kind, _, job_id = value.decode().partition(" ")
    if kind == "beat":
        return "beat"
    if kind not in get_args(SignalKind):
        return None  # a word of a newer version
    return msgspec.convert({"kind": kind, "job_id": job_id}, Signal)


def inbox_entries(reply: Any) -> list[InboxEntry]:
    return [InboxEntry(entry_id=at.decode(), raw=fields.get(b"job", b"")) for at, fields in stream_entries(reply)]


# --- reader side ---------------------------------------------------------------------------------------------------


def queue_stats(reply: list[Any]) -> QueueStats:
    *counts, is_paused, pairs = reply
    asleep = {engine_id.decode(): level for engine_id, level in zip(pairs[::2], pairs[1::2], strict=True)}
    named = dict(zip(QueueStats.__struct_fields__, counts, strict=False))
    return QueueStats(**named, is_paused=bool(is_paused), sleep_levels=asleep)


def engines_told(engine_id: str | None, queue: str, reply: list[bytes]) -> list[str]:
    """Whom the script `sleep` has told. Raises EngineNotFound."""
    if not reply:
        raise EngineNotFound(engine_id, queue)
    return words(reply)


def position(job_id: str, queue: str, reply: list[Any] | None) -> Position:
    """Where a job stands. Raises JobNotFound."""
    if reply is None:
        raise JobNotFound(job_id, queue)
    state, num_ahead, eta_ms = reply
    return Position(
        state=state.decode(),
        num_ahead=None if num_ahead < 0 else num_ahead,
        eta_s=None if eta_ms < 0 else eta_ms / 1000,
    )


def batch_status(batch: str, queue: str, reply: list[int] | None) -> BatchStatus:
    """The counts of a batch. Raises BatchNotFound."""
    if reply is None:
        raise BatchNotFound(batch, queue)
    *counts, eta_ms = reply
    names = BatchStatus.__struct_fields__[1:-1]
    eta_s = None if eta_ms < 0 else eta_ms / 1000
    return BatchStatus(batch=batch, **dict(zip(names, counts, strict=True)), eta_s=eta_s)


def stream_entries(reply: Any) -> list[Entry]:
    """The entries in the reply to an XREAD of one stream."""
    return list(reply[0][1]) if reply else []


def job(job_id: str, queue: str, reply: list[Any] | None) -> Job:
    """A job from the reply of the script `get`. Raises JobNotFound."""
    if reply is None:
        raise JobNotFound(job_id, queue)
    state, attempt, created, started, ended, old_text, old_tokens, entries, *details = reply
    meta, batch, redrive_of, redriven_as, num_retries, deadline, due = details
    texts, token_ids = [old_text.decode()], unpack_tokens(old_tokens)
    terminal: dict[bytes, bytes] = {}
    for _, flat in entries:
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        if b"state" in fields:
            terminal = fields
        else:
            texts.append(fields[b"text"].decode())
            token_ids += _decode_token_ids(fields[b"tokens"])
    reason, error = terminal.get(b"reason"), terminal.get(b"error")
    return Job(
        id=job_id,
        state=state.decode(),
        text="".join(texts),
        token_ids=token_ids,
        finish_reason=reason.decode() if reason else None,
        usage=_usage(terminal),
        error=_decode_error(error) if error else None,
        timings=Timings(
            created_ms=int(created),
            started_ms=_time(started),
            ended_ms=_time(ended),
            due_ms=_time(due),
            deadline_ms=_time(deadline),
        ),
        attempt=int(attempt),
        num_retries=int(num_retries),
        meta=_meta(meta),
        batch=batch.decode() or None,
        redrive_of=redrive_of.decode() or None,
        redriven_as=redriven_as.decode() or None,
        has_result=bool(terminal) or not ended,
    )


def known_jobs(job_ids: Sequence[str], queue: str, found: Sequence[list[Any] | None]) -> list[Job]:
    """Of jobs that were listed, those that are still there."""
    pairs = zip(job_ids, found, strict=True)
    return [job(job_id, queue, reply) for job_id, reply in pairs if reply is not None]


def _meta(raw: bytes) -> dict[str, Any] | None:
    """None also for what a foreign client wrote and nobody can read: it must not hide the job."""
    try:
        return _decode_meta(raw) if raw else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def stream_event(entry: Entry) -> StreamEvent:
    """An entry of a result stream, as XREAD gives it."""
    at, fields = entry[0].decode(), entry[1]
    offset = int(fields[b"offset"])
    if state := fields.get(b"state"):
        return StreamEvent(id=at, offset=offset, token_ids=[], text="", state=state.decode())
    token_ids = _decode_token_ids(fields[b"tokens"])
    return StreamEvent(id=at, offset=offset, token_ids=token_ids, text=fields[b"text"].decode())


def cancelled(job_id: str, queue: str, reply: bytes | None) -> str:
    """What the script `cancel` did. Raises JobNotFound."""
    if reply is None:
        raise JobNotFound(job_id, queue)
    return reply.decode()


def all_redriven(job_ids: Sequence[str], found: Sequence[list[bytes] | None]) -> dict[str, str]:
    """By id, the new id of each job that could be run again."""
    outcomes = {job_id: words(reply) for job_id, reply in zip(job_ids, found, strict=True) if reply is not None}
    return {job_id: new_id for job_id, (outcome, new_id) in outcomes.items() if outcome in ("created", "exists")}


def redriven(job_id: str, queue: str, reply: list[bytes] | None) -> str:
    """The id of the job that runs this one again. Raises JobNotFound and CannotRedrive."""
    if reply is None:
        raise JobNotFound(job_id, queue)
    outcome, detail = words(reply)
    match outcome:
        case "created" | "exists":
            return detail
        case "refused":
            raise CannotRedrive(
                f"job {job_id!r} is {detail}: only a job that has failed, expired or been cancelled can be run again"
            )
        case "no id":
            raise CannotRedrive(f"job {job_id!r} has too long an id for <id>.r<n>: submit it again under another one")
    raise CannotRedrive(f"job {job_id!r} never had a request that could be run")


def is_terminal(state: bytes | None) -> bool:
    return state is not None and state.decode() in TERMINAL_STATES


def _usage(terminal: dict[bytes, bytes]) -> Usage | None:
    if b"prompt_tokens" not in terminal:
        return None
    counts = (int(terminal[name]) for name in (b"prompt_tokens", b"completion_tokens"))
    return Usage(prompt_tokens=next(counts), completion_tokens=next(counts))


def _time(field: bytes) -> int | None:
    return int(field) if field else None
