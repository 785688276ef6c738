"""From an RQ job's payload to a submission.

RQ stores a call as zlib(serializer([function name, instance, args, kwargs])). RQ's default serializer is pickle, and to
unpickle is to run code of anybody who can write to Redis. So a payload that is not JSON is refused and not opened.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from millrace.producer.checks import few_parts
from millrace.producer.errors import InvalidRequest
from millrace.producer.wire import MAX_BODY_BYTES, parse_body, to_submission
from millrace.results.errors import shown
from millrace.results.messages import Submission

FUNCTION = "millrace.generate"
MAX_PAYLOAD_BYTES = 8 * MAX_BODY_BYTES
"""After decompression. RQ's JSON writes a character outside ASCII as \\uXXXX, up to three times its size in the body."""

_NOT_JSON = (
    "the payload is not JSON and was not opened: Millrace never unpickles. "
    'Enqueue with Queue(name, connection=..., serializer="json")'
)


class PayloadRefused(Exception):
    """Raised when an RQ job's payload is not a valid request; the message is for the producer."""


def read_submission(job_id: str, payload: bytes | None) -> Submission:
    """Return the submission that an RQ job's payload asks for, with this id. Raises PayloadRefused."""
    fields = _fields(*_read_call(_inflate(payload)))
    try:
        return to_submission(parse_body(_as_json({**fields, "id": job_id})))
    except InvalidRequest as error:
        raise PayloadRefused(f"invalid_request: {error}") from error


def _inflate(payload: bytes | None) -> bytes:
    """Inflate a payload, up to a limit: a few KB can become gigabytes."""
    if not payload:
        raise PayloadRefused("the RQ job has no payload")
    try:
        plain = zlib.decompressobj().decompress(payload, MAX_PAYLOAD_BYTES + 1)
    except zlib.error:
        plain = payload  # RQ, too, accepts a payload that is not compressed
    if len(plain) > MAX_PAYLOAD_BYTES:
        raise PayloadRefused(f"the payload is larger than {MAX_PAYLOAD_BYTES} bytes; it was not opened")
    return plain


def _read_call(plain: bytes) -> tuple[Any, Any, Any, Any]:
    if wrong := few_parts(plain):
        raise PayloadRefused(f"the payload {wrong}")
    try:
        call = json.loads(plain)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        is_text = plain.lstrip()[:1] in (b"[", b"{")
        raise PayloadRefused(f"the payload is not JSON that can be read: {error}" if is_text else _NOT_JSON) from error
    if not isinstance(call, list) or len(call) != 4:
        raise PayloadRefused("the payload is JSON, but not [function name, instance, args, kwargs] as RQ writes it")
    return call[0], call[1], call[2], call[3]


def _fields(function: Any, instance: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    if function != FUNCTION or instance is not None:
        raise PayloadRefused(f'this queue runs "{FUNCTION}" and nothing else, not {shown(function)}')
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise PayloadRefused("the payload's args must be a list and its kwargs an object")
    if "id" in kwargs:
        raise PayloadRefused("id: the job has the id of the RQ job; choose it with enqueue(..., job_id=...)")
    if not args:
        return kwargs
    if len(args) > 1 or not isinstance(args[0], str):
        raise PayloadRefused(f"{FUNCTION} takes one positional argument, the prompt, a string; name the others")
    if "prompt" in kwargs:
        raise PayloadRefused("prompt: is given twice, by position and by name")
    return {"prompt": args[0], **kwargs}


def _as_json(fields: dict[str, Any]) -> bytes:
    try:
        return json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair: escaped, it reaches the check that names its field
        return json.dumps(fields).encode()
