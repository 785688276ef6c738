"""How a family of models marks reasoning and tool calls in the output of a chat."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from millrace.engine_service.errors import ConfigurationError

if TYPE_CHECKING:  # it imports jinja2, and the names of the parsers are options of a service
    from millrace.engine_service.chat.template import ChatTemplate

logger = logging.getLogger("millrace.engine")

THINKING_MARKS = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
"""The marks before and after reasoning, by parser. "auto" takes the first parser whose second mark the template has."""
HARMONY_CALLS, HARMONY_REASONING = "openai", "openai_gptoss"
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "qwen3_coder", "glm45", HARMONY_CALLS, "none")
REASONING_PARSERS = ("auto", *THINKING_MARKS, HARMONY_REASONING, "none")

HERMES, HERMES_END = "<tool_call>", "</tool_call>"
LLAMA = "<|python_tag|>"
MISTRAL, MISTRAL_ARGS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
GLM = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
HARMONY = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_BEGUN_MESSAGE = re.compile(r"<\|channel\|>(\w+)<\|message\|>\s*\Z")

ReasoningState: TypeAlias = Literal["open", "closed"] | None
"""Whether the text before an output leaves reasoning open, or has closed it. None: the output may open it."""


class OutputFormat(NamedTuple):
    """How a model marks tool calls and reasoning: names of parsers, and None where it does not."""

    tool_calls: str | None = None
    reasoning: str | None = None
    has_args_mark: bool = False
    """For the family mistral: whether calls are [TOOL_CALLS]name[ARGS]{...}."""

    @property
    def is_harmony(self) -> bool:
        """Whether the output consists of messages with headers, which name the channel and the function to call."""
        return self.tool_calls == HARMONY_CALLS or self.reasoning == HARMONY_REASONING

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks. A tokenizer may have them as special tokens, which a text leaves out."""
        if self.is_harmony:
            return HARMONY
        tags = (HERMES, HERMES_END)
        families = {"hermes": tags, "qwen3_coder": tags, "glm45": tags + GLM}
        families |= {"llama3_json": (LLAMA,), "mistral": (MISTRAL, MISTRAL_ARGS, MISTRAL_ID)}
        return families.get(self.tool_calls or "", ()) + THINKING_MARKS.get(self.reasoning or "", ())

    def reasoning_before(self, text: str, *, is_message: bool) -> ReasoningState:
        """Return how a text leaves the reasoning: the end of a prompt, or a message that the output continues."""
        if self.is_harmony:
            if is_message:  # templates put its content into the final channel
                return "closed"
            begun = _BEGUN_MESSAGE.search(text)
            return None if begun is None else "open" if begun[1] == "analysis" else "closed"
        if self.reasoning is None:
            return None
        if not is_message:  # what is not at its end may be in the text of a user
            text = next((mark for mark in THINKING_MARKS[self.reasoning] if text.rstrip().endswith(mark)), "")
        opened, closed = map(text.rfind, THINKING_MARKS[self.reasoning])
        if opened > closed or (self.reasoning == "deepseek_r1" and closed < 0):
            return "open"
        return "closed" if closed >= 0 else None


def output_format(template: ChatTemplate, tool_calls: str = "auto", reasoning: str = "auto") -> OutputFormat:
    """Return the format with these parsers. "auto": the one whose marks are in the model's chat template.

    Raises `ConfigurationError` for parsers that do not fit together.
    """
    source = "".join(template.sources.values())
    is_harmony = CHANNEL in source and MESSAGE in source
    if tool_calls == "auto":
        has_headers = "<|start_header_id|>" in source and "tool_calls" in source
        families = {
            HARMONY_CALLS: is_harmony,
            "glm45": HERMES in source and GLM[0] in source,
            "qwen3_coder": HERMES in source and "<function=" in source,
            "hermes": HERMES in source,
            "mistral": MISTRAL in source,
            "llama3_json": LLAMA in source or has_headers,
        }
        tool_calls = next((name for name, is_family in families.items() if is_family), "none")
        if tool_calls == "none" and re.search(r"\btools\b", source):
            logger.warning(
                "the chat template has tools, but none of the known forms of tool calls: they stay text in the output; "
                "name a form with --tool-call-parser, or silence this with --tool-call-parser none"
            )
    if reasoning == "auto" and is_harmony:
        reasoning = HARMONY_REASONING
    elif reasoning == "auto":
        reasoning = next((name for name, (_, end) in THINKING_MARKS.items() if end in source), "none")
    calls, thinking = (None if name == "none" else name for name in (tool_calls, reasoning))
    if calls and thinking and (calls == HARMONY_CALLS) != (thinking == HARMONY_REASONING):
        raise ConfigurationError(
            f"--tool-call-parser {calls} and --reasoning-parser {thinking} cannot be combined: {HARMONY_CALLS} and "
            f"{HARMONY_REASONING} read one form; give both, or none for the other"
        )
    return OutputFormat(calls, thinking, has_args_mark=MISTRAL_ARGS in source)


def describe(form: OutputFormat, template: ChatTemplate) -> str:
    """Return how chats are served, for the log."""
    if not template.sources:
        return "no chat template: chats are refused"
    return f"chats: tool calls are read as {form.tool_calls or 'none'}, reasoning as {form.reasoning or 'none'}"
