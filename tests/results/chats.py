"""A chat as the queue sees one, for tests: events with the parts of its output."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.results.messages import ChatOutput, ClaimedJob, FunctionCall, ToolCall
from tests.results.engines import Engine

PARTS = ("text", "content", "reasoning", "tool_calls")


def show_chat(
    engine: Engine, job: ClaimedJob, numbers: Iterable[int], index: int | None = None, *, first: int = 0
) -> None:
    """Show events of a chat of 9: four are reasoning, the fifth is a mark, two are content, then come a call and content.
    `first`: tokens before it."""
    for number in numbers:
        text = f"é{number} "
        call = ToolCall(id=f"call_{number}", function=FunctionCall(name="f", arguments='{"a": "é\\n"}'))
        chat = {7: ChatOutput(tool_calls=[call]), 4: ChatOutput()}.get(number)
        if number < 4:
            chat = ChatOutput(reasoning=text)
        assert engine.show(job, first + number, [number], text, index, chat) == "ok"
