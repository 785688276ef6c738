"""Chat templates in the manner of known families, and models of them."""

from __future__ import annotations

import json
from pathlib import Path

from millrace.engine_service.chat.output_format import OutputFormat
from millrace.engine_service.chat.output_splitter import OutputSplitter, Parts
from millrace.engine_service.chat.template import ChatTemplate

TINY = Path(__file__).resolve().parents[3] / "examples" / "tiny_model"
FAMILIES = ("hermes", "llama3", "mistral")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "How the weather is in a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


def source_of(family: str) -> str:
    return (Path(__file__).parent / "templates" / f"{family}.jinja").read_text()


def template_of(family: str) -> ChatTemplate:
    return ChatTemplate({"default": source_of(family)}, {"bos_token": "<s>", "eos_token": "</s>"})


def model_with_template(directory: Path, source: str, special_tokens: tuple[str, ...] = ()) -> Path:
    """Make a copy of the tiny model with this chat template, and with special tokens that its head does not know."""
    directory.mkdir()
    for path in TINY.iterdir():
        if path.suffix in (".json", ".safetensors"):
            (directory / path.name).symlink_to(path)
    (directory / "chat_template.jinja").write_text(source)
    if special_tokens:
        tokenizer = json.loads((TINY / "tokenizer.json").read_text())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"] += [
            {"id": token_id, "content": token, **flags, "special": True}
            for token_id, token in enumerate(special_tokens, len(tokenizer["model"]["vocab"]))
        ]
        (directory / "tokenizer.json").unlink()
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def split(form: OutputFormat, text: str, *, begins_in_reasoning: bool = False, has_tools: bool = True) -> Parts:
    """Return the parts of a whole output."""
    return OutputSplitter(form, begins_in_reasoning=begins_in_reasoning, has_tools=has_tools).end(text)
