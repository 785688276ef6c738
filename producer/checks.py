"""Checks of values. A check takes a value and returns None, or what is wrong with it: the text after the field's name."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import msgspec

from millrace.producer.errors import InvalidRequest
from millrace.results.errors import shown

Check = Callable[[Any], str | None]

MAX_COUNT = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_OBJECT_BYTES = 16 * 1024
MAX_PARTS = 30_000
"""Strings (including names), lists and objects in a JSON text. Parsing each one blocks the other threads of an engine."""
MAX_NAMES = 25_000
"""Names of fields in all objects together. The search for a repeated name takes longest."""
MAX_COMMAS = 200_000
"""Outside strings. They bound the numbers; a body of 1 MiB has room for fewer token ids of five digits."""

FieldChecks = Mapping[str, tuple[object, Check]]
"""By name the default, or what makes it, and the check of each field."""


def field_checks(kind: type[msgspec.Struct]) -> FieldChecks:
    """Return the checks that annotate the fields of a Struct, which must have `repr_omit_defaults`."""
    hints = get_type_hints(kind, include_extras=True)
    annotated = [field for field in msgspec.structs.fields(kind) if get_origin(hints[field.name]) is Annotated]
    defaults = (one.default_factory if one.default is msgspec.NODEFAULT else one.default for one in annotated)
    return {one.name: (each, hints[one.name].__metadata__[0]) for one, each in zip(annotated, defaults, strict=True)}


def check_fields(made: msgspec.Struct, checks: FieldChecks) -> list[str]:
    """Check the fields of a new object. Return the names of those that were checked. Raises InvalidRequest.

    Fields that have their default are not checked: most fields of most requests. Values with one meaning get one form, so
    that they are equal on the wire: a default that was given explicitly, also as None, and an integer for a number.
    """
    checked: list[str] = []
    # Every request comes here, and this call finds the fields without their default five times as fast as a loop.
    for name, value in made.__rich_repr__():
        if name not in checks:
            continue
        default, check = checks[name]
        wrong = check(value)
        if wrong and value is None:
            msgspec.structs.force_setattr(made, name, default() if callable(default) else default)
            continue
        checked.append(name)
        if wrong and type(value).__module__ == "numpy":  # one of its numbers, or an array
            value = value.tolist()
            wrong = check(value)
            msgspec.structs.force_setattr(made, name, value)
        if wrong:
            raise InvalidRequest(name, wrong)
        if value == default:
            msgspec.structs.force_setattr(made, name, default)
        elif type(default) is float:
            msgspec.structs.force_setattr(made, name, float(value))
    return checked


def integer(low: int, high: int) -> Check:
    rule = f"must be an integer from {low} to {high}"

    def check(value: Any) -> str | None:
        return None if type(value) is int and low <= value <= high else f"{rule}, got {shown(value)}"

    return check


def number(low: float, high: float, *, above_low: bool = False, remedies: Mapping[type, str] = {}) -> Check:
    """A finite number in [low, high], or with `above_low` in (low, high]. `remedies`: what to do with objects of a type."""
    bounds = f"above {low:g}" if above_low else f"from {low:g}"
    rule = f"must be a number {bounds} up to {high:g}" if high < math.inf else f"must be a finite number {bounds}"
    most = min(high, sys.float_info.max)

    def check(value: Any) -> str | None:
        # Compare without a conversion: an integer may be too large for a float. NaN is within no bounds.
        fits = type(value) in (int, float) and (low < value if above_low else low <= value) and value <= most
        return None if fits else f"{rule}, got {shown(value)}{remedies.get(type(value), '')}"

    return check


def boolean(value: Any) -> str | None:
    return None if type(value) is bool else f"must be true or false, got {shown(value)}"


def text(value: Any) -> str | None:
    """A non-empty string that can be encoded as UTF-8."""
    if type(value) is not str or not value:
        return f"must be a string that is not empty, got {shown(value)}"
    if value.isascii():
        return None
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return (
            f"cannot be encoded as UTF-8: character {error.start} is half of a surrogate pair, or was an invalid byte"
        )
    return None


def texts(value: Any) -> str | None:
    """A list of non-empty strings."""
    if type(value) is not list:
        return f"must be a list of strings, got {shown(value)}"
    return next((f"item {i} {wrong}" for i, item in enumerate(value) if (wrong := text(item))), None)


def token_ids(value: Any) -> str | None:
    """A list of token ids. Only the engine knows whether the model has them."""
    if type(value) is not list:
        return f"must be a list of token ids, got {shown(value)}"
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKEN_ID):
        wrong = next(item for item in value if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID)
        return f"must be a list of integers from 0 to {MAX_TOKEN_ID}, has {shown(wrong)}"
    return None


def mapping(value: Any) -> str | None:
    return None if type(value) is dict else f"must be an object, got {shown(value)}"


def json_value(value: Any) -> str | None:
    """Check that JSON returns the value unchanged: it turns NaN into null, a tuple into a list, and a date into a string."""
    try:
        is_same = bool(msgspec.json.decode(msgspec.json.encode(value)) == value)
    except RecursionError:
        return "is nested too deeply"
    except Exception as error:  # also from an object's own comparison
        return f"cannot be written as JSON: {error}"
    return None if is_same else "has what JSON cannot hold, such as NaN, bytes, a tuple or a key that is not a string"


def small_object(value: Any) -> str | None:
    """An object of at most MAX_OBJECT_BYTES as JSON."""
    if wrong := mapping(value) or json_value(value):
        return wrong
    num_bytes = len(msgspec.json.encode(value))
    limit = f"has {num_bytes} bytes as JSON; at most {MAX_OBJECT_BYTES} are allowed"
    return limit if num_bytes > MAX_OBJECT_BYTES else None


def matching(pattern: str) -> Check:
    compiled = re.compile(pattern)

    def check(value: Any) -> str | None:
        if type(value) is str and compiled.fullmatch(value):
            return None
        return f"must match {pattern}, got {shown(value)}"

    return check


def optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def few_parts(text: bytes) -> str | None:
    """A JSON text of at most MAX_PARTS strings, lists and objects, MAX_NAMES, and MAX_COMMAS between values."""
    if _has_few_parts(text) or _has_few_parts(_outline(text)):
        return None
    limits = f"{MAX_PARTS:,} strings, lists and objects, {MAX_NAMES:,} names or {MAX_COMMAS:,} commas between values"
    return f"has more than {limits}; shorten it"


def _has_few_parts(text: bytes) -> bool:
    """What strings contain is counted too."""
    if len(text) <= MAX_NAMES:  # the least of the limits; most bodies are this short
        return True
    num_parts = text.count(b'"') // 2 + text.count(b"[") + text.count(b"{")
    return num_parts <= MAX_PARTS and text.count(b":") <= MAX_NAMES and text.count(b",") <= MAX_COMMAS


def is_deeper(text: bytes, max_depth: int) -> bool:
    """Return whether a text, which must be JSON that `few_parts` accepts, has more than `max_depth` levels of objects and
    lists."""
    if text.count(b"[") + text.count(b"{") <= max_depth:
        return False  # the usual case
    brackets = _outline(text).translate(_BRACKETS_ALIKE, delete=_NO_BRACKETS)
    return max(accumulate(map((92).__sub__, brackets)), default=0) > max_depth  # "[" is 91, "]" is 93


def _outline(text: bytes) -> bytes:
    """Return a JSON text with empty strings. What follows the first MAX_PARTS strings may stay."""
    # A regular expression that matches each string takes longer, and so does a split of a million quotes.
    parts = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"', 2 * MAX_PARTS + 2)
    return b'""'.join(parts[::2])


_BRACKETS_ALIKE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def remedy(name: str, known: Iterable[str]) -> str:
    """Return what to do with an unknown name: use the known one of this meaning or the most similar one, or leave it out."""
    from difflib import get_close_matches

    if name in _LEFT_OUT:
        return f"{_LEFT_OUT[name]}; leave it out"
    if name in _OTHER_NAMES:
        return f"use {_OTHER_NAMES[name]}"
    known = tuple(known)
    if form := _FORM_NAMES.get(name):
        return _form_remedy(name, form, known)
    field, hint = _JOB_QUEUE_NAMES.get(name, ("", ""))
    if field in known:
        return f"use {field}, {hint}"
    similar = get_close_matches(name[:60], known, 1, 0.75)
    return f"did you mean {similar[0]}?" if similar else "leave it out"


def _form_remedy(name: str, form: str, known: Iterable[str]) -> str:
    if form in known:  # those of StructuredOutputs
        return f"use {form}"
    instead = f'structured_outputs={{"{form}": {"True" if form == "json_object" else "..."}}}'
    if "structured_outputs" not in known:
        instead = f"SamplingParams({instead})"
    return f"only the client's submit takes it; use {instead}" if name == "response_model" else f"use {instead}"


_LEFT_OUT = {
    "chat_template": "the operator of the engine chooses the template",
    "disable_any_whitespace": "outputs have no white space anyway",
}
_FORM_NAMES = {
    **dict.fromkeys(("guided_json", "json", "json_schema", "schema", "response_schema", "response_model"), "json"),
    **dict.fromkeys(("response_format", "output_format", "text_format", "format"), "json"),
    **dict.fromkeys(("guided_decoding", "guided_options_request"), "json"),
    **dict.fromkeys(("guided_json_object", "json_object", "response_mime_type"), "json_object"),
    **dict.fromkeys(("guided_regex", "regex"), "regex"),
    **dict.fromkeys(("guided_choice", "choice", "choices"), "choice"),
    **dict.fromkeys(("guided_grammar", "grammar"), "grammar"),
    "structural_tag": "structural_tag",
}
"""Names that ask for a form of the output, in other APIs and of our own class, and its field in `structured_outputs`."""
_OTHER_NAMES = {
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs, with their number",
    "custom_id": "id, or run-batch for a file in OpenAI's batch format",
    **dict.fromkeys(("num_predict", "n_predict"), "max_tokens"),
    "num_return_sequences": "n",
    "do_sample": "temperature=0 for greedy decoding",
    **dict.fromkeys(("options", "extra_body"), "its fields as fields of the request"),
    "system": "a message with the role system",
    "num_ctx": "the engine's option max_model_len",
}
"""Names of OpenAI's API, which only `run-batch` takes, of older versions of vLLM, and of Ollama, llama.cpp and transformers,
and ours."""
_JOB_QUEUE_NAMES = {
    "eta": ("run_at", "in seconds since the epoch"),
    "countdown": ("delay_s", "in seconds"),
    **dict.fromkeys(
        ("timeout", "time_limit", "soft_time_limit", "job_timeout", "expires"),
        ("deadline_s", "in seconds from the submission"),
    ),
}
"""Names of Celery and RQ, and ours with their units."""


class NamesUnknown(msgspec.StructMeta):
    """Makes the constructor of a struct raise `InvalidRequest` for an argument that it does not have, with a remedy."""

    if not TYPE_CHECKING:  # some type checkers would take it for the constructor, which takes anything

        def __call__(self, /, *args: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*args, **fields)
            except TypeError:
                for name in fields:
                    if name not in self.__struct_fields__:
                        rule = f"is not an argument of {self.__name__}; {self.remedy_for(name)}"
                        raise InvalidRequest(name, rule) from None
                raise

    def remedy_for(self, name: str) -> str:
        """What to write instead of `name`; a name of a nested struct's field is looked for there too."""
        for field, kind in get_type_hints(self).items():
            if isinstance(kind, NamesUnknown) and name in kind.__struct_fields__:
                return f"did you mean {field}={kind.__name__}({name}=...)?"
        return remedy(name, self.__struct_fields__)
