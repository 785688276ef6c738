"""Pure functions from the server's replies to a client's calls to the types of `job` and `counts`.

A job whose record is corrupt raises QueueError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from millrace.results.counts import BatchStatus, Position, QueueStats, RejectedEntry, TenantStats
from millrace.results.errors import BatchNotFound, CannotRedrive, EngineNotFound, JobNotFound, QueueError
from millrace.results.job import CompletionOutput, Job, StreamEvent, Timings
from millrace.results.logprobs import cumulative, decode_prompt, decode_tokens, join_tokens
from millrace.results.messages import (
    TERMINAL_STATES,
    ChatOutput,
    JobError,
    Usage,
)
from millrace.results.tokens import unpack_tokens

_decode_error = msgspec.json.Decoder(JobError).decode
_decode_chat = msgspec.json.Decoder(ChatOutput).decode
_decode_meta = msgspec.json.Decoder(dict[str, Any]).decode
_decode_token_ids = msgspec.json.Decoder(list[int]).decode
_decode_stop_reasons = msgspec.json.Decoder(list[int | str | None]).decode

Entry = tuple[bytes, Any]
"""A stream entry: its id and its fields, flat from a script, a dict from XREAD."""


CORRUPT = (ValueError, TypeError, LookupError, RecursionError, msgspec.MsgspecError)
"""What reading a reply raises when another program has changed the record."""


def corrupt(job_id: str, queue: str, error: Exception) -> QueueError:
    return QueueError(f"the record of job {job_id!r} in queue {queue!r} is corrupt: {error}")


def decode_list(reply: Sequence[bytes]) -> list[str]:
    return [text(item) for item in reply]


def text(raw: bytes) -> str:
    """Decode what may come from anywhere."""
    return raw.decode(errors="replace")


OutcomeKind = Literal["created", "exists", "conflict", "taken", "full", "oversized", "invalid"]


class Outcome(msgspec.Struct, frozen=True):
    """The answer of the queue to one submitted job."""

    kind: OutcomeKind
    """"exists": the same job is known; "conflict": another job has the id; "taken": another engine had the inbox entry. Not
    taken: "full", at a limit that may allow the job later; "oversized", its cost alone exceeds the limit; "invalid"."""
    name: str = ""
    """Name of the limit that refuses the job, or of the invalid field."""
    limit: str = ""
    """The value of that limit."""

    @property
    def is_accepted(self) -> bool:
        return self.kind in ("created", "exists")


def outcome(reply: bytes) -> Outcome:
    kind, _, rest = text(reply).partition(" ")
    if kind not in get_args(OutcomeKind):
        raise QueueError(f"the script answers {kind!r} to a submission; the queue's scripts are of another version")
    name, _, limit = rest.partition(" ")
    return Outcome(kind, name, limit)  # type: ignore[arg-type]  # checked above


def outcomes(reply: Sequence[bytes]) -> list[Outcome]:
    return [_CREATED if one == b"created" else outcome(one) for one in reply]


_CREATED = Outcome("created")


def queue_stats(reply: list[Any]) -> QueueStats:
    named = dict(zip(QueueStats.__struct_fields__, reply, strict=True))  # in the order of the script's reply
    levels, models = named["sleep_levels"], decode_list(named["models"])
    named["sleep_levels"] = dict(zip(decode_list(levels[::2]), levels[1::2], strict=True))
    named["models"] = dict(zip(models[::2], models[1::2], strict=True))
    return msgspec.convert(named, QueueStats, strict=False)


def tenants(counts: dict[bytes, bytes]) -> dict[str, TenantStats]:
    """Return the tenants of which something waits, those with the most tokens first."""
    names = [text(field.removesuffix(b":jobs")) for field in counts if field.endswith(b":jobs")]
    found = {
        name: TenantStats(
            waiting_jobs=int(counts[f"{name}:jobs".encode()]),
            waiting_tokens=int(counts.get(f"{name}:tokens".encode(), b"0")),
        )
        for name in names
    }
    return dict(sorted(found.items(), key=lambda pair: (-pair[1].waiting_tokens, pair[0])))


def signalled_engines(engine_id: str | None, queue: str, reply: list[bytes]) -> list[str]:
    """Return the engines that the script `sleep` or `reset_cache` has signalled. Raises EngineNotFound."""
    if not reply:
        raise EngineNotFound(engine_id, queue)
    return decode_list(reply)


def position(job_id: str, queue: str, reply: list[Any] | None) -> Position:
    """Return the position of a job. Raises JobNotFound."""
    if reply is None:
        raise JobNotFound(job_id, queue)
    state, num_ahead, eta_ms, needs_model = reply
    return Position(
        state=text(state),
        num_ahead=None if num_ahead < 0 else num_ahead,
        eta_s=None if eta_ms < 0 else eta_ms / 1000,
        needs_model=bool(needs_model),
    )


def batch_status(batch: str, queue: str, reply: list[int] | None) -> BatchStatus:
    """Return the counts of a batch. Raises BatchNotFound."""
    if reply is None:
        raise BatchNotFound(batch, queue)
    *counts, eta_ms, redriven = reply
    names = BatchStatus.__struct_fields__[1:-2]
    eta_s = None if eta_ms < 0 else eta_ms / 1000
    return BatchStatus(batch=batch, **dict(zip(names, counts, strict=True)), eta_s=eta_s, redriven=redriven)


def rejected_entries(reply: list[Entry]) -> list[RejectedEntry]:
    return [_rejected_entry(at, fields) for at, fields in reply]


def _rejected_entry(at: bytes, fields: dict[bytes, bytes]) -> RejectedEntry:
    error = fields.get(b"error", b"")
    try:
        decoded = _decode_error(error)
    except msgspec.MsgspecError:  # longer than what is kept
        decoded = JobError(kind="invalid_request", message=text(error))
    raw = text(fields.get(b"raw", b""))
    at_ms = int(at.partition(b"-")[0])
    return RejectedEntry(rejected_ms=at_ms, id=text(fields.get(b"id", b"")) or None, error=decoded, raw=raw)


def stream_entries(reply: Any) -> list[Entry]:
    """Return the entries in the reply to an XREAD of one stream."""
    return list(reply[0][1]) if reply else []


def job(job_id: str, queue: str, reply: list[Any] | None) -> Job:
    """Return the job in the reply of the script `get`. Raises JobNotFound."""
    if reply is None:
        raise JobNotFound(job_id, queue)
    try:
        return _job(job_id, reply)
    except CORRUPT as error:
        raise corrupt(job_id, queue, error) from error


def _job(job_id: str, reply: list[Any]) -> Job:
    state, attempt, created, started, ended, trimmed, entries, *details = reply
    meta, batch, redrive_of, redriven_as, num_retries, deadline, due, engine, tenant, num_tokens = details
    found = [Output(one) for one in trimmed]
    terminal: dict[bytes, bytes] = {}
    for _, flat in entries:
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        if b"state" in fields:
            terminal = fields
        else:
            found[int(fields.get(b"index", 0))].add(fields)
    reason, error = terminal.get(b"reason"), terminal.get(b"error")
    finish_reason = reason.decode() if reason else None
    reasons = terminal[b"reasons"].decode().split() if b"reasons" in terminal else [finish_reason] * len(found)
    stops = _decode_stop_reasons(terminal[b"stop_reasons"]) if b"stop_reasons" in terminal else [None] * len(found)
    outputs = [_completion(index, one, reasons[index], stops[index]) for index, one in enumerate(found)]
    return Job(
        id=job_id,
        state=state.decode(),
        text=outputs[0].text,
        token_ids=outputs[0].token_ids,
        outputs=outputs,
        finish_reason=finish_reason,
        stop_reason=outputs[0].stop_reason,
        content=outputs[0].content,
        reasoning=outputs[0].reasoning,
        tool_calls=outputs[0].tool_calls,
        usage=_usage(terminal),
        error=_decode_error(error) if error else None,
        timings=Timings(
            created_ms=int(created),
            started_ms=_time(started),
            first_token_ms=_time(terminal.get(b"first_token", b"")),
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
        engine=text(engine) or None,
        tenant=text(tenant) or "default",
        num_tokens=max(num_tokens, sum(len(one.token_ids) for one in outputs)),
        prompt_logprobs=decode_prompt(prompt) if (prompt := terminal.get(b"prompt_logprobs")) else None,
    )


class Output:
    """Joins the output of a candidate: what was trimmed from its job's stream, and events."""

    def __init__(self, trimmed: Sequence[bytes]) -> None:
        """`trimmed`: an array of the script `trimmed`."""
        text, tokens, logprobs, parts = trimmed
        self._texts = [text.decode()]
        self._parts = list(map(_decode_chat, parts.splitlines())) if parts else [ChatOutput(content=self._texts[0])]
        self._is_split = bool(parts)
        """Whether the engine has split any of the text into parts. Otherwise it is content."""
        self.token_ids = unpack_tokens(tokens)
        lines = logprobs.splitlines()[: len(self.token_ids)]
        self.logprobs = decode_tokens(join_tokens(lines)) if lines else []

    def add(self, fields: Mapping[bytes, bytes]) -> None:
        """Append an event."""
        text = fields[b"text"].decode()
        self._texts.append(text)
        self._parts.append(_parts(fields, text))
        self._is_split |= b"chat" in fields
        self.token_ids += _decode_token_ids(fields[b"tokens"])
        if b"logprobs" in fields:
            self.logprobs += decode_tokens(fields[b"logprobs"])

    def text(self) -> str:
        return "".join(self._texts)

    def parts(self) -> ChatOutput:
        content = "".join(parts.content or "" for parts in self._parts) or (None if self._is_split else "")
        reasoning = "".join(parts.reasoning or "" for parts in self._parts) or None
        calls = [call for parts in self._parts for call in parts.tool_calls]
        return ChatOutput(content=content, reasoning=reasoning, tool_calls=calls)


