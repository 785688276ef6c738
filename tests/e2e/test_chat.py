"""Chats of a service: its template, and what a template that loops costs others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageFunctionToolCall

from millrace import Client, Job
from millrace.engine_service.chat.output_format import HARMONY
from tests.e2e.conftest import StartEngine
from tests.e2e.echo_worker import TEMPLATE
from tests.e2e.engines import LIMIT_S, ROOT, EngineProcess
from tests.engine_service.chat.models import TINY, model_with_template
from tests.processes import children_of

LOOPS = (
    "{% for i in range(loops | default(0)) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    "{% if reason is defined %}{{ raise_exception(reason) }}{% endif %}"
)


def test_a_template_that_loops_or_raises_fails_its_chat_and_disturbs_no_other_job(
    client: Client, start_engine: StartEngine, tmp_path: Path
) -> None:
    source = LOOPS + (TINY / "chat_template.jinja").read_text()
    engine = start_engine(model=model_with_template(tmp_path / "model", source))
    chat = [{"role": "user", "content": "What is 20 + 22?"}]
    running = client.submit("A story:", max_tokens=300, ignore_eos=True, stream=True)
    next(iter(client.stream(running)))
    looping = [
        client.submit(messages=chat, chat_template_kwargs={"loops": 90_000}, tenant="loops", max_retries=0)
        for _ in range(3)
    ]
    others = [
        client.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0),
        client.submit(messages=chat, max_tokens=16, temperature=0.0),
    ]
    assert [client.wait(job_id, LIMIT_S).text.strip() for job_id in others] == ["7", "20 + 22 = 42"]
    assert client.wait(running, LIMIT_S).state == "finished"
    for job_id in looping:
        job = client.wait(job_id, LIMIT_S)
        assert job.error is not None
        assert (job.state, job.error.kind, job.error.field) == ("failed", "invalid_request", "messages")
        assert "the model's chat template takes more than 1 s for these messages" in job.error.message
    raising = client.submit(messages=chat, chat_template_kwargs={"reason": "Roles must\nalternate"})
    error = client.wait(raising, LIMIT_S).error
    assert error is not None
    assert error.message.endswith("can't render these messages: Roles must alternate")
    for is_stopped in (False, True):
        if is_stopped:
            for pid in render_processes(engine.process.pid):
                os.kill(pid, signal.SIGSTOP)
        job_id = client.submit(messages=chat, max_tokens=16, temperature=0.0, tenant="other")
        assert client.wait(job_id, LIMIT_S).text.strip() == "20 + 22 = 42"


def render_processes(engine_pid: int) -> list[int]:
    pids = [pid for pid in children_of(engine_pid) if b"render_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert pids
    return pids


@pytest.mark.parametrize(
    "fields", [{"prompt": "A story about a fox:"}, {"messages": [{"role": "user", "content": "A story about a fox"}]}]
)
def test_candidates_that_end_at_different_times_are_streamed(
    fields: dict[str, Any], client: Client, start_engine: StartEngine
) -> None:
    """A candidate that has ended, by a token without text, is saved again with the others."""
    start_engine()
    job_id = client.submit(**fields, n=3, max_tokens=200, seed=5, stream=True)
    events = list(client.stream(job_id, timeout_s=LIMIT_S))
    job = client.get(job_id)
    lengths = {len(output.token_ids) for output in job.outputs}
    assert (job.state, job.error, len(lengths) > 1) == ("finished", None, True)
    assert "stop" in events[-1].finish_reasons
    for output in job.outputs:
        own = [event for event in events if event.index == output.index]
        assert "".join(event.text for event in own) == "".join(event.content or "" for event in own) == output.text


CALL = '{"name": "add", "arguments": {"a": 3, "b": 4}}'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture
def start_echo(redis_url: str, queue_name: str, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Return a function that starts an engine whose model repeats the last user message. Its template has these marks, and
    its tokenizer these special tokens."""
    with ExitStack() as stack:

        def start(marks: str, special_tokens: tuple[str, ...] = (), *options: str) -> None:
            model = model_with_template(tmp_path / "model", f"{{# {marks} #}}{TEMPLATE}", special_tokens)
            log, module = tmp_path / "engine.log", "tests.e2e.echo_worker"
            engine = EngineProcess(log, redis_url, queue_name, *options, model=model, module=module)
            stack.enter_context(engine).wait_until_serving()

        yield start


