"""The fields of a chat in a request: what is refused, and by which name."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.producer import GenerationRequest, InvalidRequest
from millrace.producer.prompt_start import prompt_digest
from millrace.producer.wire import canonical_body, estimate_cost, parse_body
from tests.engine_service.chat.models import WEATHER

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ""},
        {"role": "user", "content": []},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]},
        assistant(content=None, tool_calls=[CALL]),
        assistant(content=None, reasoning="cut while it reasoned"),
        assistant(content=None),
        assistant(tool_calls=[{"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "f"}}]),
        assistant(content="a", tool_calls=None, reasoning_content="b"),
        assistant(content="a", audio=None, refusal=None),
        {"role": "user", "content": "a", "images": [], "date": "today"},
        {"role": "tool", "content": "1", "tool_call_id": "a", "name": "f"},
    ],
)
def test_messages_in_openais_forms_are_taken(message: dict[str, Any]) -> None:
    request = GenerationRequest(messages=[USER, message])
    assert parse_body(canonical_body(request)) == request


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user"}, "item 1 has no content; give a string, '' for none"),
        ({"role": "user", "content": None}, "item 1 has no content; give a string, '' for none"),
        ({"role": "assistant"}, "item 1 has no content; give a string, '' for none"),
        ({"role": "user", "content": 1}, "item 1: content must be a string or a list of text parts, got 1"),
        ({"role": "user", "content": ["a"]}, "item 1: content part 0 must have the type text, got 'a'"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "item 1: content part 0 must have the type text, got 'image_url'",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "item 1: content part 0 must have a text, got None"),
        (assistant(tool_calls=[]), "item 1 has no content"),
        (assistant(content="", tool_calls={}), "item 1: tool_calls must be a list"),
        (assistant(tool_calls=["f"]), "item 1: tool_calls item 0 must be an object of the type function"),
        (assistant(tool_calls=[{"function": {}}]), "item 1: tool_calls item 0: name must be a string"),
        (assistant(tool_calls=[{**CALL, "type": "custom"}]), "item 1: tool_calls item 0 must be an object of the type"),
        (
            assistant(tool_calls=[{"function": {"name": "f", "arguments": [1]}}]),
            r"item 1: tool_calls item 0: arguments must be an object, as JSON, got \[1\]",
        ),
        ({"role": "", "content": "a"}, "item 1: role must be a string"),
        *[
            ({"role": "user", "content": "a", name: value}, f"item 1: {name} is not supported, the model takes text")
            for name, value in [("images", ["iVBORw0KGgo="]), ("image", "a.png"), ("image_url", {"url": "data:"})]
        ],
        (assistant(content="a", audio={"id": "b"}), "item 1: audio is not supported, the model takes text"),
    ],
)
def test_a_wrong_message_is_refused_with_its_number(message: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^messages: {words}"):
        GenerationRequest(messages=[USER, message])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tools", {}, "must be a list of at most 1,024 tools"),
        ("tools", [WEATHER] * 1025, "must be a list of at most 1,024 tools"),
        ("tools", [{"type": "function"}], "item 0 must be"),
        ("tools", [{"type": "web_search", "function": {"name": "a"}}], "item 0 must be"),
        ("tools", [{"type": "function", "function": {"name": 1}}], "item 0: name must be a string"),
        ("tools", [{"type": "function", "function": {"name": "a", "parameters": 1}}], "item 0: parameters must be"),
        (
            "tools",
            [{"type": "function", "function": {"name": "a", "strict": 1}}],
            "item 0: strict must be true or false",
        ),
        ("tools", [{"type": "function", "function": {"name": "a", "x": float("nan")}}], "has what JSON cannot hold"),
        ("tool_choice", "required", "'required' needs `tools`; give some, or use auto or none"),
        ("tool_choice", {"type": "function", "function": {"name": "a"}}, ".* needs `tools`; give some"),
        ("tool_choice", {"type": "function", "function": {"name": 5}}, "must be auto, none, required or"),
        ("tool_choice", {"type": "function", "name": "a"}, "must be auto, none, required or"),
        ("tool_choice", "any", "must be auto, none, required or .*, got 'any'"),
        ("parallel_tool_calls", 1, "must be true or false"),
        ("add_generation_prompt", "yes", "must be true or false"),
        ("continue_final_message", True, "cannot be combined with add_generation_prompt; set that one to false"),
        ("chat_template_kwargs", [], "must be an object"),
        ("chat_template_kwargs", {"a": "x" * 20_000}, "has 20008 bytes as JSON; at most 16384 are allowed"),
        ("chat_template_kwargs", {"a": object()}, "cannot be written as JSON"),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}, "cannot set chat_template; leave it out"),
        ("chat_template_kwargs", {"tools": []}, "cannot set tools; use the request's field tools"),
    ],
)
def test_a_wrong_field_of_a_chat_is_refused_by_name(field: str, value: Any, words: str) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(InvalidRequest, match=f"^{field}: {words}") as error:
        GenerationRequest(messages=[USER], **fields)
    assert len(str(error.value)) < 500


def test_a_call_of_a_known_tool_can_be_required() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        request = GenerationRequest(messages=[USER], tools=[WEATHER], tool_choice=choice)
        assert parse_body(canonical_body(request)) == request
    named, form = {"type": "function", "function": {"name": "other"}}, {"type": "json_object"}
    with pytest.raises(InvalidRequest, match=r"^tool_choice: .*'other'.* names no tool of `tools`"):
        GenerationRequest(messages=[USER], tools=[WEATHER], tool_choice=named)
    with pytest.raises(InvalidRequest, match=r"^tool_choice: cannot be combined with response_format"):
        GenerationRequest(messages=[USER], tools=[WEATHER], tool_choice="required", response_format=form)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [WEATHER]),
        ("tool_choice", "none"),
        ("parallel_tool_calls", False),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("chat_template_kwargs", {"a": 1}),
    ],
)
def test_a_prompt_has_no_fields_of_a_chat(field: str, value: Any) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(InvalidRequest, match=f"^{field}: needs messages; leave it out for a prompt"):
        GenerationRequest(prompt="x", **fields)


def test_only_a_message_with_content_can_be_continued() -> None:
    message = assistant(tool_calls=[CALL])
    with pytest.raises(InvalidRequest, match=r"^continue_final_message: needs a last message with content"):
        GenerationRequest(messages=[message], add_generation_prompt=False, continue_final_message=True)


def test_the_template_is_not_for_a_request_to_choose() -> None:
    with pytest.raises(InvalidRequest, match=r"^chat_template: is not a field .*the operator of the engine chooses"):
        parse_body(b'{"messages":[{"role":"user","content":"a"}],"chat_template":"a"}')


def test_no_tools_and_no_variables_are_equal_on_the_wire_to_those_not_given() -> None:
    request = GenerationRequest(messages=[USER], tools=[], chat_template_kwargs={}, tool_choice="auto")
    assert canonical_body(request) == canonical_body(GenerationRequest(messages=[USER]))


def test_tools_count_in_the_cost() -> None:
    plain = estimate_cost(GenerationRequest(messages=[USER]))
    assert estimate_cost(GenerationRequest(messages=[USER], tools=[WEATHER])) > plain + 40


def test_chats_that_begin_alike_have_one_digest_whatever_stands_before_them() -> None:
    messages = [{"role": "system", "content": "You answer in one word. " * 20}, USER]
    plain = prompt_digest(canonical_body(GenerationRequest(messages=messages)))
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}, "tools": [WEATHER]}
    assert plain is not None
    assert prompt_digest(canonical_body(GenerationRequest(messages=messages, **fields))) == plain
    assert prompt_digest(canonical_body(GenerationRequest(messages=messages[::-1]))) != plain
