"""Read the tool calls in a text, in the form of a model's family.

A text that does not follow the form stays content: nothing is lost, and nothing is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias

from millrace.engine_service.chat.output_format import HERMES, HERMES_END, LLAMA, MISTRAL
from millrace.results.messages import FunctionCall

MAX_BROKEN_CALLS = 8
"""After so many calls that cannot be read the rest is content. Each attempt may read the whole text."""

_MISTRAL_NAME = re.compile(r"\s*([\w.:/-]{1,256})(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*")
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"\s*[;,]?\s*")

Items: TypeAlias = list[str | FunctionCall]
"""Content and calls in their order."""


def _split_hermes(text: str) -> Items:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times, with text around."""
    items, kept, at, num_broken = Items(), 0, 0, 0
    while num_broken < MAX_BROKEN_CALLS and (start := text.find(HERMES, at)) >= 0:
        call, at = hermes_call(text, start, is_whole=True)
        if call is None:
            num_broken += 1
            continue
        items += [text[kept:start], call]
        kept = at
    return [*items, text[kept:]]


def hermes_call(text: str, start: int, *, is_whole: bool) -> tuple[FunctionCall | None, int]:
    """Return the call whose mark is at `start`, and where it ends; None, and the end of the mark, if it cannot be read.
    The end of a whole text ends a call, too."""
    begin = start + len(HERMES)
    value, end = _json_at(text, begin)
    end, call = _skip(_SPACE, text, end), _call_in(value)
    if call is None or not ((is_whole and end == len(text)) or text.startswith(HERMES_END, end)):
        return None, begin
    return call, min(len(text), end + len(HERMES_END))


def _split_llama(text: str) -> Items:
    """{"name": ..., "parameters": {...}} as the whole message or behind <|python_tag|>; several are separated by ";"."""
    content, mark, rest = text.partition(LLAMA)
    if not mark:
        content, rest = "", text
    calls, at = Items(), _skip(_SPACE, rest, 0)
    while at < len(rest):
        value, end = _json_at(rest, at)
        if (call := _call_in(value)) is None:
            return [text]
        calls.append(call)
        at = _skip(_SEPARATOR, rest, end)
    return [content, *calls] if calls else [text]


def _split_mistral(text: str) -> Items:
    """[TOOL_CALLS] and a list of {"name": ..., "arguments": {...}}; newer models: [TOOL_CALLS]name[ARGS]{...}, repeated."""
    content, mark, rest = text.partition(MISTRAL)
    if not mark:
        return [text]
    value, end = _json_at(rest, 0)
    values = value if isinstance(value, list) else [value]
    calls = Items()
    if value is not None:
        calls += [call for each in values if (call := _call_in(each)) is not None]
        return [content, *calls, rest[end:]] if len(calls) == len(values) > 0 else [text]
    at = 0
    while match := _MISTRAL_NAME.match(rest, at):
        value, end = _json_at(rest, match.end())
        if (call := _call_in({"name": match[1], "arguments": value} if isinstance(value, dict) else None)) is None:
            break
        calls.append(call)
        at = _skip(_SPACE, rest, end)
        if not rest.startswith(MISTRAL, at):
            break
        at += len(MISTRAL)
    return [content, *calls, rest[at:]] if calls else [text]


class Family(NamedTuple):
    """How a family of models writes calls."""

    split: Callable[[str], Items]
    """Reads a whole text."""
    mark: str
    """What begins a call in a text."""
    end_mark: str | None = None
    """What ends each call; None: only the end of the text shows whether they are calls."""
    may_begin_with: str | None = None
    """What begins a call at the beginning of a text."""


FAMILIES = {
    "hermes": Family(_split_hermes, HERMES, HERMES_END),
    "llama3_json": Family(_split_llama, LLAMA, may_begin_with="{"),
    "mistral": Family(_split_mistral, MISTRAL),
}


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON object or list that begins at `at`, after white space, and its end; (None, at) without one."""
    start = _skip(_SPACE, text, at)
    if text[start : start + 1] not in ("{", "["):
        return None, at
    try:
        return _decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, at


def _call_in(value: Any) -> FunctionCall | None:
    """Return the call that an object describes, or None."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    try:
        if isinstance(arguments, str):
            arguments = _decoder.decode(arguments)
        if not isinstance(arguments := {} if arguments is None else arguments, dict):
            return None
        found = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        if not _is_unicode(found):
            found = json.dumps(arguments)
    except (ValueError, RecursionError):
        return None
    return FunctionCall(name=name, arguments=found) if _is_unicode(name) else None


def _is_unicode(text: str) -> bool:
    """Return whether the text has no half of a surrogate pair, which JSON can name and UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse)
