"""Prompts of chats: those of transformers, from the same templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine_service.chat.template import Chat, ChatTemplate, TextError, render
from millrace.engine_service.text import Tokenizer
from tests.engine_service.chat.models import FAMILIES, TINY, WEATHER, model_with_template, source_of, template_of

USER = {"role": "user", "content": "How is the weather in Köln?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": ["<é>"]}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"}

_texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
_arguments = st.dictionaries(_texts, st.integers() | _texts | st.none() | st.lists(st.booleans()), max_size=3)
_call = st.builds(
    lambda name, arguments: {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}},
    _texts,
    _arguments,
)
_turn = st.one_of(
    _texts.map(lambda text: {"role": "assistant", "content": text}),
    st.builds(lambda a, b: {"role": "assistant", "content": a, "reasoning_content": b}, _texts, _texts),
    _call.map(lambda call: {"role": "assistant", "content": "", "tool_calls": [call]}),
)
_chats = st.lists(st.tuples(_texts.map(lambda text: {"role": "user", "content": text}), _turn), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def reference() -> Any:
    """Transformers' tokenizer, which has the original of what is checked here."""
    tokenizer = Tokenizer(TINY).of_transformers
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    return tokenizer


@settings(max_examples=60, deadline=None)
@given(
    turns=_chats,
    family=st.sampled_from(FAMILIES),
    has_tools=st.booleans(),
    add_generation_prompt=st.booleans(),
    kwargs=st.sampled_from([{}, {"enable_thinking": False}, {"open_thinking": 1}]),
)
def test_a_chat_has_the_prompt_that_transformers_makes_of_it(
    turns: list[tuple[Any, Any]],
    family: str,
    has_tools: bool,
    add_generation_prompt: bool,
    kwargs: dict[str, Any],
    reference: Any,
) -> None:
    messages = [message for turn in turns for message in turn]
    tools = [WEATHER] if has_tools else None
    chat = Chat(
        messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, chat_template_kwargs=kwargs
    )
    expected = outcome(
        lambda: reference.apply_chat_template(
            messages,
            tools=tools,
            chat_template=source_of(family),
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **kwargs,
        )
    )
    assert outcome(lambda: render(template_of(family), chat)) == expected


def outcome(make: Any) -> Any:
    try:
        return make()
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("content", ["The answer", "The answer ", " "])
def test_the_last_message_is_continued_where_transformers_does(family: str, content: str, reference: Any) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    chat = Chat(messages=messages, add_generation_prompt=False, continue_final_message=True)
    expected = reference.apply_chat_template(
        messages, chat_template=source_of(family), continue_final_message=True, tokenize=False
    )
    assert render(template_of(family), chat) == expected


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    chat = Chat(messages=[USER], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(TextError, match="leaves out the last message"):
        render(ChatTemplate({"default": "{{ messages[0].role }}"}), chat)


@pytest.mark.parametrize("family", FAMILIES)
def test_tool_calls_have_their_arguments_as_objects_and_no_content_is_no_text(family: str) -> None:
    text = render(template_of(family), Chat(messages=[USER, CALL, RESULT], tools=[WEATHER]))
    assert '{"a": ["<é>"]}' in text
    assert "None" not in text
    assert "get_weather" in text or family == "mistral"


@pytest.mark.parametrize("fields", [{"content": None}, {}])
def test_a_message_without_content_has_an_empty_one_as_with_vllm(fields: dict[str, Any]) -> None:
    template = ChatTemplate({"default": "{% for each in messages %}{{ '[' + each['content'] + ']' }}{% endfor %}"})
    assert render(template, Chat(messages=[USER, {**CALL, **fields}])) == f"[{USER['content']}][]"


def test_arguments_that_are_no_json_reach_the_template_as_they_are() -> None:
    call = {"function": {"name": "f", "arguments": '{"a":'}}
    text = render(template_of("hermes"), Chat(messages=[{"role": "assistant", "tool_calls": [call]}]))
    assert '"arguments": "{\\"a\\":"}' in text


def test_text_parts_are_joined_by_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = render(template_of("hermes"), Chat(messages=[{"role": "user", "content": parts}]))
    assert "<|im_start|>user\none\ntwo<|im_end|>" in text


PARTS_ONLY = (  # as of LLaVA, and of SmolVLM
    "{% for m in messages %}{{ bos_token + m.role }}: {% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text }}\n{% endfor %}{% endfor %}",
    "{% for m in messages %}{{ bos_token + m.role }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}"
    "{{ '\n' }}{% endfor %}",
)


@pytest.mark.parametrize("source", PARTS_ONLY)
def test_a_template_that_leaves_out_strings_gets_text_parts(source: str) -> None:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat: list[dict[str, Any]] = [USER, {"role": "assistant", "content": parts}]
    assert render(template, Chat(messages=chat)) == f"<s>user: {USER['content']}\n<s>assistant: one\ntwo\n"
    continued = render(template, Chat(messages=chat, add_generation_prompt=False, continue_final_message=True))
    assert continued == f"<s>user: {USER['content']}\n<s>assistant: one\ntwo"


def test_a_template_that_takes_both_gets_strings() -> None:
    source = (
        "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text ~ ' in parts' }}{% endfor %}"
    )
    assert render(ChatTemplate({"default": source}), Chat(messages=[USER])) == USER["content"]


def test_the_template_of_a_processor_is_found(tmp_path: Path) -> None:
    model = model_with_template(tmp_path / "model", "")
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    assert render(Tokenizer(model).chat_template, Chat(messages=[USER])) == "of the processor"
    (model / "chat_template.json").write_text('["damaged"]')
    assert Tokenizer(model).chat_template == ChatTemplate({}, Tokenizer(model).chat_template.variables)


def test_chats_with_tools_have_a_template_of_their_own_where_the_model_has_one(tmp_path: Path) -> None:
    model = model_with_template(tmp_path / "model", "plain")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}{{ eos_token }}")
    template = Tokenizer(model).chat_template
    assert render(template, Chat(messages=[USER])) == "plain"
    assert render(template, Chat(messages=[USER], tools=[])) == "[]<|end|>"


def test_a_file_replaces_all_templates_of_the_model(tmp_path: Path) -> None:
    model = model_with_template(tmp_path / "model", "plain")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    (file := tmp_path / "mine.jinja").write_text("mine{{ eos_token }}")
    template = Tokenizer(model, str(file)).chat_template
    assert render(template, Chat(messages=[USER])) == "mine<|end|>"
    assert render(template, Chat(messages=[USER], tools=[])) == "mine<|end|>"


def test_a_model_without_a_template_is_named() -> None:
    with pytest.raises(TextError, match="the model has no chat template; send a prompt"):
        render(ChatTemplate({}), Chat(messages=[USER]))


def test_the_text_of_a_training_block_is_printed() -> None:
    source = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    assert render(ChatTemplate({"default": source}), Chat(messages=[USER])) == f"[{USER['content']}]"
