"""Split the output of a chat into reasoning, content and tool calls, while it grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from millrace.engine_service.chat.output_format import HERMES_END, THINKING_MARKS, OutputFormat
from millrace.engine_service.chat.tool_calls import FAMILIES, MAX_BROKEN_CALLS, Tools
from millrace.results.messages import FunctionCall


class Parts(NamedTuple):
    """What an output consists of, or what a text adds to it."""

    content: str | None
    reasoning: str | None
    tool_calls: list[FunctionCall]


class OutputSplitter:
    """Splits one output while it grows. `feed` returns what is certain, whatever comes: so the parts that it has returned
    depend on the text so far alone, not on how it was cut, and with those of `end` they are the parts of the whole.

    Held back are the beginning of a mark, white space in front of one, and what may be a call until it is complete.
    """

    def __init__(self, form: OutputFormat, tools: Tools | None, *, begins_in_reasoning: bool = False) -> None:
        """`tools`: those of the request; None: calls stay content."""
        self._tools = tools or {}
        self._marks = THINKING_MARKS[form.reasoning] if form.reasoning is not None else None
        self._begins_in_reasoning = begins_in_reasoning
        self._family = FAMILIES[form.tool_calls] if tools is not None and form.tool_calls is not None else None
        self._step: Callable[[OutputSplitter, bool], bool] = OutputSplitter._find_reasoning
        """Takes what is certain from the held text. Returns whether another step has to look at the rest. No bound method:
        a cycle of references would keep the tools for long after the job."""
        self._held = ""
        self._num_tries = 0
        """Marks of an end in the held text at which its first call could not be read."""
        self._num_broken = 0
        """Marks of a call in the content so far."""
        self._space = ""
        """White space behind the content so far. It belongs to the content, but not before the first call or at the end."""
        self._has_content = self._has_reasoning = self._has_calls = False
        self._new_content = self._new_reasoning = ""
        self._new_calls: list[FunctionCall] = []

    def feed(self, text: str) -> Parts:
        """Return what this text adds to the parts."""
        self._held += text
        while self._step(self, False):
            pass
        return self._take()

    def end(self, text: str = "") -> Parts:
        """Return what the last text adds, and what was held back. Another call returns nothing more."""
        self._held += text
        while self._step(self, True):
            pass
        if not self._has_calls:
            self._new_content += self._space
        self._space = ""
        return self._take()

    def _take(self) -> Parts:
        parts = Parts(self._new_content or None, self._new_reasoning or None, self._new_calls)
        self._new_content, self._new_reasoning, self._new_calls = "", "", []
        return parts

    def _find_reasoning(self, is_end: bool) -> bool:
        start = self._held.lstrip()
        if self._marks is None:
            self._step = OutputSplitter._read_content
        elif start.startswith(begin := self._marks[0]):
            self._held, self._step = start[len(begin) :], OutputSplitter._read_reasoning
        elif not is_end and begin.startswith(start):
            return False
        else:
            self._step = OutputSplitter._read_reasoning if self._begins_in_reasoning else OutputSplitter._read_content
        return True

    def _read_reasoning(self, is_end: bool) -> bool:
        assert self._marks is not None
        text, mark, rest = self._held.partition(self._marks[1])
        if not mark and not is_end:
            text, rest = before_mark(text, self._marks[1])
        found = text.rstrip() if self._has_reasoning else text.strip()
        self._new_reasoning += found
        self._has_reasoning |= bool(found)
        if mark or is_end:
            self._held, self._step = rest, OutputSplitter._skip_lines
            return True
        self._held = (text[len(text.rstrip()) :] if self._has_reasoning else "") + rest
        return False

    def _skip_lines(self, is_end: bool) -> bool:
        self._held = self._held.lstrip("\n")
        if not self._held and not is_end:
            return False
        self._step = OutputSplitter._read_content
        return True

    def _read_content(self, is_end: bool) -> bool:
        if self._family is None:
            self._new_content += self._held
            self._has_content |= bool(self._held)
            self._held = ""
            return False
        if self._family.may_begin_with is not None and not self._has_content:
            start = self._held.lstrip()
            if not start and not is_end:
                return False
            if start.startswith(self._family.may_begin_with):
                self._step = OutputSplitter._read_calls
                return True
        text, mark, rest = self._held, "", ""
        if self._num_broken < MAX_BROKEN_CALLS:
            text, mark, rest = text.partition(self._family.mark)
            if not mark and not is_end:
                text, rest = before_mark(text, self._family.mark)
        self._add(text)
        self._held = mark + rest
        if mark:
            self._step = OutputSplitter._read_calls
        return bool(mark)

    def _read_calls(self, is_end: bool) -> bool:
        """Read the calls with which the held text begins: at the end all of them, before it one whose end is marked."""
        assert self._family is not None
        if self._held.startswith(mark := self._family.mark) and not self._family.begin.match(self._held, len(mark)):
            self._add(mark)
            self._num_broken += 1
            self._held, self._step = self._held[len(mark) :], OutputSplitter._read_content
            return True
        if is_end:
            for item in self._family.split(self._held, self._tools, self._num_broken):
                self._add(item)
            self._held = ""
            return False
        if self._family.read is None or self._num_tries >= MAX_BROKEN_CALLS:
            return False
        num_ends = self._held.count(HERMES_END)
        if num_ends <= self._num_tries:
            return False
        self._num_tries = num_ends
        call, end = self._family.read(self._held, 0, self._tools, is_whole=False)
        # An argument may have marks of an end, too. Counting those before the call's own makes all cuts of a text equal.
        if call is None or self._held.count(HERMES_END, 0, end) > MAX_BROKEN_CALLS:
            return False
        self._add(call)
        self._held, self._num_tries, self._step = self._held[end:], 0, OutputSplitter._read_content
        return True

    def _add(self, item: str | FunctionCall) -> None:
        """Append a call, or content."""
        if isinstance(item, FunctionCall):
            self._new_calls.append(item)
            self._has_calls = True
            if not self._has_content:
                self._space = ""
            return
        text = self._space + item
        found = text.rstrip()
        self._space = text[len(found) :]
        if self._has_calls and not self._has_content:
            found = found.lstrip()
        self._new_content += found
        self._has_content |= bool(found)


def before_mark(text: str, *marks: str) -> tuple[str, str]:
    """Return the text without the beginning of one of the marks at its end, and that beginning."""
    sizes = range(min(max(map(len, marks)) - 1, len(text)), 0, -1)
    length = next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)
    return text[: len(text) - length], text[len(text) - length :]
