"""Render a chat with the model's chat template, a program in Jinja. Results are those of transformers."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2.ext
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from millrace.engine_service.errors import ConfigurationError, EngineError
from millrace.results.errors import one_line, shown

MAX_TEXT_CHARS = 4 * 1024 * 1024
"""Four times the largest request: a template that makes more of it does not end."""

_PROBE = "\ue000CONTENT"
_END_OF_MESSAGE = "\ue000END_OF_MESSAGE "
"""Marks where the last message ends, to cut off there what the template adds. A template may strip the space."""


class TextError(EngineError):
    """Raised when the chat template can't render a chat; the message is for the sender."""


class ChatTemplate(msgspec.Struct, frozen=True):
    """The chat templates of a model."""

    sources: dict[str, str]
    """By name: "default", and perhaps "tool_use" for chats with tools."""
    variables: dict[str, Any] = {}
    """What every chat has besides its own variables: the special tokens, such as `bos_token`."""

    def source(self, *, has_tools: bool) -> str:
        """Return the template for a chat. Raises `TextError` if there is none."""
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self.sources:
                return self.sources[name]
        raise TextError("the model has no chat template; send a prompt, or start the engine with --chat-template FILE")


class Chat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a template makes a prompt of. The fields are those of a request."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


def render(template: ChatTemplate, chat: Chat) -> str:
    """Return the prompt of a chat, with all special tokens. Raises what the template raises, and `TextError`."""
    source = template.source(has_tools=chat.tools is not None)
    compiled = compile_template(source)
    messages = [_plain(message) for message in chat.messages]
    if chat.continue_final_message:
        messages[-1]["content"] += _END_OF_MESSAGE
    texts = frozenset(each for each in template.variables.items() if isinstance(each[1], str))
    if _reads_parts_only(source, texts):
        messages = [{**message, "content": _as_parts(message["content"])} for message in messages]
    variables = {
        **template.variables,
        "documents": None,
        **chat.chat_template_kwargs,
        "messages": messages,
        "tools": chat.tools,
        "add_generation_prompt": chat.add_generation_prompt,
    }
    text = _text_of(compiled, variables)
    return _cut_behind_last_message(text) if chat.continue_final_message else text


def _text_of(compiled: jinja2.Template, variables: dict[str, Any]) -> str:
    """Return what a template makes of these variables. Raises `TextError` if that has no end."""
    pieces, num_chars = [], 0
    for piece in compiled.generate(variables):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_TEXT_CHARS:
            raise TextError(f"the text has more than {MAX_TEXT_CHARS:,} characters")
    return "".join(pieces)


def template_source(given: Any) -> str:
    """Return the source of a chat template that is given as a text, which has {{ or {%, or as a file. Raises
    `ConfigurationError` if it is neither or not valid."""
    if isinstance(given, str) and ("{{" in given or "{%" in given):
        return _valid(given, "")
    rule = "must be a text in Jinja, which has {{ or {%, or a file with one"
    if not isinstance(given, str | Path):
        raise ConfigurationError(f"chat_template: {rule}, got {shown(given)}")
    return read_template(given, rule)


def read_template(file: str | Path, rule: str = "must be a file with a Jinja template") -> str:
    """Return the chat template in a file. Raises `ConfigurationError` if it cannot be read or is not valid. `rule`: what it
    must be, for the error."""
    try:
        source = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:  # also for a NUL in the name, or the ~ of an unknown user
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"chat_template: {rule}, got {one_line(repr(str(file)), 120)}: {reason}") from error
    return _valid(source, f"{file} ")


def _valid(source: str, name: str) -> str:
    try:
        compile_template(source)
    except TextError as error:
        raise ConfigurationError(f"chat_template: {name}is not a valid Jinja template: {error}; correct it") from error
    return source


@lru_cache(maxsize=8)
def compile_template(source: str) -> jinja2.Template:
    """Return the template as a program. Raises `TextError` if it is not valid."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TextError(f"line {error.lineno}: {error.message}") from error


@lru_cache(maxsize=8)
def _reads_parts_only(source: str, variables: frozenset[tuple[str, Any]]) -> bool:
    """Whether a template leaves out a content that is a string, and prints one that is a list of parts: some templates of
    models that take images do. `variables`: the special tokens."""
    compiled = compile_template(source)

    def prints(content: Any) -> bool:
        messages = [{"role": "user", "content": content}]
        with contextlib.suppress(Exception):  # a template may raise anything
            return _PROBE in _text_of(
                compiled, {**dict(variables), "messages": messages, "add_generation_prompt": False}
            )
        return False

    return not prints(_PROBE) and prints(_as_parts(_PROBE))


def _as_parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


class _Generation(jinja2.ext.Extension):
    """The block {% generation %}, which marks the assistant's text for training. It prints its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, this one does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TextError(str(message))


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message in the form that templates know: null left out, text parts joined, arguments as objects. Each
    message has a content, as with vLLM: templates concatenate it."""
    found = {name: value for name, value in message.items() if value is not None}
    if isinstance(found.setdefault("content", ""), list):
        found["content"] = "\n".join(part["text"] for part in found["content"])
    reasoning = next((found[name] for name in ("reasoning_content", "reasoning", "thinking") if name in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    if calls := found.pop("tool_calls", None):
        found["tool_calls"] = [{**call, "function": _with_object(call["function"])} for call in calls]
    return found


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # the template gets what else a model wrote as it is
            arguments = json.loads(arguments)
    return {**function, "arguments": arguments}


def _cut_behind_last_message(text: str) -> str:
    at = text.rfind(_END_OF_MESSAGE.strip())
    if at < 0:
        raise TextError("the template leaves out the last message, so it cannot be continued")
    return text[:at] if text.startswith(_END_OF_MESSAGE, at) else text[:at].rstrip()