def chat_of(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def call_of(job: Job) -> tuple[str, dict[str, int]]:
    (call,) = job.tool_calls
    return call.function.name, json.loads(call.function.arguments)


ADD = ("add", {"a": 3, "b": 4})


def test_reasoning_content_and_calls_are_split_and_text_and_stream_stay_raw(
    client: Client, start_echo: Callable[..., None]
) -> None:
    start_echo("<tool_call> </think>")
    text = f"<think>\nThree and four.\n</think>\n\nI add.<tool_call>{CALL}</tool_call>"
    options: dict[str, Any] = {"messages": chat_of(text), "max_tokens": None, "tools": TOOLS}
    job_id = client.submit(**options, stream=True)
    events = list(client.stream(job_id))
    assert "".join(event.text for event in events) == text
    job = client.get(job_id)
    assert "".join(event.reasoning or "" for event in events) == job.reasoning
    assert "".join(event.content or "" for event in events) == job.content
    assert [call for event in events for call in event.tool_calls] == job.tool_calls
    assert (job.text, job.content, job.reasoning) == (text, "I add.", "Three and four.")
    assert (call_of(job), job.finish_reason) == (ADD, "stop")
    assert job.tool_calls[0].id.startswith("call_")
    assert (job.outputs[0].content, job.outputs[0].tool_calls) == (job.content, job.tool_calls)

    both = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    other = [
        client.wait(client.submit(**{**options, **fields}), LIMIT_S)
        for fields in (
            {"tool_choice": "none"},
            {"tools": None},
            {"messages": chat_of("I add.")},
            {"messages": chat_of("Hm</think>Seven"), "chat_template_kwargs": {"opens_reasoning": True}},
            {"max_tokens": 60},
            {"messages": chat_of(both), "n": 2},
            {"messages": chat_of(both), "parallel_tool_calls": False},
            {"stop": ["</tool_call>"]},
        )
    ]
    rest = text.partition("</think>\n\n")[2]
    assert [(job.content, job.reasoning, len(job.tool_calls)) for job in other] == [
        (rest, "Three and four.", 0),
        (rest, "Three and four.", 0),
        ("I add.", None, 0),
        ("Seven", "Hm", 0),
        (other[4].text.partition("</think>\n\n")[2], "Three and four.", 0),
        (None, None, 2),
        (None, None, 1),
        ("I add.", "Three and four.", 1),
    ]
    calls = [call for output in other[5].outputs for call in output.tool_calls]
    assert (len({call.id for call in calls}), [call.index for call in calls]) == (4, [0, 1, 0, 1])


@pytest.mark.parametrize(
    ("marks", "text", "parser"),
    [
        ("[TOOL_CALLS]", f"Well.[TOOL_CALLS][{CALL}]", "auto"),
        ("<|python_tag|>", f"Well.<|python_tag|>{CALL}", "auto"),
        ("<tool_call> </tool_call>", f"Well.<tool_call>{CALL}</tool_call>", "hermes"),
    ],
)
def test_marks_that_are_special_tokens_are_read_though_the_text_leaves_them_out(
    marks: str, text: str, parser: str, client: Client, start_echo: Callable[..., None]
) -> None:
    special = tuple(marks.split())
    start_echo(marks, special, "--tool-call-parser", parser)
    options: dict[str, Any] = {"messages": chat_of(text), "max_tokens": None, "tools": TOOLS}
    raw = text
    for mark in special:
        raw = raw.replace(mark, "")
    for fields in ({}, {"stop": ["never"]}, {"n": 2}, {"stream": True}):
        job = client.wait(client.submit(**options, **fields), LIMIT_S)
        assert (job.text, job.content, call_of(job)) == (raw, "Well.", ADD)
    shown = client.wait(client.submit(**options, skip_special_tokens=False), LIMIT_S)
    assert (shown.content, call_of(shown)) == ("Well.", ADD)
    assert shown.text.startswith(text)
    (broken, mark) = f"Well.{special[0]}{{broken", special[0]
    job = client.wait(client.submit(**{**options, "messages": chat_of(broken)}), LIMIT_S)
    assert (job.content, job.text, job.tool_calls) == (broken.replace(mark, ""), broken.replace(mark, ""), [])


def test_messages_of_harmony_are_split_though_the_text_leaves_out_their_marks(
    client: Client, start_echo: Callable[..., None]
) -> None:
    start_echo(" ".join(HARMONY), HARMONY)
    text = (  # without <|end|>, which ends the message to repeat
        "<|channel|>analysis<|message|>Three and four.<|start|>assistant<|channel|>commentary<|message|>I add."
        '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 3, "b": 4}<|call|>'
    )
    options: dict[str, Any] = {"messages": chat_of(text), "max_tokens": None, "tools": TOOLS}
    for fields in ({}, {"stop": ["never"]}, {"n": 2}, {"skip_special_tokens": False}):
        job = client.wait(client.submit(**options, **fields), LIMIT_S)
        assert (job.content, job.reasoning, call_of(job)) == ("I add.", "Three and four.", ADD)
    job_id = client.submit(**options, stream=True)
    events = list(client.stream(job_id))
    assert "".join(event.reasoning or "" for event in events) == "Three and four."
    assert "".join(event.content or "" for event in events) == "I add."
    assert [call for event in events for call in event.tool_calls] == client.get(job_id).tool_calls


def test_an_output_of_marks_alone_has_no_content(client: Client, start_echo: Callable[..., None]) -> None:
    start_echo("<think> </think>", ("<think>", "</think>"))
    for text in ("<think>", "<think></think>"):
        job_id = client.submit(messages=chat_of(text), max_tokens=None, stream=True)
        assert [event.content for event in client.stream(job_id) if event.content is not None] == []
        job = client.get(job_id)
        assert (job.text, job.content, job.reasoning) == ("", None, None)


def test_a_mark_in_the_users_text_opens_no_reasoning(client: Client, start_echo: Callable[..., None]) -> None:
    start_echo("<think> </think>", ("<think>", "</think>"))
    job = client.wait(client.submit(messages=chat_of("What is <think>?"), max_tokens=None), LIMIT_S)
    assert (job.content, job.reasoning) == ("What is ?", None)


def test_arguments_between_tags_are_read_by_the_schemas_of_the_request(
    client: Client, start_echo: Callable[..., None]
) -> None:
    start_echo("<tool_call> <function=")
    pairs = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in (("a", 3), ("b", 4)))
    text = f"I add.<tool_call>\n<function=add>\n{pairs}</function>\n</tool_call>"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    job = client.wait(client.submit(messages=chat_of(text), max_tokens=None, tools=tools), LIMIT_S)
    assert (job.content, call_of(job)) == ("I add.", ADD)


