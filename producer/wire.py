"""The wire format of a request: one flat JSON object with the fields of the request and of its sampling parameters.

The canonical body has sorted keys, no defaults, and no id, which is the job's key. Only the keys in messages and tools keep
their order: a template shows it to the model. The queue keeps the body. Two submissions under one id are the same job if the
SHA-256 of their bodies is equal.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections import Counter
from hashlib import sha256
from itertools import islice
from typing import Any

import msgspec

from millrace.producer.checks import MAX_COMMAS, few_parts, is_deeper, remedy
from millrace.producer.errors import InvalidRequest, PayloadTooLarge
from millrace.producer.prompt_start import prompt_digest
from millrace.producer.request import ID_PATTERN, GenerationRequest
from millrace.producer.sampling import SamplingParams
from millrace.results.errors import shown
from millrace.results.messages import DEFAULT_RETRIES, JobId, Submission
from millrace.results.replies import Outcome

MAX_BODY_BYTES = 1024 * 1024
DEFAULT_COST_TOKENS = 1024
"""Assumed output of a request without max_tokens, for its cost."""
BYTES_PER_TOKEN = 4
MAX_DEPTH = 64
"""Levels of objects and lists in a body, itself included. Without this limit, the depth that a parser accepts depends on its
caller's stack, so one parser might refuse what another one accepted."""

_REQUEST_FIELDS = [field for field in msgspec.structs.fields(GenerationRequest) if field.name != "sampling"]
_REQUEST_NAMES = [field.name for field in _REQUEST_FIELDS]
_SAMPLING_NAMES = SamplingParams.__struct_fields__

# The fields of GenerationRequest and of SamplingParams side by side. Its decoder checks no types: the two classes do, so an
# error reads the same for a request in Python and in JSON.
_FlatRequest = msgspec.defstruct(
    "_FlatRequest",
    [
        (
            one.name,
            Any,
            msgspec.field(default_factory=one.default_factory) if one.default is msgspec.NODEFAULT else one.default,
        )
        for one in (*_REQUEST_FIELDS, *msgspec.structs.fields(SamplingParams))
    ],
    frozen=True,
    forbid_unknown_fields=True,
)
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_FlatRequest)
_encoder = msgspec.json.Encoder(order="sorted")
_ORDERED_FIELDS = ("messages", "tools")


# --- out -----------------------------------------------------------------------------------------------------------


def to_submission(request: GenerationRequest, *, batch: str | None = None) -> Submission:
    """Return the request in the form of the queue, with a random id and seed if it has none. Raises PayloadTooLarge."""
    body = canonical_body(request)
    if len(body) > MAX_BODY_BYTES:
        raise PayloadTooLarge(len(body), MAX_BODY_BYTES)
    seed, drawn = request.sampling.seed, os.urandom(24)  # one call of the system for id and seed
    return Submission(
        job_id=JobId(request.id or drawn[:16].hex()),
        body=body,
        digest=sha256(body).hexdigest(),
        prompt_digest=prompt_digest(body),
        cost=estimate_cost(request),
        seed=int.from_bytes(drawn[16:], "little") >> 1 if seed is None else seed,
        tenant=request.tenant,
        priority=request.priority,
        is_streamed=request.stream,
        delay_ms=_milliseconds(request.delay_s) or 0,
        run_at_ms=_milliseconds(request.run_at),
        deadline_ms=_milliseconds(request.deadline_s),
        max_retries=None if request.max_retries == DEFAULT_RETRIES else request.max_retries,
        meta=None if request.meta is None else _encoder.encode(request.meta),
        batch=batch,
        n=request.sampling.n,
    )


def canonical_body(request: GenerationRequest) -> bytes:
    try:
        fields: dict[str, Any] = msgspec.to_builtins(request)
        fields.pop("id", None)
        fields |= fields.pop("sampling", {})
        fields |= {name: msgspec.Raw(msgspec.json.encode(fields[name])) for name in _ORDERED_FIELDS if name in fields}
        body = _encoder.encode(fields)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest("messages", f"cannot be written as JSON: {error}") from error
    _check_parts(body)
    if request.messages is not None or request.meta is not None:  # nothing else is deep
        _check_depth(body)
    return body


