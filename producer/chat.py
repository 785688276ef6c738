"""Checks of the fields of a chat: messages, tools, and the variables of the chat template."""

from __future__ import annotations

from typing import Any

from millrace.producer.checks import json_value, small_object, text
from millrace.results.errors import shown

MAX_TOOLS = 1024

_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Variables of every chat template that have a field of their own."""
_MEDIA = frozenset({"images", "image", "image_url", "audio"})
"""What a message of other APIs may have beside its content. A template would drop it silently."""


def messages(value: Any) -> str | None:
    """A chat: a list of objects with role and content that is not empty."""
    if type(value) is not list or not value:
        return f"must be a list of objects with role and content that is not empty, got {shown(value)}"
    for i, message in enumerate(value):
        if wrong := _message(message):
            return f"item {i}{wrong}"
    return None


def _message(message: Any) -> str | None:
    if type(message) is not dict or set(map(type, message)) - {str}:
        return f" must be an object, got {shown(message)}"
    if wrong := text(message.get("role")):
        return f": role {wrong}"
    if set(map(type, message.values())) != {str}:
        if wrong := json_value(message):
            return f" {wrong}"
        if wrong := _tool_calls(message.get("tool_calls")):
            return f": tool_calls {wrong}"
    if not _MEDIA.isdisjoint(message):
        for name in sorted(_MEDIA & message.keys()):
            if message[name]:  # OpenAI's client writes audio as null
                return f": {name} is not supported, the model takes text; leave it out"
    content = message.get("content")
    if content is None:
        # That of an answer which ended while the model reasoned is null.
        may_lack = message.get("tool_calls") or (message["role"] == "assistant" and "content" in message)
        return None if may_lack else " has no content; give a string, '' for none"
    return _content(content)


def _content(content: Any) -> str | None:
    if type(content) is str:
        return None
    if type(content) is not list:
        return f": content must be a string or a list of text parts, got {shown(content)}"
    for i, part in enumerate(content):
        kind = part.get("type") if type(part) is dict else None
        if kind != "text":
            return f": content part {i} must have the type text, got {shown(part if kind is None else kind)}"
        if type(part.get("text")) is not str:
            return f": content part {i} must have a text, got {shown(part.get('text'))}"
    return None


def _tool_calls(calls: Any) -> str | None:
    if calls is None:
        return None
    if type(calls) is not list:
        return f"must be a list of tool calls, got {shown(calls)}"
    for i, call in enumerate(calls):
        function = call.get("function") if type(call) is dict else None
        if type(function) is not dict or call.get("type", "function") != "function":
            return f"item {i} must be an object of the type function with a function, got {shown(call)}"
        if wrong := text(function.get("name")):
            return f"item {i}: name {wrong}"
        if type(function.get("arguments", "")) not in (str, dict, type(None)):
            return f"item {i}: arguments must be an object, as JSON, got {shown(function['arguments'])}"
    return None


def tools(value: Any) -> str | None:
    """A list of functions in OpenAI's form."""
    if type(value) is not list or len(value) > MAX_TOOLS:
        return f"must be a list of at most {MAX_TOOLS:,} tools, got {shown(value)}"
    if wrong := json_value(value):
        return wrong
    for i, tool in enumerate(value):
        function = tool.get("function") if type(tool) is dict and tool.get("type") == "function" else None
        if type(function) is not dict:
            return f'item {i} must be {{"type": "function", "function": {{"name": ...}}}}, got {shown(tool)}'
        if wrong := text(function.get("name")):
            return f"item {i}: name {wrong}"
        if type(function.get("parameters")) not in (dict, type(None)):
            return f"item {i}: parameters must be an object, got {shown(function['parameters'])}"
        if type(function.get("strict")) not in (bool, type(None)):
            return f"item {i}: strict must be true or false, got {shown(function['strict'])}"
    return None


def tool_choice(value: Any) -> str | None:
    if type(value) is str and value in ("auto", "none", "required"):
        return None
    if type(value) is dict and value.keys() == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if type(function) is dict and function.keys() == {"name"} and type(function["name"]) is str:
            return None
    named = '{"type": "function", "function": {"name": ...}}'
    return f"must be auto, none, required or {named}, got {shown(value)}"


def template_kwargs(value: Any) -> str | None:
    """Variables for the chat template, without those that have a field of their own."""
    if wrong := small_object(value):
        return wrong
    for name in ("chat_template", "tokenize"):
        if name in value:
            return f"cannot set {name}; leave it out"
    for name in _RESERVED:
        if name in value:
            return f"cannot set {name}; use the request's field {name}"
    return None