def _parts(fields: Mapping[bytes, bytes], text: str) -> ChatOutput:
    """Return what an event with this text adds to the parts of the output."""
    return _decode_chat(fields[b"chat"]) if b"chat" in fields else ChatOutput(content=text)


def _completion(
    index: int, output: Output, finish_reason: str | None, stop_reason: int | str | None
) -> CompletionOutput:
    parts = output.parts()
    return CompletionOutput(
        index=index,
        text=output.text(),
        token_ids=output.token_ids,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        content=parts.content,
        reasoning=parts.reasoning,
        tool_calls=parts.tool_calls,
        logprobs=output.logprobs or None,
        cumulative_logprob=cumulative(output.logprobs) if output.logprobs else None,
    )


def _meta(raw: bytes) -> dict[str, Any] | None:
    """Return None also for invalid JSON of another client, so that the job can still be read."""
    try:
        return _decode_meta(raw) if raw else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def stream_event(entry: Entry) -> StreamEvent:
    """Return the event in an entry of a result stream, as XREAD returns it."""
    at, fields = entry[0].decode(), entry[1]
    offset = int(fields[b"offset"])
    if state := fields.get(b"state"):
        reason, error = fields.get(b"reason"), fields.get(b"error")
        return StreamEvent(
            id=at,
            offset=offset,
            token_ids=[],
            text="",
            state=state.decode(),
            finish_reason=reason.decode() if reason else None,
            finish_reasons=fields.get(b"reasons", b"").decode().split(),
            usage=_usage(fields),
            error=_decode_error(error) if error else None,
        )
    token_ids = _decode_token_ids(fields[b"tokens"])
    index = int(fields.get(b"index", 0))
    logprobs = decode_tokens(fields[b"logprobs"]) if b"logprobs" in fields else None
    text = fields[b"text"].decode()
    parts = _parts(fields, text)
    return StreamEvent(
        id=at,
        offset=offset,
        token_ids=token_ids,
        text=text,
        index=index,
        content=parts.content or None,
        reasoning=parts.reasoning,
        tool_calls=parts.tool_calls,
        logprobs=logprobs,
    )


