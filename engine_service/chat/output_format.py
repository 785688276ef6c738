"""How a family of models marks reasoning and tool calls in the output of a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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
LLAMA = "<|python_tag|>"
MISTRAL, MISTRAL_ARGS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class OutputFormat(NamedTuple):
    """How a model marks tool calls and reasoning: names of parsers, and None where it does not."""

    tool_calls: str | None = None
    reasoning: str | None = None
    has_args_mark: bool = False
    """For the family mistral: whether calls are [TOOL_CALLS]name[ARGS]{...}."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks. A tokenizer may have them as special tokens, which a text leaves out."""
        families = {"hermes": (HERMES, HERMES_END), "llama3_json": (LLAMA,)}
        families["mistral"] = (MISTRAL, MISTRAL_ARGS, MISTRAL_ID)
        return families.get(self.tool_calls or "", ()) + THINKING_MARKS.get(self.reasoning or "", ())

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Return whether the output continues reasoning: the end of the prompt, or its last message, opens it."""
        if self.reasoning is None:
            return False
        begin, end = THINKING_MARKS[self.reasoning]
        opened, closed = prompt.rfind(begin), prompt.rfind(end)
        return opened > closed or (self.reasoning == "deepseek_r1" and closed < 0)


def output_format(template: ChatTemplate, tool_calls: str = "auto", reasoning: str = "auto") -> OutputFormat:
    """Return the format with these parsers. "auto": the one whose marks are in the model's chat template."""
    source = "".join(template.sources.values())
    if tool_calls == "auto":
        has_headers = "<|start_header_id|>" in source and "tool_calls" in source
        families = {"hermes": HERMES in source, "mistral": MISTRAL in source}
        families["llama3_json"] = LLAMA in source or has_headers
        tool_calls = next((name for name, is_family in families.items() if is_family), "none")
    if reasoning == "auto":
        reasoning = next((name for name, (_, end) in THINKING_MARKS.items() if end in source), "none")
    calls, thinking = (None if name == "none" else name for name in (tool_calls, reasoning))
    return OutputFormat(calls, thinking, has_args_mark=MISTRAL_ARGS in source)
