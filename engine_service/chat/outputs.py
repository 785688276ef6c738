"""Read the outputs of chats: what of a job's text is reasoning, content and tool calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from millrace.engine_service.chat.grammars import WHOLE_FORMS, chat_form, must_constrain_tools
from millrace.engine_service.chat.harmony import HarmonySplitter
from millrace.engine_service.chat.output_format import OutputFormat, ReasoningState
from millrace.engine_service.chat.output_splitter import OutputSplitter, Parts
from millrace.engine_service.chat.tool_calls import Tools
from millrace.engine_service.text import Tokenizer
from millrace.producer import GenerationRequest, StructuredOutputs
from millrace.results.messages import ChatOutput, ToolCall

_NUM_TAIL_TOKENS = 16
"""Tokens at the end of a prompt in which a template may open the reasoning."""


class ChatOutputs:
    """Owns the output format of one model. Safe to use from several threads."""

    def __init__(self, form: OutputFormat, tokenizer: Tokenizer) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._marks = {found: mark for mark in form.marks if (found := tokenizer.special_id(mark)) is not None}

    def reader(self, request: GenerationRequest, prompt_token_ids: list[int]) -> ChatReader | None:
        """Return the reader for the outputs of a request; None where the text is all there is."""
        tools = _callable_tools(request) if self._form.tool_calls is not None else None
        if request.messages is None or not request.sampling.detokenize or not (tools or self._form.reasoning):
            return None
        begins = self._reasoning_before(request, prompt_token_ids) == "open"
        hidden = self._marks if request.sampling.skip_special_tokens else {}
        return ChatReader(self._form, hidden, begins, tools, request.parallel_tool_calls)

    def form(self, request: GenerationRequest, prompt_token_ids: list[int]) -> StructuredOutputs | None:
        """Return the form of the outputs of a request; None for free text. Raises InvalidRequest."""
        wanted = request.sampling.structured_outputs
        if request.messages is None or (wanted is None and not must_constrain_tools(request)):
            return wanted
        before = self._reasoning_before(request, prompt_token_ids)
        return chat_form(request, self._form, self._tokenizer.mark_id, before)

    def _reasoning_before(self, request: GenerationRequest, prompt_token_ids: list[int]) -> ReasoningState:
        if request.continue_final_message and request.messages:
            return self._form.reasoning_before(str(request.messages[-1]["content"]), is_message=True)
        tail = self._tokenizer.decode(prompt_token_ids[-_NUM_TAIL_TOKENS:], skip_special_tokens=False)
        return self._form.reasoning_before(tail, is_message=False)


def _callable_tools(request: GenerationRequest) -> Tools | None:
    """Return the tools whose calls are read. None: there are none, or calls in the output stay text."""
    own_form = request.sampling.structured_outputs
    if request.tool_choice == "none" or (own_form is not None and own_form.form not in WHOLE_FORMS):
        return None
    functions = [tool["function"] for tool in request.tools or ()]
    return {function["name"]: function.get("parameters") or {} for function in functions} or None


class ChatReader(msgspec.Struct, frozen=True):
    """How the outputs of one job are read."""

    form: OutputFormat
    hidden_marks: Mapping[int, str]
    """Marks that are special tokens, and that the text leaves out: their ids and texts."""
    begins_in_reasoning: bool
    tools: Tools | None
    is_parallel: bool
    """Whether all calls of an output count, not only the first."""


def splitter_of(
    form: OutputFormat, tools: Tools | None, *, begins_in_reasoning: bool = False
) -> OutputSplitter | HarmonySplitter:
    """Return the splitter for an output of this form. `tools`: those of the request; None: calls stay content."""
    splitter = HarmonySplitter if form.is_harmony else OutputSplitter
    return splitter(form, tools, begins_in_reasoning=begins_in_reasoning)


class CandidateParts:
    """Splits the output of one candidate while it grows."""

    def __init__(self, reader: ChatReader, job_id: str, index: int) -> None:
        self.hidden_marks = reader.hidden_marks
        """The fed texts must have them: see `Generation.marked_text_between`."""
        self._splitter = splitter_of(reader.form, reader.tools, begins_in_reasoning=reader.begins_in_reasoning)
        self._has_short_ids = reader.form.tool_calls == "mistral"
        self._max_calls = math.inf if reader.is_parallel else 1
        self._num_calls = 0
        self._name = f"{job_id}:{index}"

    def feed(self, text: str) -> ChatOutput:
        """Return what this text adds to the parts."""
        return self._output(self._splitter.feed(text))

    def end(self, text: str) -> ChatOutput:
        """Return what the last text adds."""
        return self._output(self._splitter.end(text))

    def _output(self, parts: Parts) -> ChatOutput:
        calls = []
        for call in parts.tool_calls:
            if self._num_calls < self._max_calls:
                calls.append(ToolCall(index=self._num_calls, id=self._call_id(self._num_calls), function=call))
                self._num_calls += 1
        return ChatOutput(content=self._shown(parts.content), reasoning=self._shown(parts.reasoning), tool_calls=calls)

    def _shown(self, text: str | None) -> str | None:
        """Return the text without the marks that it leaves out. A special token is fed, and comes back, as a whole."""
        if text is None:
            return None
        for mark in self.hidden_marks.values():
            text = text.replace(mark, "")
        return text or None

    def _call_id(self, number: int) -> str:
        """Return an id that another attempt of the job gives too. Templates of Mistral want 9 letters or digits."""
        digits = blake2b(f"{self._name}:{number}".encode(), digest_size=12).hexdigest()
        return digits[:9] if self._has_short_ids else f"call_{digits}"