def _check_parts(body: bytes) -> None:
    wrong = few_parts(body)
    if wrong and _num_prompt_ids(body) > MAX_COMMAS // 2:  # beside little else
        rule = f"has too many token ids; at most {MAX_COMMAS:,} are allowed, other numbers and fields included"
        raise InvalidRequest("prompt_token_ids", rule)
    if wrong:
        raise InvalidRequest("body", wrong)


def _num_prompt_ids(body: bytes) -> int:
    """Return about how many token ids a body has that is not parsed."""
    start = body.find(b'"prompt_token_ids"')
    return 0 if start < 0 else body.count(b",", start, body.find(b"]", start))


def _check_depth(body: bytes) -> None:
    """Raise InvalidRequest if a body, which must be JSON, is nested deeper than MAX_DEPTH."""
    if is_deeper(body, MAX_DEPTH):
        raise _too_deep()


def _too_deep() -> InvalidRequest:
    return InvalidRequest("body", f"is nested too deeply; at most {MAX_DEPTH} levels of objects and lists are allowed")


def refusal(job_id: str, outcome: Outcome) -> InvalidRequest | None:
    """Return the error for a job that is invalid or oversized; None for another outcome.

    A checked request can only be invalid because of its times: the server compares run_at with its own clock.
    """
    if outcome.kind == "oversized":
        limit, value = outcome.name, outcome.limit
        rule = (
            f"the prompt and n x max_tokens of job {job_id!r} are more tokens than the queue's limit {limit}, {value}"
        )
        return InvalidRequest("max_tokens", f"{rule}; ask for fewer, or raise {limit} in the queue's settings")
    if outcome.kind != "invalid":
        return None
    if outcome.name == "deadline_ms":
        return InvalidRequest("deadline_s", f"is over before job {job_id!r} may start; see its run_at")
    return InvalidRequest(outcome.name, f"of job {job_id!r} is refused by the scripts of the queue")


def _milliseconds(seconds: float | None) -> int | None:
    """Round up, so that a deadline is never 0."""
    return None if seconds is None else math.ceil(seconds * 1000)


