"""The events of a chat have the parts of its output, whoever publishes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine_service.chat.output_format import OutputFormat
from millrace.engine_service.chat.outputs import ChatOutputs
from millrace.engine_service.core.sequence import Sequence, StopRules
from millrace.engine_service.generation import Generation, TextRules
from millrace.engine_service.serving.jobs import ServedJob
from millrace.engine_service.serving.output import Output
from millrace.engine_service.text import Tokenizer
from millrace.executor.wire.messages import RowSampling, SeqId
from millrace.producer import GenerationRequest, SamplingParams
from millrace.results.messages import (
    Append,
    ChatOutput,
    Checkpoint,
    ClaimedJob,
    Event,
    Finish,
    JobId,
    Lease,
    ToolCall,
    Write,
)
from tests.engine_service.chat.models import WEATHER, model_with_template

GREEDY = RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [])
PROMPT = [5, 6, 7]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"town": "Rome"}}</tool_call>'
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEXTS = (
    f"<think>\nA town: é.\n</think>\n\nI look. {CALL}\n{CALL} done <tool",
    "<think>Hm</think>",
    "Seven <tool_call>7",
    " \n",
    f"</tool_call> a</think> {CALL}",
)


@pytest.fixture(scope="module", params=[(), MARKS], ids=["text", "special"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("model") / "model"
    return Tokenizer(model_with_template(path, "{{ messages }}", request.param))


class Attempts:
    """One chat, and the engines that run it one after the other."""

    def __init__(self, tokenizer: Tokenizer, **fields: Any) -> None:
        sampling = SamplingParams(max_tokens=500, skip_special_tokens=fields.pop("skip_special_tokens", True))
        request = GenerationRequest(
            messages=[{"role": "user", "content": "?"}], tools=[WEATHER], sampling=sampling, **fields
        )
        self.reader = ChatOutputs(OutputFormat("hermes", "qwen3"), tokenizer).reader(request, PROMPT)
        self.rules = TextRules(skip_special_tokens=sampling.skip_special_tokens)
        self.tokenizer = tokenizer
        self.events: list[Event] = []
        self.is_watched = True

    def begin(self, token_ids: list[int], num_published: int) -> ServedJob:
        rules = StopRules(max_tokens=500, min_tokens=0, end_token_ids=frozenset())
        sequence = Sequence(SeqId(1), PROMPT, GREEDY, rules, output_token_ids=list(token_ids))
        claimed = ClaimedJob(
            job_id=JobId("a"), lease=Lease(1), attempt=1, body=b"{}", seed=1, cost=1, crash_count=0, created_ms=0,
            checkpoints=[Checkpoint(list(token_ids), num_published)], is_watched=self.is_watched,
        )  # fmt: skip
        self.output = Output(self.write, "model-a")
        return ServedJob(claimed, [Generation(sequence, self.rules, self.tokenizer)], due_s=0.0, chat=self.reader)

    def write(self, write: Write) -> None:
        if isinstance(write, Append):
            self.events += [output.event for output in write.outputs if output.event is not None]
        elif isinstance(write, Finish):
            self.events += write.events

    def run(self, token_ids: list[int], cuts: dict[int, str]) -> None:
        """Generate these tokens. A cut is "save" or "die", behind a number of tokens."""
        job = self.begin([], 0)
        for count, token_id in enumerate(token_ids, 1):
            generation = job.generations[0]
            generation.sequence.append(token_id)
            generation.advance("length" if count == len(token_ids) else None)
            match cuts.get(count):
                case "save":
                    self.output.save(job, 0.0)
                case "die":
                    job = self.begin(token_ids[:count], sum(len(event.token_ids) for event in self.events))
        if job.generations[0].finish_reason is None:  # it died with the last token
            job.generations[0].advance("length")
        self.output.finish(job)


def parts_of(events: list[Event]) -> tuple[str, str, list[ToolCall]]:
    chats = [ChatOutput(content=event.text) if event.chat is None else event.chat for event in events]
    return (
        "".join(chat.content or "" for chat in chats),
        "".join(chat.reasoning or "" for chat in chats),
        [call for chat in chats for call in chat.tool_calls],
    )


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=2),
    cuts=st.dictionaries(st.integers(1, 120), st.sampled_from(["save", "die"])),
    is_parallel=st.booleans(),
    skips=st.booleans(),
)
def test_the_parts_are_the_same_wherever_an_engine_publishes_or_dies(
    tokenizer: Tokenizer, pieces: list[str], cuts: dict[int, str], is_parallel: bool, skips: bool
) -> None:
    token_ids = tokenizer.encode("".join(pieces))
    fields: dict[str, Any] = {"parallel_tool_calls": is_parallel, "skip_special_tokens": skips}
    undisturbed, watched = Attempts(tokenizer, **fields), Attempts(tokenizer, **fields)
    undisturbed.is_watched = False
    undisturbed.run(token_ids, {})
    watched.run(token_ids, cuts)
    assert len(undisturbed.events) == 1
    assert parts_of(watched.events) == parts_of(undisturbed.events)
    assert "".join(event.text for event in watched.events) == undisturbed.events[0].text


def test_what_events_held_back_comes_at_the_end_also_without_another_token(tokenizer: Tokenizer) -> None:
    attempts = Attempts(tokenizer)
    job = attempts.begin([], 0)
    for token_id in tokenizer.encode("Seven <to"):
        job.generations[0].sequence.append(token_id)
    job.generations[0].advance(None)
    attempts.output.save(job, 0.0)
    attempts.output.abort(job, "cancelled")
    first, last = attempts.events
    assert (first.text, first.chat) == ("Seven <to", ChatOutput(content="Seven"))
    assert (last.offset, last.token_ids, last.text) == (len(first.token_ids), [], "")
    assert last.chat == ChatOutput(content=" <to")


def test_a_call_and_the_reasoning_come_before_the_end(tokenizer: Tokenizer) -> None:
    attempts = Attempts(tokenizer)
    token_ids = tokenizer.encode(f"<think>One town.</think>{CALL} So")
    attempts.run(token_ids, dict.fromkeys(range(len(token_ids)), "save"))
    with_parts = [event for event in attempts.events if event.chat not in (None, ChatOutput())]
    reasoning = [event.chat.reasoning for event in with_parts if event.chat and event.chat.reasoning]
    assert len(reasoning) > 2
    assert "".join(reasoning) == "One town."
    (call,) = (event for event in with_parts if event.chat and event.chat.tool_calls)
    assert call is not attempts.events[-1]


def test_an_event_that_is_content_has_no_parts(tokenizer: Tokenizer) -> None:
    attempts = Attempts(tokenizer)
    token_ids = tokenizer.encode("Seven")
    attempts.run(token_ids, dict.fromkeys(range(len(token_ids)), "save"))
    assert [event.chat for event in attempts.events] == [None] * len(attempts.events)
