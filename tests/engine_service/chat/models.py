"""Chat templates in the manner of known families, and models of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from millrace.engine_service.chat.harmony import HarmonySplitter
from millrace.engine_service.chat.output_format import OutputFormat
from millrace.engine_service.chat.output_splitter import OutputSplitter, Parts
from millrace.engine_service.chat.outputs import splitter_of
from millrace.engine_service.chat.template import ChatTemplate
from millrace.engine_service.chat.tool_calls import Tools

TINY = Path(__file__).resolve().parents[3] / "examples" / "tiny_model"
FAMILIES = ("hermes", "llama3", "mistral")
TAGGED = ("qwen3_coder", "glm45")
"""The families whose arguments are text between tags."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "How the weather is in a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
NO_PARAMETERS: Tools = {"f": {}}
NOTHING = Parts(None, None, [])


def source_of(family: str) -> str:
    return (Path(__file__).parent / "templates" / f"{family}.jinja").read_text()


def template_of(family: str) -> ChatTemplate:
    return ChatTemplate({"default": source_of(family)}, {"bos_token": "<s>", "eos_token": "</s>"})


def model_with_template(
    directory: Path, source: str, special_tokens: tuple[str, ...] = (), tags: tuple[str, ...] = ()
) -> Path:
    """Make a copy of the tiny model with this chat template, and with special tokens that its head does not know. `tags`:
    added tokens that are not special, in place of the last ones of its vocabulary."""
    directory.mkdir()
    for path in TINY.iterdir():
        if path.suffix in (".json", ".safetensors"):
            (directory / path.name).symlink_to(path)
    (directory / "chat_template.jinja").write_text(source)
    if special_tokens or tags:
        tokenizer = json.loads((TINY / "tokenizer.json").read_text())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"] += [
            {"id": token_id, "content": token, **flags, "special": True}
            for token_id, token in enumerate(special_tokens, len(tokenizer["model"]["vocab"]))
        ]
        vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
        for tag in reversed(tags):
            merges.pop()
            _, token_id = vocabulary.popitem()
            tokenizer["added_tokens"].append({"id": token_id, "content": tag, **flags, "special": False})
        (directory / "tokenizer.json").unlink()
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def split(
    form: OutputFormat, text: str, *, begins_in_reasoning: bool = False, tools: Tools | None = NO_PARAMETERS
) -> Parts:
    """Return the parts of a whole output."""
    return splitter_of(form, tools, begins_in_reasoning=begins_in_reasoning).end(text)


def check_cuts(
    format_: OutputFormat, text: str, cuts: list[int], begins: bool = False, tools: Tools | None = NO_PARAMETERS
) -> None:
    """Check that the parts of a growing text are those of the whole."""

    def splitter() -> OutputSplitter | HarmonySplitter:
        return splitter_of(format_, tools, begins_in_reasoning=begins)

    ends = sorted(cut for cut in cuts if cut <= len(text))
    growing, found = splitter(), NOTHING
    for start, end in pairwise([0, *ends]):
        found = joined(found, growing.feed(text[start:end]))
        assert found == joined(NOTHING, splitter().feed(text[:end]))
    found = joined(found, growing.end(text[max(ends, default=0) :]))
    assert found == split(format_, text, begins_in_reasoning=begins, tools=tools)


def joined(one: Parts, other: Parts) -> Parts:
    def both(first: str | None, second: str | None) -> str | None:
        return second if first is None else first + (second or "")

    return Parts(
        both(one.content, other.content), both(one.reasoning, other.reasoning), one.tool_calls + other.tool_calls
    )
