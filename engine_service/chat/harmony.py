"""Split an output in OpenAI's harmony format, that of gpt-oss: messages, whose headers say what they are.

<|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>final<|message|>ANSWER<|return|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The form is described at https://github.com/openai/harmony/blob/main/docs/format.md. The prompt has the beginning of the
first message: <|start|>assistant.
"""

from __future__ import annotations

import re
from typing import Literal

from millrace.engine_service.chat.output_format import CALL, END, HARMONY, MESSAGE, RETURN, START, OutputFormat
from millrace.engine_service.chat.output_splitter import Parts, before_mark
from millrace.engine_service.chat.tool_calls import Tools, named_call
from millrace.results.messages import FunctionCall

_MARK = re.compile("|".join(map(re.escape, HARMONY)))
_HEADER = re.compile(r"\s{0,64}(?:t|to|to=[^\s<]{0,256}\s{0,64})?(?:<\|(?:start|channel|constrain)\|>[^\n]{0,512})?")
"""What a header is, as far as a text has it. Another text before a message is content."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


class HarmonySplitter:
    """Splits one output while it grows, as `OutputSplitter` does.

    Held back are the beginning of a mark, headers, and a call until its message ends. A header is in no part: one without
    <|message|>, as an output has that was cut there, is left out. A message that is not read stays content, with its
    header: a call that is none, or whose recipient is no function, and reasoning without a parser for it.
    """

    def __init__(self, form: OutputFormat, tools: Tools | None, *, begins_in_reasoning: bool = False) -> None:
        """`tools`: those of the request; None: calls stay content."""
        self._tools = tools if form.tool_calls is not None else None
        self._has_reasoning = form.reasoning is not None
        self._held = ""
        self._header = ""
        self._name = ""
        """Of the function that the message calls."""
        self._body: Literal["content", "reasoning", "call"] | None = None
        """What the text of the message is. None: it is not there yet."""
        if begins_in_reasoning and self._has_reasoning:
            self._body = "reasoning"
        self._is_new = True
        """Whether the message has added nothing to its part."""
        self._parts_so_far: set[str] = set()
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": [], "call": []}
        """What was added since the last `_take`, and all arguments of the call so far."""
        self._new_calls: list[FunctionCall] = []

    def feed(self, text: str) -> Parts:
        """Return what this text adds to the parts."""
        self._read(text)
        return self._take()

    def end(self, text: str = "") -> Parts:
        """Return what the last text adds, and what was held back. Another call returns nothing more."""
        self._read(text)
        self._add(self._held)
        self._held = ""
        self._end_message()
        return self._take()

    def _take(self) -> Parts:
        content, reasoning = ("".join(self._texts[part]) or None for part in ("content", "reasoning"))
        parts = Parts(content, reasoning, self._new_calls)
        self._texts["content"], self._texts["reasoning"], self._new_calls = [], [], []
        return parts

    def _read(self, text: str) -> None:
        text, at = self._held + text, 0
        for mark in _MARK.finditer(text):
            self._add(text[at : mark.start()])
            self._read_mark(mark[0])
            at = mark.end()
        text, self._held = before_mark(text[at:], *HARMONY)
        self._add(text)

    def _read_mark(self, mark: str) -> None:
        if mark == MESSAGE and self._body is None:
            self._begin_body()
        elif mark in (START, END, CALL, RETURN):
            self._end_message()
            self._header = mark if mark == START else ""
        else:
            self._add(mark)

    def _begin_body(self) -> None:
        channel, recipient = _CHANNEL.search(self._header), _RECIPIENT.search(self._header)
        is_reasoning = channel is not None and channel[1] == "analysis"
        name = recipient[1] if recipient else ""
        if self._tools is not None and (name.startswith(_FUNCTIONS) or name in self._tools):
            self._body, self._name = "call", name.removeprefix(_FUNCTIONS)
        elif is_reasoning and self._has_reasoning:
            self._body = "reasoning"
        else:
            self._body = "content"
            if name or is_reasoning:
                self._add(self._shown_header())

    def _shown_header(self) -> str:
        return self._header.removeprefix(START + "assistant") + MESSAGE

    def _end_message(self) -> None:
        if self._body == "call":
            arguments = "".join(self._texts["call"])
            call = named_call(self._name, arguments)
            self._body = "content"
            if call is None:
                self._add(self._shown_header() + arguments)
            else:
                self._new_calls.append(call)
        elif self._body is None and self._header.strip() and not _MARK.search(self._header):
            self._body = "content"
            self._add(self._header)
        self._body, self._header, self._is_new, self._texts["call"] = None, "", True, []

    def _add(self, text: str) -> None:
        """Append text of a header or a message. The texts of several messages are parted by line ends."""
        if self._body is None:
            self._header += text
            if _HEADER.fullmatch(self._header):
                return
            text, self._body = self._header, "content"
        if not text:
            return
        if self._is_new and self._body in self._parts_so_far:
            text = "\n" + text
        if self._body != "call":
            self._is_new = False
            self._parts_so_far.add(self._body)
        self._texts[self._body].append(text)