def test_parsers_can_be_turned_off(client: Client, start_echo: Callable[..., None]) -> None:
    start_echo("<tool_call> </think>", (), "--tool-call-parser", "none", "--reasoning-parser", "none")
    text = f"<think>\nHm.\n</think>\n\n<tool_call>{CALL}</tool_call>"
    job = client.wait(client.submit(messages=chat_of(text), max_tokens=None, tools=TOOLS), LIMIT_S)
    assert (job.text, job.content, job.reasoning, job.tool_calls) == (text, text, None, [])


def test_the_example_calls_functions_until_the_model_answers(
    client: Client, start_echo: Callable[..., None], redis_url: str, queue_name: str
) -> None:
    start_echo("<tool_call>")
    example = [sys.executable, str(ROOT / "examples" / "tools.py"), "--redis", redis_url, "--queue", queue_name]
    for call, result in ((CALL, "7"), ('{"name": "sub"}', '{"error": "KeyError: \'sub\'"}')):
        question = f"<tool_call>{call}</tool_call>"
        ran = subprocess.run([*example, question], capture_output=True, text=True, timeout=LIMIT_S)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.splitlines()[-1] == result
    assert client.stats().finished == 4


def test_the_example_is_a_conversation_with_reasoning_tokens_and_times(
    client: Client, start_echo: Callable[..., None], redis_url: str, queue_name: str
) -> None:
    start_echo("<think> </think>", ("<think>", "</think>"), "--reasoning-parser", "qwen3")
    example = [sys.executable, str(ROOT / "examples" / "chat.py"), "--redis", redis_url, "--queue", queue_name]
    questions = ["<think>Hm.</think>Seven.", "Eight."]
    ran = subprocess.run(
        [*example, *questions, "--thinking-token-budget", "9"], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert (lines[:2], lines[5]) == (["(Hm.)", "Seven."], "Eight.")
    tokens, times, engine = lines[2:5]
    assert re.fullmatch(r"  [0-9]+ prompt tokens \(0 cached\), [0-9]+ of the answer", tokens)
    assert re.fullmatch(r"  [0-9.]+ s in the queue, [0-9.]+ s to the first token, [0-9.]+ s in all", times)
    assert engine.startswith("  attempt 1 on engine ")
    ran = subprocess.run(example, input="Nine.\n\nTen.", capture_output=True, text=True, timeout=LIMIT_S)
    assert [line for line in ran.stdout.splitlines() if not line.startswith(" ")] == ["Nine.", "Ten."], ran.stderr
    assert client.stats().finished == 4


def test_a_file_of_chats_is_answered_in_the_form_that_openais_own_types_read(
    start_echo: Callable[..., None], redis_url: str, queue_name: str, tmp_path: Path
) -> None:
    start_echo("<tool_call> </think>", (), "--served-model-name", "tiny")
    call = f"<tool_call>{CALL}</tool_call>"
    bodies: dict[str, dict[str, Any]] = {
        "call": {"messages": chat_of(f"<think>Hm.</think>{call}"), "tools": TOOLS, "tool_choice": "auto", "n": 2},
        "first": {"messages": chat_of(call + call), "tools": TOOLS, "parallel_tool_calls": False},
        "none": {"messages": chat_of(call), "tools": TOOLS, "tool_choice": "none"},
        "cut": {"messages": chat_of(call), "tools": TOOLS, "max_tokens": 5},
        "opened": {"messages": chat_of("Hm</think>7"), "chat_template_kwargs": {"opens_reasoning": True}},
        "any": {"messages": chat_of("7"), "tools": TOOLS, "tool_choice": "any"},
    }
    line = {"method": "POST", "url": "/v1/chat/completions"}
    (tmp_path / "in.jsonl").write_text(
        "".join(
            json.dumps({"custom_id": name, **line, "body": {"model": "tiny", **body}}) + "\n"
            for name, body in bodies.items()
        )
    )
    files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    where = ("--redis", redis_url, "--queue", queue_name)
    ran = subprocess.run(
        [sys.executable, "-m", "millrace", "run-batch", *where, *files], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ran.returncode == 1, ran.stderr
    output = (tmp_path / "out.jsonl").read_text()
    answers = {(one := json.loads(each))["custom_id"]: one["response"] for each in output.splitlines()}
    assert answers["any"]["status_code"] == 400
    assert answers.pop("any")["body"]["error"]["param"] == "tool_choice"
    found = {name: ChatCompletion.model_validate(answer["body"], strict=True) for name, answer in answers.items()}
    summary = {
        name: [
            (choice.finish_reason, choice.message.content, len(choice.message.tool_calls or []))
            for choice in one.choices
        ]
        for name, one in found.items()
    }
    assert summary == {
        "call": [("tool_calls", None, 1)] * 2,
        "first": [("tool_calls", None, 1)],
        "none": [("stop", call, 0)],
        "cut": [("length", summary["cut"][0][1], 0)],
        "opened": [("stop", "7", 0)],
    }
    tool_call = found["first"].choices[0].message.tool_calls
    assert tool_call is not None
    assert isinstance(tool_call[0], ChatCompletionMessageFunctionToolCall)
    assert (tool_call[0].function.name, json.loads(tool_call[0].function.arguments)) == ADD
    assert [answers[name]["body"]["choices"][0]["message"].get("reasoning_content") for name in ("call", "opened")] == [
        "Hm.",
        "Hm",
    ]
