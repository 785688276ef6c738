"""What becomes of an output in the harmony format, that of gpt-oss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine_service.chat.harmony import HarmonySplitter
from millrace.engine_service.chat.output_format import HARMONY, OutputFormat, output_format
from millrace.engine_service.chat.output_splitter import Parts
from millrace.engine_service.chat.outputs import CandidateParts, ChatOutputs
from millrace.engine_service.chat.template import Chat, ChatTemplate, render
from millrace.engine_service.chat.tool_calls import Tools
from millrace.engine_service.errors import ConfigurationError
from millrace.engine_service.text import Tokenizer
from millrace.producer import GenerationRequest
from millrace.results.messages import FunctionCall
from tests.engine_service.chat.models import (
    NO_PARAMETERS,
    WEATHER,
    check_cuts,
    model_with_template,
    source_of,
    split,
    template_of,
)

FORM = OutputFormat("openai", "openai_gptoss")
ARGUMENTS = '{"a": 1}'
F = FunctionCall(name="f", arguments=ARGUMENTS)
NEXT = "<|end|><|start|>assistant"
THOUGHTS = "<|channel|>analysis<|message|>Hm."
FINAL = "<|channel|>final<|message|>Seven."
HEAD = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
CALL = HEAD + ARGUMENTS


def every_cut(text: str, form: OutputFormat = FORM, tools: Tools | None = NO_PARAMETERS, begins: bool = False) -> None:
    """Check the text cut at each place, in two pieces, and in pieces of one character."""
    for cut in range(len(text) + 1):
        check_cuts(form, text, [cut], begins, tools)
    check_cuts(form, text, list(range(len(text) + 1)), begins, tools)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{THOUGHTS}{NEXT}{FINAL}<|return|>", Parts("Seven.", "Hm.", [])),
        (f"{THOUGHTS}{NEXT}{FINAL}", Parts("Seven.", "Hm.", [])),
        (f"<|start|>assistant{FINAL}<|return|>", Parts("Seven.", None, [])),
        (f"{THOUGHTS}<|end|>\n<|start|>assistant{FINAL}<|end|>\n", Parts("Seven.", "Hm.", [])),
        (f"{THOUGHTS}<|start|>assistant{FINAL}", Parts("Seven.", "Hm.", [])),
        (f"{THOUGHTS}{NEXT}{THOUGHTS}{NEXT}{FINAL}", Parts("Seven.", "Hm.\nHm.", [])),
        ("<|channel|>final <|constrain|>json<|message|>[7]<|return|>", Parts("[7]", None, [])),
        ("<|message|>Seven.<|return|>", Parts("Seven.", None, [])),
        ("<|channel|>other<|message|>Seven.", Parts("Seven.", None, [])),
        ("<|channel|>final<|message|> a <|channel|> b\n", Parts(" a <|channel|> b\n", None, [])),
        ("<|channel|>final<|message|><|return|>", Parts(None, None, [])),
    ],
)
def test_the_channel_of_a_message_says_what_it_is(text: str, parts: Parts) -> None:
    assert split(FORM, text) == parts
    every_cut(text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{CALL}<|call|>", Parts(None, None, [F])),
        (CALL, Parts(None, None, [F])),
        (f"{HEAD}\n {ARGUMENTS}\n<|call|>", Parts(None, None, [F])),
        (f"{THOUGHTS}{NEXT}{CALL}<|call|>", Parts(None, "Hm.", [F])),
        (f"{THOUGHTS}{NEXT} to=functions.f<|channel|>commentary json<|message|>{ARGUMENTS}", Parts(None, "Hm.", [F])),
        (f" to=functions.f<|channel|>commentary json<|message|>{ARGUMENTS}", Parts(None, None, [F])),
        (f"<|channel|>analysis to=functions.f code<|message|>{ARGUMENTS}", Parts(None, None, [F])),
        (f"<|channel|>commentary to=functions.f<|constrain|>json<|message|>{ARGUMENTS}", Parts(None, None, [F])),
        (f"<|channel|>commentary to=f json<|message|>{ARGUMENTS}", Parts(None, None, [F])),
        (f"<|channel|>commentary<|message|>I look.{NEXT}{CALL}<|call|>", Parts("I look.", None, [F])),
        (f"{CALL}<|call|><|start|>assistant{CALL}<|call|>", Parts(None, None, [F, F])),
        (f"{CALL}{NEXT}{FINAL}", Parts("Seven.", None, [F])),
        (f"<|channel|>commentary<|message|>I look.{NEXT}{FINAL}", Parts("I look.\nSeven.", None, [])),
        (f"{HEAD}{{}}", Parts(None, None, [FunctionCall(name="f", arguments="{}")])),
    ],
)
def test_a_recipient_names_the_function_that_is_called(text: str, parts: Parts) -> None:
    assert split(FORM, text) == parts
    every_cut(text)


@pytest.mark.parametrize(
    "text",
    [
        HEAD,
        f'{HEAD}{{"a": ',
        f"{HEAD}[1]",
        f"{HEAD}7",
        f'{HEAD}{{"a": NaN}}',
        f"{CALL} and more",
        f"{HEAD}" + '{"a":' * 100_000,
        "<|channel|>commentary to=python code<|message|>1 + 1",
        f"<|channel|>commentary to=g json<|message|>{ARGUMENTS}",
    ],
)
def test_a_call_that_cannot_be_read_stays_content(text: str) -> None:
    assert split(FORM, text) == Parts(text, None, [])
    assert split(FORM, f"{text}{NEXT}{FINAL}") == Parts(f"{text}\nSeven.", None, [])
    if len(text) < 1000:
        every_cut(text + NEXT + FINAL)


def test_a_call_of_a_tool_that_is_built_in_is_reasoning_where_the_model_makes_it() -> None:
    text = f"{THOUGHTS}{NEXT}<|channel|>analysis to=python code<|message|>1 + 1<|call|>"
    assert split(FORM, text) == Parts(None, "Hm.\n1 + 1", [])
    every_cut(text)


def test_what_has_no_parser_stays_content() -> None:
    text = f"{THOUGHTS}{NEXT}{CALL}<|call|><|start|>assistant{FINAL}"
    for form, tools, parts in (
        (FORM, None, Parts(f"{CALL}\nSeven.", "Hm.", [])),
        (OutputFormat(None, "openai_gptoss"), NO_PARAMETERS, Parts(f"{CALL}\nSeven.", "Hm.", [])),
        (OutputFormat("openai", None), NO_PARAMETERS, Parts(f"{THOUGHTS}\nSeven.", None, [F])),
    ):
        assert split(form, text, tools=tools) == parts
        every_cut(text, form, tools)


@pytest.mark.parametrize(
    "text",
    [
        "Seven.",
        " \nSeven. ",
        "to",
        "to=",
        "to=f is <b>",
        "To <|be",
        "<b>",
        "a\n" * 40,
        " " * 100 + "a",
        "to=" + "f" * 999,
    ],
)
def test_text_without_a_channel_is_content(text: str) -> None:
    assert split(FORM, text) == Parts(text, None, [])
    assert split(FORM, f"{text}<|return|>") == Parts(text, None, [])
    every_cut(text)
    every_cut(f"{text}<|end|>")


@pytest.mark.parametrize(
    ("fed", "parts"),
    [
        (["<|chan", "nel|>anal", "ysis<|mess", "age|>H", "m", ".<|en"], ["", "", "", "r:H", "r:m", "r:."]),
        (
            [THOUGHTS, "<|end|><|sta", "rt|>assistant", FINAL, " Or <", "8"],
            ["r:Hm.", "", "", "c:Seven.", "c: Or ", "c:<8"],
        ),
        (["Se", "ven", " "], ["c:Se", "c:ven", "c: "]),
        (["t", "o", "day"], ["", "", "c:today"]),
        ([HEAD, ARGUMENTS, "<|call|>"], ["", "", "f"]),
        (["<|channel|>python " + "a" * 600, "b"], ["c:<|channel|>python " + "a" * 600, "c:b"]),
        (["<|channel|>7\n", "b"], ["c:<|channel|>7\n", "c:b"]),
    ],
)
def test_what_is_certain_does_not_wait(fed: list[str], parts: list[str]) -> None:
    splitter = HarmonySplitter(FORM, NO_PARAMETERS)
    found = []
    for text in fed:
        content, reasoning, calls = splitter.feed(text)
        shown = [f"c:{content}"] * bool(content) + [f"r:{reasoning}"] * bool(reasoning) + [call.name for call in calls]
        found.append(" ".join(shown))
    assert found == parts


def test_an_output_that_is_cut_shows_no_header() -> None:
    thoughts, final = f"{THOUGHTS}{NEXT}", f"{THOUGHTS}{NEXT}{FINAL}"
    for length in range(len(thoughts), len(final) - len("Seven.") + 1):
        assert split(FORM, final[:length]) == Parts(None, "Hm.", [])
    for length in range(1, len("<|return|>")):  # half a mark in a message is text, as with other forms
        assert split(FORM, final + "<|return|>"[:length]) == Parts("Seven." + "<|return|>"[:length], "Hm.", [])
    for header in ("<|channel|>", "<|channel|>anal", "<|channel|>final<|mess", "<|start|>assistant to=functions.f"):
        assert split(FORM, header) == Parts(None, None, [])
        assert split(FORM, f"{THOUGHTS}<|end|>{header}") == Parts(None, "Hm.", [])


@pytest.mark.parametrize(("text", "reasoning"), [("Hm", "Hm"), (f"Hm{NEXT}{THOUGHTS}", "Hm\nHm."), ("to=f", "to=f")])
def test_the_prompt_may_begin_the_reasoning(text: str, reasoning: str) -> None:
    assert split(FORM, text, begins_in_reasoning=True) == Parts(None, reasoning, [])
    every_cut(text, begins=True)


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|start|>assistant", None),
        ("What is <|channel|>analysis<|message|>?<|end|><|start|>assistant", None),
        ("<|start|>assistant<|channel|>analysis<|message|>", "open"),
        ("<|start|>assistant<|channel|>final<|message|>", "closed"),
    ],
)
def test_the_end_of_a_prompt_may_be_in_a_message(prompt: str, state: str | None) -> None:
    assert FORM.reasoning_before(prompt, is_message=False) == state


def test_a_continued_message_is_in_the_final_channel() -> None:
    assert FORM.reasoning_before("So far", is_message=True) == "closed"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "So far"}]
    chat = Chat(messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert render(template_of("harmony"), chat).endswith("<|start|>assistant<|channel|>final<|message|>So far")
    assert split(FORM, ", so good.<|return|>") == Parts(", so good.", None, [])


def test_the_form_is_recognized_by_the_marks_in_the_template() -> None:
    assert output_format(template_of("harmony")) == FORM
    assert output_format(template_of("harmony"), "none") == OutputFormat(None, "openai_gptoss")
    assert output_format(template_of("harmony"), "auto", "none") == OutputFormat("openai", None)
    assert output_format(ChatTemplate({}), "openai", "openai_gptoss") == FORM
    phi = ChatTemplate({"default": "<|user|>{{ messages }}<|end|>"})
    assert output_format(phi) == OutputFormat(None, None)


@pytest.mark.parametrize(
    ("family", "calls", "reasoning"),
    [
        ("harmony", "hermes", "auto"),
        ("harmony", "auto", "qwen3"),
        ("hermes", "openai", "auto"),
        ("hermes", "auto", FORM[1]),
    ],
)
def test_parsers_that_do_not_fit_together_are_refused(family: str, calls: str, reasoning: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be combined: openai and openai_gptoss read one form"):
        output_format(template_of(family), calls, reasoning)


_words = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1)


@settings(max_examples=150, deadline=None)
@given(
    calls=st.lists(
        st.tuples(
            st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True),
            st.dictionaries(_words, st.none() | st.integers() | _words, max_size=3),
        ),
        max_size=3,
    ),
    content=_words,
    reasoning=st.none() | _words,
)
def test_messages_that_a_template_writes_are_read_back(
    calls: list[tuple[str, dict[str, Any]]], content: str, reasoning: str | None
) -> None:
    made = [{"id": "a", "type": "function", "function": {"name": name, "arguments": each}} for name, each in calls]
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": made or None}
    user = {"role": "user", "content": "?"}
    prompt = render(template_of("harmony"), Chat(messages=[user]))
    whole = render(template_of("harmony"), Chat(messages=[user, message], add_generation_prompt=False))
    assert whole.startswith(prompt)
    parts = split(FORM, whole[len(prompt) :])
    assert [(call.name, json.loads(call.arguments)) for call in parts.tool_calls] == calls
    assert (parts.content, parts.reasoning) == (content, reasoning)


@settings(max_examples=600, deadline=None)
@given(
    form=st.sampled_from([FORM, OutputFormat("openai", None), OutputFormat(None, "openai_gptoss")]),
    pieces=st.lists(
        st.sampled_from([*HARMONY, CALL, HEAD, ARGUMENTS, "assistant", "analysis", "final", " to=f", *"tab<|\n{} "])
    ),
    cuts=st.lists(st.integers(0, 400)),
    begins=st.booleans(),
    has_tools=st.booleans(),
)
def test_a_growing_output_has_the_parts_of_the_whole_wherever_it_is_cut(
    form: OutputFormat, pieces: list[str], cuts: list[int], begins: bool, has_tools: bool
) -> None:
    check_cuts(form, "".join(pieces), cuts, begins, NO_PARAMETERS if has_tools else None)


@pytest.mark.parametrize(
    "unit", [*HARMONY, THOUGHTS, HEAD, CALL, FINAL, " ", "to=", "<|", '{"a":[', f"<|start|>{FINAL}", f"{CALL}<|call|>"]
)
def test_a_long_malformed_output_is_read_in_a_moment(unit: str) -> None:
    """The engine reads it between two steps. In quadratic time this test would take longer than it may."""
    text = unit * (2_000_000 // len(unit))
    for begin in ("", "<|channel|>", HEAD):
        split(FORM, begin + text)
    splitter = HarmonySplitter(FORM, NO_PARAMETERS)
    for at in range(0, 200_000, 4):
        splitter.feed(text[at : at + 4])


def test_marks_that_are_special_tokens_are_read_and_not_shown(tmp_path: Path) -> None:
    tokenizer = Tokenizer(model_with_template(tmp_path / "model", source_of("harmony"), HARMONY))
    outputs = ChatOutputs(output_format(tokenizer.chat_template), tokenizer)
    request = GenerationRequest(messages=[{"role": "user", "content": "?"}], tools=[WEATHER])
    prompt = tokenizer.encode(render(tokenizer.chat_template, Chat(messages=request.messages or [])))
    reader = outputs.reader(request, prompt)
    assert reader is not None and set(reader.hidden_marks.values()) == set(HARMONY)
    broken = HEAD + '{"a": '
    output = CandidateParts(reader, "a", 0).end(f"{THOUGHTS}{NEXT}{CALL}<|call|><|start|>assistant{broken}")
    assert (output.reasoning, output.content) == ("Hm.", 'commentary to=functions.f json{"a": ')
    assert [call.function for call in output.tool_calls] == [F]
    assert tokenizer.thinking_mark_ids is None
