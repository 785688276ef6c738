"""The calls of clients, and an engine's writes, as Redis commands: pure functions that sync and async callers share.

The functions of `replies` read the replies. Each script's header documents its arguments, reply and transition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from hashlib import sha256

import msgspec

from millrace.results.keys import QueueKeys
from millrace.results.logprobs import LazyJson
from millrace.results.messages import (
    Append,
    Begin,
    EngineId,
    Event,
    Finish,
    JobError,
    NewOutput,
    Release,
    Submission,
    Write,
)
from millrace.results.scripts import Argument, Command, command, script_command
from millrace.results.tokens import pack_tokens

WATCH_TTL_MS = 30_000
MAX_BODY_START = 2048
"""Bytes of a body that are read to show how its prompt begins."""
MAX_REJECTED_BYTES = 4096
"""How much of a rejected inbox entry is kept for a person to look at."""

_encode_json = msgspec.json.Encoder().encode


def submit(keys: QueueKeys, submissions: Iterable[Submission]) -> Command:
    sent = [*_submit_start(keys.prefix)]
    for submission in submissions:
        sent += _job_arguments(submission)
    return tuple(sent)


@lru_cache(maxsize=64)
def _submit_start(prefix: str) -> Command:
    return script_command("submit", prefix)


def _command_of(script: str) -> Callable[[QueueKeys, str], Command]:
    """Make the function for a script that takes one id."""
    return lambda keys, name: script_command(script, keys.prefix, name)


get = _command_of("get")
cancel = _command_of("cancel")
delete = _command_of("delete")
redrive = _command_of("redrive")
position = _command_of("position")
trimmed = _command_of("trimmed")
batch_status = _command_of("batch")


def watch(keys: QueueKeys, job_id: str) -> Command:
    return script_command("watch", keys.prefix, job_id, WATCH_TTL_MS)


def pause(keys: QueueKeys, is_paused: bool) -> Command:
    return script_command("pause", keys.prefix, "1" if is_paused else "")


def settings(keys: QueueKeys) -> Command:
    return command("HGETALL", keys.settings)


def waiting(keys: QueueKeys) -> Command:
    return command("HGETALL", keys.waiting)


def set_settings(keys: QueueKeys, values: Mapping[str, float]) -> Command:
    return command("HSET", keys.settings, *(each for pair in values.items() for each in pair))


def reset_settings(keys: QueueKeys, names: Iterable[str]) -> Command:
    return command("HDEL", keys.settings, *names)


def sleep(keys: QueueKeys, level: int, engine_id: str | None) -> Command:
    return script_command("sleep", keys.prefix, level, engine_id or "")


def reset_cache(keys: QueueKeys, engine_id: str | None) -> Command:
    return script_command("reset_cache", keys.prefix, engine_id or "")


def batch_members(keys: QueueKeys, batch: str, first: int, count: int) -> Command:
    return command("LRANGE", keys.members(batch), first, first + count - 1)


def dead(keys: QueueKeys, first: int, count: int) -> Command:
    return command("ZRANGE", keys.dead, first, first + count - 1)


def last_dead(keys: QueueKeys, count: int) -> Command:
    return command("ZRANGE", keys.dead, 0, count - 1, "REV")


def state(keys: QueueKeys, job_id: str) -> Command:
    return command("HGET", keys.job(job_id), "state")


def body_start(keys: QueueKeys, job_id: str) -> Command:
    return command("GETRANGE", keys.body(job_id), 0, MAX_BODY_START - 1)


def look_up(keys: QueueKeys, job_id: str) -> Command:
    return command("HMGET", keys.job(job_id), "state", "batch", "redriven_as", "error_kind")


def stats(keys: QueueKeys) -> Command:
    return script_command("stats", keys.prefix)


def list_jobs(keys: QueueKeys, in_state: str, limit: int) -> Command:
    return script_command("list", keys.prefix, in_state, limit)


def last_entry(stream: str) -> Command:
    return last_entries(stream, 1)


def last_entries(stream: str, count: int, end: str = "+") -> Command:
    """Read the last entries, the newest first. `end` is the last id, or "(" and the id before which they are."""
    return command("XREVRANGE", stream, end, "-", "COUNT", count)


def first_entry(stream: str) -> Command:
    return command("XRANGE", stream, "-", "+", "COUNT", 1)


def read_stream(stream: str, after: str, count: int, block_ms: int | None) -> Command:
    """Read entries after an id. With `block_ms`, wait that long for the first one."""
    blocking: tuple[Argument, ...] = () if block_ms is None else ("BLOCK", max(1, block_ms))
    return command("XREAD", "COUNT", count, *blocking, "STREAMS", stream, after)


def accept(keys: QueueKeys, entry_id: str, submission: Submission) -> Command:
    return script_command("accept", keys.prefix, entry_id, *_job_arguments(submission))


def reject(keys: QueueKeys, entry_id: str, job_id: str | None, raw: bytes, error: JobError) -> Command:
    digest, shown = sha256(raw).hexdigest(), raw[:MAX_REJECTED_BYTES]
    return script_command("reject", keys.prefix, entry_id, job_id or "", digest, shown, _encode_json(error))


def write(keys: QueueKeys, item: Write, now_s: float) -> Command:
    """`now_s`: when the write is sent (`time.monotonic`)."""
    match item:
        case Append():
            outputs: list[Argument] = []
            for one in item.outputs:
                shown, details = _event_arguments(one.event)
                outputs += (*_output_arguments(one), *shown, _json(one.logprobs), *details)
            return script_command("append", keys.prefix, item.job_id, item.lease, item.fingerprint, *outputs)
        case Begin():
            return script_command("begin", keys.prefix, item.job_id, item.lease)
        case Finish():
            error = _encode_json(item.error) if item.error else b""
            usage = (item.usage.prompt_tokens, item.usage.completion_tokens, item.usage.cached_tokens)
            reasons = " ".join([item.finish_reason, *item.finish_reasons])
            events: list[Argument] = []
            for event in item.events:
                shown, details = _event_arguments(event)
                events += (_suffix(event.index), *shown, *details)
            retryable = "1" if item.is_retryable else ""
            age_ms = "" if item.first_token_s is None else int((now_s - item.first_token_s) * 1000)
            stops = _encode_json(item.stop_reasons) if item.stop_reasons else b""
            end = (item.state, reasons, *usage, error, retryable, age_ms, _json(item.prompt_logprobs), stops)
            return script_command("finish", keys.prefix, item.job_id, item.lease, *end, *events)
        case Release():
            outputs = [value for one in item.outputs for value in (*_output_arguments(one), _json(one.logprobs))]
            release = (item.job_id, item.lease, item.fingerprint, item.delay_ms)
            return script_command("release", keys.prefix, *release, *outputs)


def wait_for_signal(keys: QueueKeys, engine_id: EngineId, timeout_s: float, include_wake: bool) -> Command:
    lists = (keys.signals(engine_id), keys.wake) if include_wake else (keys.signals(engine_id),)
    return command("BLPOP", *lists, max(timeout_s, 0.001))  # 0 would wait without end


def _job_arguments(job: Submission) -> Command:
    streamed = "1" if job.is_streamed else ""
    digest = f"{job.digest}-{job.prompt_digest}" if job.prompt_digest else job.digest
    numbers = str(job.cost), str(job.seed), job.tenant, str(job.priority)
    return (job.job_id, digest, job.body, *numbers, streamed, _options(job))


def _options(job: Submission) -> bytes:
    """Return the rarely used options as one JSON object; empty without any."""
    has_time = job.delay_ms or job.run_at_ms is not None or job.deadline_ms is not None
    if not has_time and job.max_retries is None and job.meta is None and job.batch is None and job.n == 1:
        return b""
    options: dict[str, int | str | None] = {
        "delay_ms": job.delay_ms or None,
        "run_at_ms": job.run_at_ms,
        "deadline_ms": job.deadline_ms,
        "max_retries": job.max_retries,
        "meta": None if job.meta is None else job.meta.decode(),
        "batch": job.batch,
        "n": job.n if job.n > 1 else None,
    }
    return _encode_json({name: value for name, value in options.items() if value is not None})


def _output_arguments(output: NewOutput) -> tuple[Argument, ...]:
    return _suffix(output.index), output.offset, pack_tokens(output.token_ids)


def _json(lazy: LazyJson | None) -> bytes:
    return lazy.read() if lazy else b""


def _suffix(index: int | None) -> str:
    return "" if index is None else f":{index}"


def _event_arguments(event: Event | None) -> tuple[tuple[Argument, ...], tuple[bytes, bytes]]:
    """Return what every event has, and its log-probabilities and parts of a chat."""
    if event is None:
        return ("", "", "", ""), (b"", b"")
    shown = event.offset, len(event.token_ids), _encode_json(event.token_ids), event.text
    return shown, (_json(event.logprobs), b"" if event.chat is None else _encode_json(event.chat))