def position_of(entry: Entry) -> int:
    """Return how many tokens, of all candidates, are in the events before an entry of a result stream."""
    fields = entry[1]
    return int(fields.get(b"position") or fields[b"offset"])


def cancelled(job_id: str, queue: str, reply: bytes | None) -> str:
    """Return the outcome of the script `cancel`. Raises JobNotFound."""
    if reply is None:
        raise JobNotFound(job_id, queue)
    return text(reply)


def check_deleted(job_id: str, queue: str, reply: bytes | None) -> None:
    """Read the outcome of the script `delete`. Raises JobNotFound, and QueueError for a job that has not ended."""
    if reply is None:
        raise JobNotFound(job_id, queue)
    if reply != b"deleted":
        raise QueueError(f"job {job_id!r} is {text(reply)}: only a job that has ended can be deleted; cancel it first")


def all_redriven(job_ids: Sequence[str], found: Sequence[list[bytes] | None]) -> dict[str, str]:
    """Return the new id, by old id, of each job that was redriven."""
    outcomes = {job_id: decode_list(reply) for job_id, reply in zip(job_ids, found, strict=True) if reply is not None}
    return {job_id: new_id for job_id, (outcome, new_id) in outcomes.items() if outcome in ("created", "exists")}


def redriven(job_id: str, queue: str, reply: list[bytes] | None) -> str:
    """Return the id of the redrive. Raises JobNotFound and CannotRedrive."""
    if reply is None:
        raise JobNotFound(job_id, queue)
    outcome, detail = decode_list(reply)
    match outcome:
        case "created" | "exists":
            return detail
        case "refused":
            raise CannotRedrive(
                f"job {job_id!r} is {detail}: only a job that has failed, expired or been cancelled can be run again"
            )
        case "no id":
            raise CannotRedrive(
                f"job {job_id!r}: its id is too long for <id>.r<n>; submit the request again with another id"
            )
    raise CannotRedrive(f"job {job_id!r} never had a valid request; submit a corrected one")


def is_terminal(state: bytes | None) -> bool:
    return state is not None and text(state) in TERMINAL_STATES


def _usage(terminal: dict[bytes, bytes]) -> Usage | None:
    if b"prompt_tokens" not in terminal:
        return None
    return Usage(**{name: int(terminal.get(name.encode(), 0)) for name in Usage.__struct_fields__})


def _time(field: bytes) -> int | None:
    return int(field) if field else None
