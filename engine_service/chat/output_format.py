"""Split the output of a chat into reasoning, content and tool calls, by the marks of the model's family.

A text that does not follow the family's form stays content: nothing is lost, and nothing is an error.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from millrace.results.messages import FunctionCall

if TYPE_CHECKING:  # it imports jinja2, and the names of the parsers are options of a service
    from millrace.engine_service.chat.template import ChatTemplate

THINKING_MARKS = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
"""The marks before and after reasoning, by parser. "auto" takes the first parser whose second mark the template has."""
TOOL_CALL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral")
REASONING_PARSERS = ("auto", "none", *THINKING_MARKS)

HERMES, HERMES_END = "<tool_call>", "</tool_call>"
_LLAMA = "<|python_tag|>"
MISTRAL, MISTRAL_ARGS, _MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MAX_BROKEN_CALLS = 8
"""After so many calls that cannot be read the rest is content. Each attempt may read the whole text."""

_MISTRAL_NAME = re.compile(r"\s*([\w.:/-]{1,256})(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*")
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"\s*[;,]?\s*")


class Parts(NamedTuple):
    """What an output consists of."""

    content: str | None
    reasoning: str | None
    tool_calls: list[FunctionCall]


class OutputFormat(NamedTuple):
    """How a model marks tool calls and reasoning: names of parsers, and None where it does not."""

    tool_calls: str | None = None
    reasoning: str | None = None
    has_args_mark: bool = False
    """For the family mistral: whether calls are [TOOL_CALLS]name[ARGS]{...}."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks. A tokenizer may have them as special tokens, which a text leaves out."""
        families = {"hermes": (HERMES, HERMES_END), "llama3_json": (_LLAMA,)}
        families["mistral"] = (MISTRAL, MISTRAL_ARGS, _MISTRAL_ID)
        return families.get(self.tool_calls or "", ()) + THINKING_MARKS.get(self.reasoning or "", ())

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Return whether the output continues reasoning: the end of the prompt, or its last message, opens it."""
        if self.reasoning is None:
            return False
        begin, end = THINKING_MARKS[self.reasoning]
        opened, closed = prompt.rfind(begin), prompt.rfind(end)
        return opened > closed or (self.reasoning == "deepseek_r1" and closed < 0)

    def split(self, text: str, *, begins_in_reasoning: bool = False, has_tools: bool = True) -> Parts:
        """Return the parts of an output. Takes time in proportion to its length."""
        reasoning = None
        if self.reasoning is not None:
            reasoning, text = _split_reasoning(text, *THINKING_MARKS[self.reasoning], begins_in_reasoning)
        calls: list[FunctionCall] = []
        if has_tools and self.tool_calls is not None:
            calls, text = _SPLITTERS[self.tool_calls](text)
        if calls:
            text = text.strip()
        return Parts(text or (None if calls or reasoning else ""), reasoning or None, calls)


def output_format(template: ChatTemplate, tool_calls: str = "auto", reasoning: str = "auto") -> OutputFormat:
    """Return the format with these parsers. "auto": the one whose marks are in the model's chat template."""
    source = "".join(template.sources.values())
    if tool_calls == "auto":
        has_headers = "<|start_header_id|>" in source and "tool_calls" in source
        families = {"hermes": HERMES in source, "mistral": MISTRAL in source}
        families["llama3_json"] = _LLAMA in source or has_headers
        tool_calls = next((name for name, is_family in families.items() if is_family), "none")
    if reasoning == "auto":
        reasoning = next((name for name, (_, end) in THINKING_MARKS.items() if end in source), "none")
    calls, thinking = (None if name == "none" else name for name in (tool_calls, reasoning))
    return OutputFormat(calls, thinking, has_args_mark=MISTRAL_ARGS in source)


def _split_reasoning(text: str, begin: str, end: str, begins_inside: bool) -> tuple[str | None, str]:
    start = text.lstrip()
    if start.startswith(begin):
        start = start[len(begin) :]
    elif not begins_inside:
        return None, text
    reasoning, _, rest = start.partition(end)
    return reasoning.strip(), rest.lstrip("\n")


def _split_hermes(text: str) -> tuple[list[FunctionCall], str]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times, with text around."""
    calls, content, kept, at, num_broken = list[FunctionCall](), "", 0, 0, 0
    while num_broken < _MAX_BROKEN_CALLS and (start := text.find(HERMES, at)) >= 0:
        at = start + len(HERMES)
        value, end = _json_at(text, at)
        end = _skip(_SPACE, text, end)
        call = _call_in(value)
        if call is None or not (end == len(text) or text.startswith(HERMES_END, end)):
            num_broken += 1
            continue
        calls.append(call)
        content += text[kept:start]
        kept = at = min(len(text), end + len(HERMES_END))
    return calls, content + text[kept:]


def _split_llama(text: str) -> tuple[list[FunctionCall], str]:
    """{"name": ..., "parameters": {...}} as the whole message or behind <|python_tag|>; several are separated by ";"."""
    content, mark, rest = text.partition(_LLAMA)
    calls, at = list[FunctionCall](), _skip(_SPACE, rest if mark else text, 0)
    if not mark:
        content, rest = "", text
    while at < len(rest):
        value, end = _json_at(rest, at)
        if (call := _call_in(value)) is None:
            return [], text
        calls.append(call)
        at = _skip(_SEPARATOR, rest, end)
    return (calls, content) if calls else ([], text)


def _split_mistral(text: str) -> tuple[list[FunctionCall], str]:
    """[TOOL_CALLS] and a list of {"name": ..., "arguments": {...}}; newer models: [TOOL_CALLS]name[ARGS]{...}, repeated."""
    content, mark, rest = text.partition(MISTRAL)
    if not mark:
        return [], text
    value, end = _json_at(rest, 0)
    values = value if isinstance(value, list) else [value]
    if value is not None:
        calls = [call for each in values if (call := _call_in(each)) is not None]
        return (calls, content + rest[end:]) if len(calls) == len(values) > 0 else ([], text)
    calls, at = [], 0
    while match := _MISTRAL_NAME.match(rest, at):
        value, end = _json_at(rest, match.end())
        if (call := _call_in({"name": match[1], "arguments": value} if isinstance(value, dict) else None)) is None:
            break
        calls.append(call)
        at = _skip(_SPACE, rest, end)
        if not rest.startswith(MISTRAL, at):
            break
        at += len(MISTRAL)
    return (calls, content + rest[at:]) if calls else ([], text)


_SPLITTERS = {"hermes": _split_hermes, "llama3_json": _split_llama, "mistral": _split_mistral}


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
