"""Grammars of chats, as llguidance reads them: what they accept is what the parser of the family reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from millrace.engine_service.chat.grammars import chat_form, structural_tag_grammar
from millrace.engine_service.chat.output_format import HARMONY, OutputFormat, ReasoningState
from millrace.engine_service.text import Tokenizer
from millrace.producer import GenerationRequest, InvalidRequest, SamplingParams
from tests.engine_service.chat.models import model_with_template, split
from tests.matchers import TOKENIZER, accepts, byte_tokenizer

NUMBERS = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/n"}, "y": {"$ref": "#/$defs/n"}},
    "required": ["x", "y"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer"}},
}
ADD = {"type": "function", "function": {"name": "add", "parameters": NUMBERS}}
GREET = {"type": "function", "function": {"name": 'gré"et', "parameters": {}}}
STRICT = {"type": "function", "function": {**ADD["function"], "strict": True}}  # type: ignore[dict-item]
ONLY_ADD = {"type": "function", "function": {"name": "add"}}

FAMILIES = {
    "hermes": OutputFormat("hermes", "qwen3"),
    "llama3_json": OutputFormat("llama3_json", "qwen3"),
    "mistral": OutputFormat("mistral", "qwen3"),
    "mistral with [ARGS]": OutputFormat("mistral", "qwen3", has_args_mark=True),
}
HARMONY_FORM = OutputFormat("openai", "openai_gptoss")
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<tool_call>", "</tool_call>", *HARMONY]
SPECIAL_IDS = {mark: 257 + i for i, mark in enumerate(SPECIAL)}


def no_special_id(text: str) -> None:
    return None


def call(family: str, name: str, arguments: str) -> str:
    name_text = json.dumps(name, ensure_ascii=False)
    return {
        "hermes": f'<tool_call>\n{{"name": {name_text}, "arguments": {arguments}}}\n</tool_call>',
        "llama3_json": f'{{"name": {name_text}, "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS][{{"name": {name_text}, "arguments": {arguments}}}]',
        "mistral with [ARGS]": f"[TOOL_CALLS]{name}[ARGS]{arguments}",
    }[family]


def two_calls(family: str) -> str:
    one = call(family, "add", FITTING)
    joined = {"hermes": f"{one}\n{one}", "llama3_json": f"{one}; {one}", "mistral": f"{one[:-1]}, {one[12 + 1 :]}"}
    return joined.get(family, one + one)


FITTING, WRONG = '{"x": 1, "y": -2}', '{"x": 1, "y": "two"}'
TOOLS: list[dict[str, Any]] = [ADD, GREET]


class Output:
    """What a chat's output may be, with marks that are text, or special tokens."""

    def __init__(self, family: str, *, before: ReasoningState = None, is_special: bool = False, **fields: Any) -> None:
        request = GenerationRequest(messages=[{"role": "user", "content": "x"}], **fields)
        special_id = SPECIAL_IDS.get if is_special else no_special_id
        form = chat_form(request, {**FAMILIES, "harmony": HARMONY_FORM}[family], special_id, before)
        assert form is not None and form.grammar is not None
        self.tokenizer: LLTokenizer = byte_tokenizer(SPECIAL) if is_special else TOKENIZER
        self.matcher = LLMatcher(self.tokenizer, LLMatcher.grammar_from_lark(form.grammar), log_level=0)
        assert not self.matcher.is_error(), self.matcher.get_error()
        self.is_special = is_special

    def accepts(self, text: str) -> bool:
        if not self.is_special:
            return accepts(self.matcher, text)
        token_ids: list[int] = []
        while text:
            mark = next((mark for mark in SPECIAL if text.startswith(mark)), None)
            token_ids += [SPECIAL_IDS[mark]] if mark else text[0].encode()
            text = text[len(mark or " ") :]
        copied = self.matcher.deep_copy()
        return copied.try_consume_tokens(token_ids) == len(token_ids) and copied.is_accepting()


