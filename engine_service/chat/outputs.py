"""Read the outputs of chats: what of a job's text is reasoning, content and tool calls."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from millrace.engine_service.chat.grammars import chat_form, must_constrain_tools
from millrace.engine_service.chat.output_format import OutputFormat, Parts
from millrace.engine_service.generation import Generation
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
        self._special_ids = {mark: found for mark in form.marks if (found := tokenizer.special_id(mark)) is not None}

    def reader(self, request: GenerationRequest, prompt_token_ids: list[int]) -> ChatReader | None:
        """Return the reader for the outputs of a request; None where the text is all there is."""
        has_tools = request.tools is not None and request.tool_choice != "none" and self._form.tool_calls is not None
        if request.messages is None or not request.sampling.detokenize or not (has_tools or self._form.reasoning):
            return None
        begins = self._begins_in_reasoning(request, prompt_token_ids)
        special_marks = frozenset(self._special_ids.values())
        return ChatReader(self._form, special_marks, begins, has_tools, request.parallel_tool_calls)

    def form(self, request: GenerationRequest, prompt_token_ids: list[int]) -> StructuredOutputs | None:
        """Return the form of the outputs of a request; None for free text. Raises InvalidRequest."""
        wanted = request.sampling.structured_outputs
        if request.messages is None or (wanted is None and not must_constrain_tools(request)):
            return wanted
        begins = self._begins_in_reasoning(request, prompt_token_ids)
        return chat_form(request, self._form, self._special_ids.get, begins_in_reasoning=begins)

    def _begins_in_reasoning(self, request: GenerationRequest, prompt_token_ids: list[int]) -> bool:
        if request.continue_final_message and request.messages:
            prompt = str(request.messages[-1]["content"])
        else:
            prompt = self._tokenizer.decode(prompt_token_ids[-_NUM_TAIL_TOKENS:], skip_special_tokens=False)
        return self._form.begins_in_reasoning(prompt)


class ChatReader(msgspec.Struct, frozen=True):
    """Reads the outputs of one job."""

    _form: OutputFormat
    _special_marks: frozenset[int]
    _begins_in_reasoning: bool
    _has_tools: bool
    _is_parallel: bool

    def read(self, job_id: str, index: int, generation: Generation) -> ChatOutput | None:
        """Return the parts of a candidate's output; None where the whole text is content."""
        text = generation.final_text_with(self._special_marks)
        parts = self._form.split(text, begins_in_reasoning=self._begins_in_reasoning, has_tools=self._has_tools)
        if parts == Parts(text, None, []):
            return None
        calls = [
            ToolCall(id=self._call_id(f"{job_id}:{index}:{number}"), function=call)
            for number, call in enumerate(parts.tool_calls if self._is_parallel else parts.tool_calls[:1])
        ]
        return ChatOutput(content=parts.content, reasoning=parts.reasoning, tool_calls=calls)

    def _call_id(self, name: str) -> str:
        """Return an id that another attempt of the job gives too. Templates of Mistral want 9 letters or digits."""
        digits = blake2b(name.encode(), digest_size=12).hexdigest()
        return digits[:9] if self._form.tool_calls == "mistral" else f"call_{digits}"