def estimate_cost(request: GenerationRequest) -> int:
    """Return the expected number of tokens, prompt and output, of a request that is not tokenized yet."""
    if request.prompt is not None:
        num_bytes = len(request.prompt) if request.prompt.isascii() else len(request.prompt.encode())
    elif request.messages is not None:
        num_bytes = len(_encoder.encode(request.messages))
        if request.tools is not None:
            num_bytes += len(_encoder.encode(request.tools))
    else:
        num_bytes = BYTES_PER_TOKEN * len(request.prompt_token_ids or [])
    sampling = request.sampling
    return -(-num_bytes // BYTES_PER_TOKEN) + (sampling.max_tokens or DEFAULT_COST_TOKENS) * sampling.n


# --- in ------------------------------------------------------------------------------------------------------------


def parse_body(raw: bytes) -> GenerationRequest:
    """Return the request in a JSON body. Raises InvalidRequest with the invalid field, or "body"."""
    if len(raw) > MAX_BODY_BYTES:
        raise PayloadTooLarge(len(raw), MAX_BODY_BYTES)
    _check_parts(raw)
    try:
        flat = _decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _invalid_field(error) from error
    except RecursionError as error:
        raise _too_deep() from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if not_finite := _NOT_FINITE.search(raw):
            raise InvalidRequest(not_finite[1].decode(), "must be a finite number; NaN is not JSON") from error
        raise InvalidRequest("body", f"is not valid JSON in UTF-8: {decoding_reason(raw, error)}") from error
    # Unlike `SamplingParams(...)`, this does not look for unknown names.
    sampling = msgspec.StructMeta.__call__(SamplingParams, **{name: getattr(flat, name) for name in _SAMPLING_NAMES})
    _check_depth(raw)
    check_names(raw)
    return GenerationRequest(sampling=sampling, **{name: getattr(flat, name) for name in _REQUEST_NAMES})


def decoding_reason(raw: bytes, error: Exception) -> str:
    """Return the decoder's message. For half a surrogate pair it would say that the text is cut off."""
    with contextlib.suppress(ValueError, RecursionError):
        if _SURROGATE.search(raw) and not isinstance(error, UnicodeDecodeError) and json.loads(raw):
            return "a string has half of a surrogate pair, such as \\ud800"
    return str(error)


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NOT_FINITE = re.compile(rb'"(\w{1,40})"\s*:\s*-?(?:NaN|Infinity)\b')


def usable_id(raw: bytes) -> JobId | None:
    """Return the valid top-level id of a body that `parse_body` refuses, or None. The failure is recorded under it."""
    try:
        candidate = msgspec.json.decode(raw, type=_IdOnly).id
    except msgspec.ValidationError:
        return None  # JSON, but no object, or its id is no string
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        candidate = _id_in_broken_json(raw)
    return JobId(candidate) if candidate and re.fullmatch(ID_PATTERN, candidate) else None


class _IdOnly(msgspec.Struct):
    id: str | None = None


def _id_in_broken_json(raw: bytes) -> str | None:
    depth = 0
    for token in islice(_STRING_OR_BRACKET.finditer(raw), _MAX_TOKENS):
        if token[0] in b"{[":
            depth += 1
        elif token[0] in b"}]":
            depth -= 1
        elif depth == 1 and token[0] == b'"id"' and (value := _ID_VALUE.match(raw, token.end())):
            return value[1].decode()
        if depth < 1 or (token[0] == b"[" and depth == 1):  # not, or no longer, in the top-level object
            return None
    return None


_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
_ID_VALUE = re.compile(rb'\s*:\s*"([!-~]{1,128}?)"')
_MAX_TOKENS = 10_000
"""Strings and brackets in which an id is searched for, so that a body of brackets alone takes no time."""


_UNKNOWN_FIELD = "Object contains unknown field `"


def _invalid_field(error: msgspec.ValidationError) -> InvalidRequest:
    if str(error).startswith(_UNKNOWN_FIELD):
        name = str(error)[len(_UNKNOWN_FIELD) : -1]
        if not name:
            return InvalidRequest("body", "has a field without a name; leave it out")
        known = [*_REQUEST_NAMES, *_SAMPLING_NAMES]
        return InvalidRequest(name, f"is not a field of a request; {remedy(name, known)}")
    message, _, path = str(error).partition(" - at `$.")
    if path:  # a number that no type holds
        return InvalidRequest(re.split(r"[`.\[]", path)[0], f"{message[0].lower()}{message[1:]}")
    return InvalidRequest("body", f"must be a JSON object: {message}")


def check_names(raw: bytes) -> None:
    """Raise InvalidRequest if an object in this JSON has a name twice."""
    # This decoder keeps one of the names that are equal. An escaped colon is the only one that is not in `raw`.
    if msgspec.json.encode(msgspec.json.decode(raw)).count(b":") != raw.count(b":") or b"\\u003" in raw:
        _refuse_repeated_names(raw)


def _refuse_repeated_names(raw: bytes) -> None:
    """Raise InvalidRequest for a name that an object has twice: the typed decoder silently takes the last value."""

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            ((name, _),) = Counter([name for name, _ in pairs]).most_common(1)
            raise InvalidRequest(name or "body", f"the name {shown(name)} is given twice; leave one of them out")
        return found

    try:
        json.loads(raw, object_pairs_hook=check)
    except InvalidRequest:
        raise
    except (ValueError, RecursionError) as error:  # what only this parser refuses
        raise InvalidRequest("body", f"cannot be read: {error}") from error
