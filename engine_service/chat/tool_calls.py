"""Read the tool calls in a text, in the form of a model's family.

A text that does not follow the form stays content: nothing is lost, and nothing is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

from millrace.engine_service.chat.output_format import HERMES, HERMES_END, LLAMA, MISTRAL
from millrace.engine_service.chat.schemas import named_types
from millrace.results.messages import FunctionCall

MAX_BROKEN_CALLS = 8
"""After so many calls that cannot be read the rest is content. Each attempt may read the whole text."""

_NAME = r"[^\s\[\]{}<>;,]{1,256}"
"""Of a function, without what separates calls. Names with combining marks, as in Hindi, or with emoji have characters that
are not in `\\w`."""
_MISTRAL_NAME = re.compile(rf"\s*({_NAME})(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*")
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"\s*[;,]?\s*")
_QWEN_NAME = re.compile(r"\s*<function=([^<>\n]{1,256})>\s*")
_QWEN_ARGUMENT = re.compile(
    r"<parameter=([^<>\n]{1,256})>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.DOTALL
)
_QWEN_END = "</function>"
_GLM_NAME = re.compile(rf"\s*({_NAME})\s*")
_GLM_ARGUMENT = re.compile(
    r"<arg_key>([^<>\n]{1,256})</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|</tool_call>)", re.DOTALL
)
_IN_PYTHON = {"True": True, "False": False, "None": None}

Items: TypeAlias = list[str | FunctionCall]
"""Content and calls in their order."""
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The schemas of the arguments, by the names of the functions."""


class ReadCall(Protocol):
    def __call__(self, text: str, start: int, tools: Tools, /, *, is_whole: bool) -> tuple[FunctionCall | None, int]:
        """Return the call whose mark is at `start`, and where it ends; None, and the end of the mark, if it cannot be read.
        The end of a whole text ends a call, too, where the call shows that it is complete."""


def _read_hermes(text: str, start: int, tools: Tools, /, *, is_whole: bool) -> tuple[FunctionCall | None, int]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""
    begin = start + len(HERMES)
    value, end = _json_at(text, begin)
    return _ended(_call_in(value), text, begin, end, is_whole=is_whole)


