"""What becomes of an output: reasoning, content and tool calls."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.engine_service.chat.output_format import (
    THINKING_MARKS,
    OutputFormat,
    describe,
    output_format,
)
from millrace.engine_service.chat.output_splitter import OutputSplitter, Parts
from millrace.engine_service.chat.template import Chat, ChatTemplate, render
from millrace.engine_service.text import Tokenizer
from millrace.results.messages import FunctionCall
from tests.engine_service.chat.models import (
    FAMILIES,
    NO_PARAMETERS,
    NOTHING,
    TAGGED,
    check_cuts,
    model_with_template,
    split,
    template_of,
)

FORMATS = {family: output_format(template_of(family)) for family in (*FAMILIES, *TAGGED)}
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "[THINK]")
CALL = '{"name": "f", "arguments": {"a": 1}}'
OPENED_CALLS = ("<tool_call>\n<function=f>\n<parameter=a>", "<tool_call>f\n<arg_key>a</arg_key><arg_value>")
CLOSED_CALLS = ("</parameter>\n</function></tool_call>", "</arg_value>\n</tool_call>")

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3),
    max_leaves=5,
)
_text = st.text(st.characters(codec="utf-8"))
_call = st.tuples(
    st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True),
    st.dictionaries(_text | st.sampled_from(MARKS), _json, max_size=3),
)
_plain = st.text(st.characters(codec="utf-8", exclude_characters="<[{"), min_size=1).filter(
    lambda text: text == text.strip()
)


def test_a_family_is_recognized_by_the_marks_in_its_template() -> None:
    assert {
        "hermes": OutputFormat("hermes", "qwen3"),
        "llama3": OutputFormat("llama3_json", None),
        "mistral": OutputFormat("mistral", None),
        "qwen3_coder": OutputFormat("qwen3_coder", None),
        "glm45": OutputFormat("glm45", None),
    } == FORMATS
    assert output_format(ChatTemplate({"default": "{{ messages }}"})) == OutputFormat(None, None)
    assert output_format(ChatTemplate({}), "hermes", "deepseek_r1") == OutputFormat("hermes", "deepseek_r1")
    assert output_format(template_of("hermes"), "none", "none") == OutputFormat(None, None)


def test_the_log_says_how_chats_are_read_or_that_they_are_refused() -> None:
    form = OutputFormat("hermes", None)
    assert describe(form, template_of("hermes")) == "chats: tool calls are read as hermes, reasoning as none"
    assert describe(OutputFormat(), ChatTemplate({})) == "no chat template: chats are refused"


@settings(max_examples=150, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    calls=st.lists(_call, min_size=1, max_size=3),
    content=st.none() | _plain,
    reasoning=st.none() | _plain,
)
def test_calls_that_a_template_writes_are_read_back(
    family: str, calls: list[tuple[str, dict[str, Any]]], content: str | None, reasoning: str | None
) -> None:
    if family == "llama3":
        calls = calls[:1]
    message = {
        "role": "assistant",
        "content": content if family == "hermes" else None,
        "reasoning_content": reasoning if family == "hermes" else None,
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ],
    }
    user = {"role": "user", "content": "?"}
    prompt = render(template_of(family), Chat(messages=[user]))
    whole = render(template_of(family), Chat(messages=[user, message], add_generation_prompt=False))
    assert whole.startswith(prompt)
    output = whole[len(prompt) :].strip().removesuffix("<|im_end|>").removesuffix("<|eot_id|>").removesuffix("</s>")
    parts = split(FORMATS[family], output)
    assert [(call.name, json.loads(call.arguments)) for call in parts.tool_calls] == calls
    assert parts.content == message["content"]
    assert parts.reasoning == message["reasoning_content"]


def test_tools_whose_calls_are_in_no_known_form_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    unknown = ChatTemplate({"default": "{% if tools %}<seed:tool_call>{% endif %}"})
    assert output_format(unknown).tool_calls is None
    (record,) = caplog.records
    assert (record.levelno, "none of the known forms of tool calls" in record.message) == (logging.WARNING, True)
    output_format(unknown, "none")
    output_format(ChatTemplate({"default": "{{ messages }}"}))
    output_format(template_of("hermes"))
    assert len(caplog.records) == 1


_values = st.one_of(
    st.text(st.characters(codec="utf-8")).map(lambda value: ({"type": "string"}, value)),
    st.text(st.characters(codec="utf-8")).map(lambda value: ({}, value)),
    st.integers().map(lambda value: ({"type": "integer"}, value)),
    st.booleans().map(lambda value: ({"type": ["boolean", "null"]}, value)),
    st.none().map(lambda value: ({"anyOf": [{"type": "string"}, {"type": "null"}]}, value)),
    st.lists(_json, max_size=3).map(lambda value: ({"type": "array"}, value)),
    st.dictionaries(st.text(), _json, max_size=3).map(lambda value: ({"$ref": "#/$defs/any"}, value)),
)
_keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,19}", fullmatch=True)


@settings(max_examples=150, deadline=None)
@given(
    family=st.sampled_from(TAGGED),
    calls=st.lists(
        st.tuples(_keys, st.dictionaries(_keys, _values, max_size=3)),
        min_size=1,
        max_size=3,
        unique_by=lambda call: call[0],
    ),
    content=st.none() | _plain,
    cuts=st.lists(st.integers(0, 400), max_size=4),
)
def test_arguments_between_tags_have_the_types_of_the_schema(
    family: str, calls: list[tuple[str, dict[str, tuple[dict[str, Any], Any]]]], content: str | None, cuts: list[int]
) -> None:
    shared = {"any": {"type": "object"}}
    tools = {
        name: {"properties": {key: schema for key, (schema, _) in pairs.items()}, "$defs": shared}
        for name, pairs in calls
    }
    expected = [(name, {key: value for key, (_, value) in pairs.items()}) for name, pairs in calls]
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in expected
        ],
    }
    user = {"role": "user", "content": "?"}
    prompt = render(template_of(family), Chat(messages=[user]))
    whole = render(template_of(family), Chat(messages=[user, message], add_generation_prompt=False))
    assert whole.startswith(prompt)
    output = whole[len(prompt) :].removesuffix("<|im_end|>\n")
    parts = split(FORMATS[family], output, tools=tools)
    assert [(call.name, json.loads(call.arguments)) for call in parts.tool_calls] == expected
    assert parts.content == content
    check_cuts(FORMATS[family], output, cuts, tools=tools)


@settings(max_examples=300, deadline=None)
@example(format_=OutputFormat("glm45", None), pieces=["<tool_call>", ";", "</tool_call>"], begins=False)
@given(
    format_=st.sampled_from([*FORMATS.values(), OutputFormat("mistral", "mistral"), OutputFormat("hermes", None)]),
    pieces=st.lists(st.sampled_from([*MARKS, '{"name": "f", "arguments": {"a": 1}}', "{", "[", "]", "f", "\n", ";"])),
    begins=st.booleans(),
)
def test_whatever_a_model_writes_is_no_error_and_no_text_is_lost(
    format_: OutputFormat, pieces: list[str], begins: bool
) -> None:
    text = "".join(pieces)
    parts = split(format_, text, begins_in_reasoning=begins)
    found = (parts.content or "") + (parts.reasoning or "")
    of_calls = "".join(call.name + call.arguments for call in parts.tool_calls)
    assert (found + of_calls).count("f") == text.count("f")
    if not parts.tool_calls and not parts.reasoning and format_.reasoning is None:
        assert parts.content == (text or None)
    for call in parts.tool_calls:
        assert set(call.name) == {"f"}  # "ff" is a name that these pieces can make, too
        assert isinstance(json.loads(call.arguments), dict)


@settings(max_examples=600, deadline=None)
@given(
    format_=st.sampled_from(
        [
            *FORMATS.values(),
            OutputFormat("mistral", "mistral"),
            OutputFormat("hermes", None),
            OutputFormat(None, "qwen3"),
        ]
    ),
    pieces=st.lists(
        st.sampled_from(
            [
                *MARKS,
                '{"name": "f", "arguments": {"a": 1}}',
                '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {"a": "' + 9 * "</tool_call>" + '"}}</tool_call>',
                "</tool_call>" * 9,
                *OPENED_CALLS,
                *CLOSED_CALLS,
                *"{[]f<\n; ",
            ]
        )
    ),
    cuts=st.lists(st.integers(0, 400)),
    begins=st.booleans(),
    has_tools=st.booleans(),
)
def test_a_growing_output_has_the_parts_of_the_whole_wherever_it_is_cut(
    format_: OutputFormat, pieces: list[str], cuts: list[int], begins: bool, has_tools: bool
) -> None:
    check_cuts(format_, "".join(pieces), cuts, begins, NO_PARAMETERS if has_tools else None)


@pytest.mark.parametrize("num_marks", [1, 7, 8, 9, 20])
def test_marks_in_an_argument_do_not_make_cuts_differ(num_marks: int) -> None:
    call = '{"name": "f", "arguments": {"a": "' + num_marks * "</tool_call>" + '"}}'
    text = f"So: <tool_call>{call}</tool_call> and <tool_call>{CALL}</tool_call> done"
    check_cuts(FORMATS["hermes"], text, list(range(len(text))))


@pytest.mark.parametrize(
    ("family", "fed", "parts"),
    [
        ("hermes", ["<think>\nHm", " ", "mm</th"], [("", "Hm"), ("", ""), ("", " mm")]),
        ("hermes", ["<thi", "nk>a</think>\n", "\nb", " c"], [("", ""), ("", "a"), ("b", ""), (" c", "")]),
        ("hermes", ["Wait", ". <tool", "box", ">"], [("Wait", ""), (".", ""), (" <toolbox", ""), (">", "")]),
        ("hermes", ["1 <tool_call>\n", "x", " y"], [("1", ""), (" <tool_call>\nx", ""), (" y", "")]),
        ("hermes", ["1 <tool_call> {", "</tool_call> y"], [("1", ""), ("", "")]),
        ("hermes", ["<tool_call>x" * 8, f"<tool_call>{CALL}"], [("<tool_call>x" * 8, ""), (f"<tool_call>{CALL}", "")]),
        ("qwen3_coder", ["<tool_call>", "\n<", "b>x"], [("", ""), ("", ""), ("<tool_call>\n<b>x", "")]),
        ("glm45", ["<tool_call>", " is", " a", " tag"], [("", ""), ("", ""), ("<tool_call> is a", ""), (" tag", "")]),
        ("mistral", ["[TOOL_CALLS]", "is", " a"], [("", ""), ("", ""), ("[TOOL_CALLS]is a", "")]),
        ("llama3", ["<|python_tag|>", "print"], [("", ""), ("<|python_tag|>print", "")]),
        ("llama3", ["It", " is {1}"], [("It", ""), (" is {1}", "")]),
        ("mistral", ["It", " is [TOOL", "]"], [("It", ""), (" is", ""), (" [TOOL]", "")]),
    ],
)
def test_what_is_certain_does_not_wait(family: str, fed: list[str], parts: list[tuple[str, str]]) -> None:
    splitter = OutputSplitter(FORMATS[family], NO_PARAMETERS)
    found = [splitter.feed(text) for text in fed]
    assert [(one.content or "", one.reasoning or "") for one in found] == parts


def test_a_call_comes_when_its_end_does() -> None:
    splitter = OutputSplitter(FORMATS["hermes"], NO_PARAMETERS)
    assert splitter.feed(f"I add. <tool_call>{CALL}") == Parts("I add.", None, [])
    assert splitter.feed("\n</tool_call>\n<tool_call>") == Parts(None, None, [F])
    assert splitter.feed("{") == NOTHING
    assert splitter.end() == Parts(" \n<tool_call>{", None, [])


def test_a_splitter_that_is_dropped_keeps_no_schema_for_the_next_collection_of_cycles() -> None:
    """Schemas may be large, and the collector counts objects, not bytes."""
    gc.disable()
    try:
        splitter = OutputSplitter(FORMATS["hermes"], NO_PARAMETERS)
        splitter.feed(f"I add. <tool_call>{CALL}\n</tool_call> I")
        dropped = weakref.ref(splitter)
        del splitter
        assert dropped() is None
    finally:
        gc.enable()


def call_of(name: str, arguments: str) -> FunctionCall:
    return FunctionCall(name=name, arguments=arguments)


F = call_of("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", None, [F]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", None, [F, F]),
        (f"I look.\n<tool_call>{CALL}</tool_call> done", "I look.\n done", [F]),
        (f"  I look. <tool_call>{CALL}</tool_call>\n", "  I look.", [F]),
        (f"\n <tool_call>{CALL}</tool_call> done ", "done", [F]),
        (f"<tool_call>{CALL}", None, [F]),
        ('<tool_call>{"name": "f"}</tool_call>', None, [call_of("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', None, [call_of("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [F]),
        (f"<tool_call>broken</tool_call><tool_call>{CALL}</tool_call>", "<tool_call>broken</tool_call>", [F]),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\n\ty"}}</tool_call>', None, [
            call_of("f", '{"a": "x\\n\\ty"}')
        ]),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', None, [
            call_of("f", '{"a": "</tool_call>"}')
        ]),
    ],
)  # fmt: skip
def test_calls_between_tags(text: str, content: str | None, calls: list[FunctionCall]) -> None:
    assert split(FORMATS["hermes"], text) == Parts(content, None, calls)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"a": 1}',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        f"<tool_call>{CALL} and more</tool_call>",
        f"<tool_call>[{CALL}]</tool_call>",
        "<tool_call>" + '{"a":' * 100_000,
        "<tool_call>",
    ],
)
def test_a_call_that_cannot_be_read_stays_content(text: str) -> None:
    assert split(FORMATS["hermes"], text) == Parts(text, None, [])


def test_half_a_surrogate_pair_in_arguments_stays_escaped() -> None:
    (call,) = split(
        FORMATS["hermes"], '<tool_call>{"name": "f", "arguments": {"a": "\\ud800é"}}</tool_call>'
    ).tool_calls
    assert call.arguments == '{"a": "\\ud800\\u00e9"}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', None, [F]),
        ('\n <|python_tag|>{"name": "f", "parameters": {"a": 1}}', None, [F]),
        ('Wait. <|python_tag|>{"name": "f", "arguments": {"a": 1}}\n', "Wait.", [F]),
        (f"{CALL}; {CALL}", None, [F, F]),
        (f"{CALL}\n{CALL}", None, [F, F]),
        ('{"name": "f"}', None, [call_of("f", "{}")]),
        ('{"name": "g", "parameters": {"a": 1}}', None, [call_of("g", '{"a": 1}')]),
        ('<|python_tag|>{"name": "g"}', None, [call_of("g", "{}")]),
        ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        (f'{CALL}; {{"name": "Ada"}}', f'{CALL}; {{"name": "Ada"}}', []),
        (f"{CALL} and more", f"{CALL} and more", []),
        (f"So: {CALL}", f"So: {CALL}", []),
        ('{"town": "Rome"}', '{"town": "Rome"}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("", None, []),
    ],
)
def test_calls_of_llama(text: str, content: str | None, calls: list[FunctionCall]) -> None:
    assert split(FORMATS["llama3"], text) == Parts(content, None, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"[TOOL_CALLS][{CALL}]", None, [F]),
        (f"[TOOL_CALLS] [{CALL}, {CALL}]\n", None, [F, F]),
        (f"Wait.[TOOL_CALLS]{CALL}", "Wait.", [F]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}', None, [F]),
        ('[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]f[CALL_ID]x1[ARGS]{"a": 1}', None, [F, F]),
        ('[TOOL_CALLS]f{"a": 1} more', "more", [F]),
        *(
            (f'[TOOL_CALLS]{name}{mark}{{"a": 1}}', None, [FunctionCall(name=name, arguments='{"a": 1}')])
            for name in ("получить_погоду", "मौसम", "cafe\u0301", "😀", "f.g:h/i-1")
            for mark in ("", "[ARGS]", " ")
        ),
        ('[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{"a', '[TOOL_CALLS]g{"a', [F]),
        (f"[TOOL_CALLS] is a mark: [TOOL_CALLS][{CALL}]", "[TOOL_CALLS] is a mark:", [F]),
        ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        (f"[TOOL_CALLS][{CALL}, 1]", f"[TOOL_CALLS][{CALL}, 1]", []),
        ("[TOOL_CALLS]f", "[TOOL_CALLS]f", []),
        ("[1, 2]", "[1, 2]", []),
    ],
)
def test_calls_of_mistral(text: str, content: str | None, calls: list[FunctionCall]) -> None:
    assert split(FORMATS["mistral"], text) == Parts(content, None, calls)


@pytest.mark.parametrize(
    ("text", "begins", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nSeven.", False, "Hm.", "Seven."),
        ("Hm.\n</think>\n\nSeven.", True, "Hm.", "Seven."),
        ("Hm.\n</think>\n\nSeven.", False, None, "Hm.\n</think>\n\nSeven."),
        ("<think>\n\n</think>\n\nSeven.", False, None, "Seven."),
        ("<think>Hm", False, "Hm", None),
        ("Hm", True, "Hm", None),
        ("Hm", False, None, "Hm"),
        ("Seven. <think>Hm</think>", False, None, "Seven. <think>Hm</think>"),
        ("<think>Hm</think>", False, "Hm", None),
    ],
)
def test_reasoning_is_kept_apart(text: str, begins: bool, reasoning: str | None, content: str | None) -> None:
    assert split(FORMATS["hermes"], text, begins_in_reasoning=begins) == Parts(content, reasoning, [])
    assert split(OutputFormat("hermes", None), text) == Parts(text, None, [])


@pytest.mark.parametrize("marks", dict.fromkeys(THINKING_MARKS.values()))
def test_marks_that_a_thinking_budget_knows_are_reasoning_too(marks: tuple[str, str], tmp_path: Path) -> None:
    source, (begin, end) = "{{ messages }}{# <think> [THINK] " + marks[1] + " #}", marks
    assert split(output_format(ChatTemplate({"default": source})), f"{begin}Hm{end}7") == Parts("7", "Hm", [])
    tokenizer = Tokenizer(model_with_template(tmp_path / "model", source, marks))
    assert tokenizer.thinking_mark_ids == tuple(map(tokenizer.special_id, marks))


def test_a_call_counts_after_the_reasoning_and_not_in_it() -> None:
    text = f"<think>I say <tool_call>{CALL}</tool_call></think><tool_call>{CALL}</tool_call>"
    assert split(FORMATS["hermes"], text) == Parts(None, f"I say <tool_call>{CALL}</tool_call>", [F])


def test_without_tools_a_call_is_content() -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    assert split(FORMATS["hermes"], text, tools=None) == Parts(text, None, [])


@pytest.mark.parametrize(
    ("parser", "prompt", "state"),
    [
        ("qwen3", "<|im_start|>assistant\n", None),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "open"),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "closed"),
        ("qwen3", "What is <think>?<|im_end|>\n<|im_start|>assistant\n", None),
        ("qwen3", "What is </think>?<|im_end|>\n<|im_start|>assistant\n<think>", "open"),
        ("deepseek_r1", "<|Assistant|>", "open"),
        ("deepseek_r1", "What is </think>?<|Assistant|>", "open"),
        ("deepseek_r1", "<|Assistant|><think></think>", "closed"),
        ("mistral", "[INST]a[/INST]", None),
    ],
)
def test_the_prompt_may_open_the_reasoning(parser: str, prompt: str, state: str | None) -> None:
    assert OutputFormat(None, parser).reasoning_before(prompt, is_message=False) == state


@pytest.mark.parametrize(
    ("parser", "message", "state"),
    [
        ("qwen3", "So far", None),
        ("qwen3", "<think>\nSo far", "open"),
        ("qwen3", "<think>Hm</think>So far", "closed"),
        ("deepseek_r1", "So far", "open"),
    ],
)
def test_a_continued_message_may_be_in_its_reasoning(parser: str, message: str, state: str | None) -> None:
    assert OutputFormat(None, parser).reasoning_before(message, is_message=True) == state


QWEN = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
GLM = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
A1 = call_of("f", '{"a": "1"}')


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        ("qwen3_coder", f"I look.\n{QWEN}\n</tool_call> done", "I look.\n done", [A1]),
        ("qwen3_coder", f"{QWEN}\n", None, [A1]),
        ("qwen3_coder", "<tool_call><function=f></function></tool_call>", None, [call_of("f", "{}")]),
        ("qwen3_coder", QWEN.replace("1", "</parameter>1</tool_call>") + "</tool_call>", None, [
            call_of("f", '{"a": "</parameter>1</tool_call>"}')
        ]),
        ("qwen3_coder", QWEN.replace("</function>", ""), QWEN.replace("</function>", ""), []),
        ("qwen3_coder", f"<tool_call>x {QWEN}</tool_call>", "<tool_call>x", [A1]),
        ("glm45", f"I look.\n{GLM}</tool_call> done", "I look.\n done", [A1]),
        ("glm45", GLM, GLM, []),
        ("glm45", "<tool_call>f</tool_call>", None, [call_of("f", "{}")]),
        ("glm45", "<tool_call>मौसम</tool_call>", None, [call_of("मौसम", "{}")]),
        ("glm45", "<tool_call>f", "<tool_call>f", []),
        ("glm45", GLM.replace("\n", "") + "</tool_call>", None, [A1]),
        ("glm45", GLM.replace("1", "</tool_call>") + "</tool_call>", None, [call_of("f", '{"a": "</tool_call>"}')]),
    ],
)  # fmt: skip
def test_calls_with_arguments_between_tags(
    family: str, text: str, content: str | None, calls: list[FunctionCall]
) -> None:
    assert split(FORMATS[family], text) == Parts(content, None, calls)
    check_cuts(FORMATS[family], text, list(range(len(text))))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "many", "many"),
        ({"type": "string"}, "1", "1"),
        ({"type": ["string", "integer"]}, "1", "1"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"$ref": "#/$defs/loop"}, "1", "1"),
        ({"anyOf": 5, "$ref": 5}, "1", "1"),
        (5, "1", "1"),
    ],
)
def test_what_does_not_fit_its_type_stays_text(schema: Any, text: str, value: Any) -> None:
    tools = {"f": {"properties": {"a": schema}, "$defs": {"loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}}}
    output = GLM.replace("1", text) + "</tool_call>"
    (call,) = split(FORMATS["glm45"], output, tools=tools).tool_calls
    assert json.loads(call.arguments) == {"a": value}


@pytest.mark.parametrize(
    "unit",
    ["<tool_call>", '<tool_call>{"name": "', '<tool_call>{"a":[', CALL + " ", *OPENED_CALLS, *CLOSED_CALLS, QWEN, GLM],
)
@pytest.mark.parametrize("family", [*FAMILIES, *TAGGED])
def test_a_long_malformed_output_is_read_in_a_moment(family: str, unit: str) -> None:
    """The engine reads it between two steps. In quadratic time this test would take longer than it may."""
    text = unit * (2_000_000 // len(unit))
    for begin in ("", "[TOOL_CALLS]", "<|python_tag|>", *OPENED_CALLS):
        split(FORMATS[family], begin + text)