def test_marks_are_the_tokens_that_no_text_of_a_grammar_matches(tmp_path: Path) -> None:
    tags, special = ("<think>", "[THINK]", "<a", "a>", "<|é|>"), ("[X]", "<y>", "<|end|>")
    tokenizer = Tokenizer(model_with_template(tmp_path / "model", "", special[:2], tags))
    of_grammars = LLTokenizer(tokenizer.as_json())
    marks = {text: tokenizer.mark_id(text) for text in (*tags, *special, " the")}
    for text, found in marks.items():
        (token_id,) = tokenizer.encode(text, add_special_tokens=False)
        assert found == (token_id if of_grammars.is_special_token(token_id) else None)
    assert [text for text, found in marks.items() if found] == ["<think>", "<|é|>", *special]
    assert tokenizer.mark_id("no such token") is None


both_marks = pytest.mark.parametrize("is_special", [False, True], ids=["text", "special"])


@both_marks
@pytest.mark.parametrize("family", FAMILIES)
def test_a_required_call_is_one_that_the_parser_reads_with_arguments_that_fit(family: str, is_special: bool) -> None:
    output = Output(family, tools=TOOLS, tool_choice="required", is_special=is_special)
    fitting = call(family, "add", FITTING)
    assert output.accepts(fitting)
    assert [each.name for each in split(FAMILIES[family], fitting).tool_calls] == ["add"]
    assert output.accepts(call(family, 'gré"et', '{"a": [1]}'))
    assert not output.accepts(call(family, "add", WRONG))
    assert not output.accepts(call(family, "other", "{}"))
    assert not output.accepts("Hello") and not output.accepts("")
    assert output.accepts(two_calls(family))
    assert [each.name for each in split(FAMILIES[family], two_calls(family)).tool_calls] == ["add", "add"]
    assert not Output(family, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).accepts(two_calls(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_function_without_parameters_has_no_arguments(family: str) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    output = Output(family, tools=tools, tool_choice="required")
    assert output.accepts(call(family, "now", "{}")) and not output.accepts(call(family, "now", '{"a": 1}'))


@both_marks
@pytest.mark.parametrize("family", FAMILIES)
def test_a_named_function_is_called_once(family: str, is_special: bool) -> None:
    output = Output(family, tools=TOOLS, tool_choice=ONLY_ADD, is_special=is_special)
    assert output.accepts(call(family, "add", FITTING))
    assert not output.accepts(call(family, 'gré"et', "{}"))
    assert not output.accepts(two_calls(family))


@both_marks
@pytest.mark.parametrize("family", FAMILIES)
def test_strict_arguments_fit_and_other_text_is_free(family: str, is_special: bool) -> None:
    output = Output(family, tools=[STRICT, GREET], is_special=is_special)
    before = "" if family == "llama3_json" else "Let me add.\n"
    assert output.accepts("Hello, {} world") and output.accepts("")
    assert output.accepts(before + call(family, "add", FITTING))
    assert output.accepts(before + call(family, 'gré"et', '{"a": 1}'))
    assert not output.accepts(before + call(family, "add", WRONG))
    assert not output.accepts(before + call(family, "other", "{}"))
    assert output.accepts("\n " + call(family, "add", FITTING))
    assert not output.accepts("\n " + call(family, "add", WRONG))
    if family == "hermes":
        assert output.accepts(f"{before}{two_calls(family)} Done.")


@pytest.mark.parametrize("before", [None, "open", "closed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_strict_tools_leave_the_reasoning_free_where_the_prompt_has_none(family: str, before: ReasoningState) -> None:
    output = Output(family, tools=[STRICT, GREET], is_special=True, before=before)
    thoughts = {None: "<think>Hm. {</think>\n\n", "open": "Hm. {</think>\n\n", "closed": ""}
    for each, text in thoughts.items():
        may_begin_so = each == before or (before is None and each == "closed")
        assert output.accepts(f"{text}Hello") is may_begin_so
        assert output.accepts(text + call(family, "add", FITTING)) is may_begin_so
        assert not output.accepts(text + call(family, "add", WRONG))


@both_marks
@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning_is_free(family: str, is_special: bool) -> None:
    fitting = call(family, "add", FITTING)
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "is_special": is_special}
    thinks, begins = Output(family, **options), Output(family, **options, before="open")
    assert thinks.accepts(f"<think>Hm. {{</think>\n\n{fitting}")
    assert not thinks.accepts(f"<think>Hm. {fitting}") and not thinks.accepts(f"Hm.</think>{fitting}")
    assert begins.accepts(f"Hm. {{</think>\n\n{fitting}")
    assert not begins.accepts(fitting)
    closed = Output(family, **options, before="closed")
    assert closed.accepts(fitting) and not closed.accepts(f"<think>Hm. {{</think>\n\n{fitting}")


@pytest.mark.parametrize(
    ("form", "fitting", "other"),
    [
        ({"json": NUMBERS}, '{"x":1,"y":2}', WRONG),
        ({"json_object": True}, '{"a":[1,2]}', "[1]"),
        ({"regex": "a/[0-9]+"}, "a/12", "a/b"),
        ({"regex": "a\\/\\\\[/\n]"}, "a/\\/", "a/"),
        ({"choice": ["yes", 'n"o']}, 'n"o', "no"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_form_follows_the_reasoning(form: dict[str, Any], fitting: str, other: str) -> None:
    sampling = SamplingParams(structured_outputs=form)  # type: ignore[arg-type]
    thinks, begins = Output("hermes", sampling=sampling), Output("hermes", sampling=sampling, before="open")
    assert thinks.accepts(fitting) and thinks.accepts(f"<think>{other}</think>\n{fitting}")
    assert begins.accepts(f"{other}</think>{fitting}")
    for wrong in (other, f"<think>{fitting}</think>{other}", f"{fitting}</think>{fitting}"):
        assert not thinks.accepts(wrong)


THOUGHTS = "<|channel|>analysis<|message|>Hm. {<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


def harmony_calls(name: str, arguments: str) -> list[str]:
    """Return a call in the ways that a model may write it."""
    return [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
        f"<|channel|>commentary to=functions.{name}<|constrain|>json<|message|>{arguments}",
        f"<|channel|>commentary to=functions.{name} json<|message|>{arguments}",
        f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}",
        f" to=functions.{name}<|channel|>commentary<|message|>{arguments}",
    ]


@both_marks
@pytest.mark.parametrize("choice", ["required", ONLY_ADD])
def test_a_required_call_of_harmony_follows_free_messages(choice: Any, is_special: bool) -> None:
    output = Output("harmony", tools=TOOLS, tool_choice=choice, is_special=is_special)
    for fitting, wrong in zip(harmony_calls("add", FITTING), harmony_calls("add", WRONG), strict=True):
        for before in ("", THOUGHTS, THOUGHTS + THOUGHTS + PREAMBLE):
            assert output.accepts(before + fitting)
            assert [each.name for each in split(HARMONY_FORM, before + fitting).tool_calls] == ["add"]
            assert not output.accepts(before + wrong)
    for other in harmony_calls('gré"et', '{"a": [1]}'):
        assert output.accepts(other) is (choice == "required")
    for text in (f"{FINAL}Hello", THOUGHTS, "Hello", "", *harmony_calls("other", "{}")):
        assert not output.accepts(text)


@both_marks
def test_strict_arguments_of_harmony_fit_and_other_messages_are_free(is_special: bool) -> None:
    output = Output("harmony", tools=[STRICT, GREET], is_special=is_special)
    for before in ("", THOUGHTS, PREAMBLE):
        assert output.accepts(f"{before}{FINAL}Hello, {{}} world")
        for fitting, wrong in zip(harmony_calls("add", FITTING), harmony_calls("add", WRONG), strict=True):
            assert output.accepts(before + fitting) and not output.accepts(before + wrong)
        assert output.accepts(before + harmony_calls('gré"et', '{"a": 1}')[0])


@both_marks
def test_a_form_is_that_of_the_final_channel_of_harmony(is_special: bool) -> None:
    sampling = SamplingParams(structured_outputs={"json": NUMBERS})  # type: ignore[arg-type]
    output = Output("harmony", sampling=sampling, is_special=is_special)
    compact = FITTING.replace(" ", "")
    for before in ("", THOUGHTS, THOUGHTS + THOUGHTS):
        for head in (FINAL, "<|channel|>final <|constrain|>json<|message|>"):
            assert output.accepts(f"{before}{head}{compact}")
            assert not output.accepts(f"{before}{head}{WRONG}") and not output.accepts(f"{before}{head}")
    assert not output.accepts(compact) and not output.accepts(f"{PREAMBLE}{FINAL}{compact}")
    begun = Output("harmony", sampling=sampling, is_special=is_special, before="open")
    assert begun.accepts(f"Hm. {{<|end|><|start|>assistant{THOUGHTS}{FINAL}{compact}")
    assert not begun.accepts(f"{FINAL}{compact}") and not begun.accepts(compact)
    request = GenerationRequest(messages=[{"role": "user", "content": "x"}], sampling=sampling)
    assert chat_form(request, HARMONY_FORM, no_special_id, "closed") is sampling.structured_outputs


@both_marks
def test_a_call_of_harmony_follows_a_message_that_the_prompt_has_begun(is_special: bool) -> None:
    (call_, *_), rest = harmony_calls("add", FITTING), "So.<|end|><|start|>assistant"
    for before in ("open", "closed"):
        required = Output("harmony", tools=TOOLS, tool_choice="required", is_special=is_special, before=before)
        assert required.accepts(rest + call_) and required.accepts(rest + THOUGHTS + call_)
        assert not required.accepts(call_) and not required.accepts("So.")
        strict = Output("harmony", tools=[STRICT], is_special=is_special, before=before)
        assert strict.accepts(rest + call_) and strict.accepts("So.")
        assert not strict.accepts(rest + harmony_calls("add", WRONG)[0])


@pytest.mark.parametrize("form", [{"grammar": 'start: "a"'}, None])
def test_a_form_is_the_callers_where_nothing_is_to_be_added(form: Any) -> None:
    sampling = SamplingParams(structured_outputs=form)
    tools = [STRICT] if form else TOOLS
    request = GenerationRequest(messages=[{"role": "user", "content": "x"}], tools=tools, sampling=sampling)
    assert chat_form(request, FAMILIES["hermes"], no_special_id, "open") is sampling.structured_outputs
    only_json = SamplingParams(structured_outputs={"json": {}})  # type: ignore[arg-type]
    request = GenerationRequest(messages=[{"role": "user", "content": "x"}], sampling=only_json)
    for format_, before in ((OutputFormat("hermes", None), None), (FAMILIES["hermes"], "closed")):
        assert chat_form(request, format_, no_special_id, before) is only_json.structured_outputs  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("output_format", "tool", "message"),
    [
        (OutputFormat(None, None), ADD, "tool_choice: the engine knows no form of tool calls"),
        (OutputFormat("glm45", None), ADD, "tool_choice: calls of the form glm45 cannot be held .*; use auto"),
        (
            FAMILIES["hermes"],
            {**ADD, "function": {"name": "f", "parameters": {"type": "array"}}},
            "tools: .* of f must",
        ),
        (
            FAMILIES["hermes"],
            {**ADD, "function": {"name": "f", "parameters": {"enum": ["x" * 300_000]}}},
            r"tools: grammar has \d+ bytes",
        ),
    ],
)
def test_tools_that_cannot_be_constrained_are_refused(
    output_format: OutputFormat, tool: dict[str, Any], message: str
) -> None:
    request = GenerationRequest(messages=[{"role": "user", "content": "x"}], tools=[tool], tool_choice="required")
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        chat_form(request, output_format, no_special_id, None)


@both_marks
def test_text_is_free_up_to_a_trigger_and_then_a_structure(is_special: bool) -> None:
    trigger = "<tool_call>" if is_special else "<f"
    structures = [
        {"begin": f"{trigger}=add>", "schema": NUMBERS, "end": "</f>"},
        {"begin": f"{trigger}>", "schema": True, "end": ""},
    ]
    tag = json.dumps({"structures": structures, "triggers": [trigger, "unused"]})
    grammar = structural_tag_grammar(tag, SPECIAL_IDS.get if is_special else no_special_id)
    output = Output.__new__(Output)
    output.matcher = LLMatcher(
        byte_tokenizer(SPECIAL) if is_special else TOKENIZER, LLMatcher.grammar_from_lark(grammar), log_level=0
    )
    output.is_special = is_special
    compact = FITTING.replace(" ", "")
    assert output.accepts("") and output.accepts("free < text")
    assert output.accepts(f"a{trigger}=add>{compact}</f>b{trigger}>[1]c")
    assert not output.accepts(f"{trigger}=add>{compact}")
    assert not output.accepts(f"{trigger}=add>{WRONG}</f>")
    assert not output.accepts(f"a{trigger}=sub>")