def _read_qwen(text: str, start: int, tools: Tools, /, *, is_whole: bool) -> tuple[FunctionCall | None, int]:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>"""
    begin = start + len(HERMES)
    call, end = _tagged_call(_QWEN_NAME, _QWEN_ARGUMENT, text, begin, tools)
    if not text.startswith(_QWEN_END, end):
        return None, begin
    return _ended(call, text, begin, end + len(_QWEN_END), is_whole=is_whole)


def _read_glm(text: str, start: int, tools: Tools, /, *, is_whole: bool) -> tuple[FunctionCall | None, int]:
    """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>: only the end shows the last one."""
    begin = start + len(HERMES)
    call, end = _tagged_call(_GLM_NAME, _GLM_ARGUMENT, text, begin, tools)
    return _ended(call, text, begin, end, is_whole=False)


def _tagged_call(
    name: re.Pattern[str], argument: re.Pattern[str], text: str, at: int, tools: Tools
) -> tuple[FunctionCall | None, int]:
    """Return the call with arguments between tags at `at`, and the end of the last one; None without a name."""
    if (head := name.match(text, at)) is None:
        return None, at
    at, arguments, schema = head.end(), {}, tools.get(head[1], {})
    properties = schema.get("properties")
    while found := argument.match(text, at):
        key, at = found[1], found.end()
        types = named_types(properties.get(key), schema) if isinstance(properties, dict) else set()
        arguments[key] = _untagged(found[2], types)
    return _call_in({"name": head[1], "arguments": arguments}), at


def _untagged(text: str, types: set[str]) -> Any:
    """Return an argument between tags: a string where its schema allows one or names no type, and otherwise JSON. Templates
    write true, false and null also as Python does."""
    word = text.strip()
    is_null = "null" in types and word in ("null", "None")
    if not is_null and (not types or "string" in types):
        return text
    try:
        return _IN_PYTHON[word] if word in _IN_PYTHON else _decoder.decode(word)
    except (ValueError, RecursionError):
        return text


def _ended(
    call: FunctionCall | None, text: str, begin: int, end: int, *, is_whole: bool
) -> tuple[FunctionCall | None, int]:
    end = _skip(_SPACE, text, end)
    if call is None or not ((is_whole and end == len(text)) or text.startswith(HERMES_END, end)):
        return None, begin
    return call, min(len(text), end + len(HERMES_END))


def _split_llama(text: str, tools: Tools) -> Items:
    """{"name": ..., "parameters": {...}} as the whole message or behind <|python_tag|>; several are separated by ";". As
    the whole message it may be an answer, too: without arguments it has to name one of the tools."""
    content, mark, rest = text.partition(LLAMA)
    if not mark:
        content, rest = "", text
    calls, at = Items(), _skip(_SPACE, rest, 0)
    while at < len(rest):
        value, end = _json_at(rest, at)
        call = _call_in(value)
        if call is None or not (mark or call.name in tools or value.keys() & {"arguments", "parameters"}):
            return [text]
        calls.append(call)
        at = _skip(_SEPARATOR, rest, end)
    return [content, *calls] if calls else [text]


def _split_mistral(text: str, tools: Tools) -> Items:
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
    at = kept = 0
    while match := _MISTRAL_NAME.match(rest, at):
        value, end = _json_at(rest, match.end())
        if (call := _call_in({"name": match[1], "arguments": value} if isinstance(value, dict) else None)) is None:
            break
        calls.append(call)
        kept = at = _skip(_SPACE, rest, end)
        if not rest.startswith(MISTRAL, at):
            break
        at += len(MISTRAL)
    return [content, *calls, rest[kept:]] if calls else [text]


class Family(NamedTuple):
    """How a family of models writes calls."""

    mark: str
    """What begins a call in a text."""
    begin: re.Pattern[str]
    """How a call goes on behind its mark, as far as a text has it. A mark before anything else is content."""
    read: ReadCall | None = None
    """Reads a call that ends with </tool_call>; None: only the end of the text shows whether there are calls."""
    split_rest: Callable[[str, Tools], Items] | None = None
    """In place of `read`: reads all calls of a text that has ended."""
    may_begin_with: str | None = None
    """What begins a call at the beginning of a text."""

    def split(self, text: str, tools: Tools, num_broken: int) -> Items:
        """Return the content and the calls of a text that has ended. `num_broken`: calls before it that cannot be read."""
        if self.split_rest is not None:
            return self.split_rest(text, tools)
        assert self.read is not None
        items, kept, at = Items(), 0, 0
        while num_broken < MAX_BROKEN_CALLS and (start := text.find(self.mark, at)) >= 0:
            call, at = self.read(text, start, tools, is_whole=True)
            if call is None:
                num_broken += 1
                continue
            items += [text[kept:start], call]
            kept = at
        return [*items, text[kept:]]


_MISTRAL_BEGIN = re.compile(rf"\s*(?:\Z|[{{\[]|{_NAME}\s*(?:\Z|[{{\[]))")
FAMILIES = {
    "hermes": Family(HERMES, re.compile(r"\s*(?:\Z|\{)"), _read_hermes),
    "qwen3_coder": Family(HERMES, re.compile(r"\s*(?:\Z|<(?:\Z|f))"), _read_qwen),
    "glm45": Family(HERMES, re.compile(rf"\s*(?:\Z|{_NAME}\s*(?:\Z|<))"), _read_glm),
    "llama3_json": Family(LLAMA, re.compile(r"\s*(?:\Z|\{)"), split_rest=_split_llama, may_begin_with="{"),
    "mistral": Family(MISTRAL, _MISTRAL_BEGIN, split_rest=_split_mistral),
}


def named_call(name: str, arguments: str) -> FunctionCall | None:
    """Return the call of this function; None if the arguments are no JSON object."""
    value, end = _json_at(arguments, 0)
    if value is None or _skip(_SPACE, arguments, end) < len(arguments):
        return None
    return _call_in({"name": name, "arguments": value})


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


_decoder = json.JSONDecoder(parse_constant=_refuse, strict=False)
"""Models write line ends within strings as they are."""
