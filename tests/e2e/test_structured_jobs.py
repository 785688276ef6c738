"""Structured outputs of a service: every way to submit, tools and reasoning, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from jsonschema import validate

from millrace import Client, Job
from millrace.engine_service.text import Tokenizer
from millrace.results.keys import QueueKeys
from tests.e2e.conftest import SERVED_MODEL, Service, StartEngine
from tests.e2e.engines import LIMIT_S
from tests.engine_service.chat.models import TINY, model_with_template

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {
    "type": "object",
    "properties": {"sum": NUMBER, "parts": {"type": "array", "items": NUMBER, "maxItems": 3}},
    "required": ["sum", "parts"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": SCHEMA}}
ADD = {"name": "add", "parameters": {**SCHEMA, "properties": {"sum": NUMBER, "parts": {"const": []}}}}
CHAT = [{"role": "user", "content": "What is 20 + 22?"}]


def check(job: Job) -> None:
    assert (job.state, job.finish_reason) == ("finished", "stop"), job
    validate(job.parsed(), SCHEMA)


def test_every_way_to_submit_takes_a_form(
    shared_client: Client, service: Service, redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    body: dict[str, Any] = {"prompt": "20 + 22 =", "max_tokens": 60}
    ids = [
        shared_client.submit(**body, structured_outputs={"json": SCHEMA}),
        shared_client.submit(**body, response_format=FORMAT),
        shared_client.submit(messages=CHAT, max_tokens=60, response_format=FORMAT),
    ]
    for name, form in (("a", {"structured_outputs": {"json": SCHEMA}}), ("b", {"response_format": FORMAT})):
        entry = json.dumps({"id": f"inbox-{name}", **body, **form})
        redis_client.xadd(QueueKeys(service.queue).inbox, {"job": entry})
        ids.append(f"inbox-{name}")
    line: dict[str, Any] = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"model": SERVED_MODEL, "messages": CHAT, "max_tokens": 60, "response_format": FORMAT}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    place = ("--redis", redis_url, "--queue", service.queue)
    files = ("-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out.jsonl")
    for command in (
        ("submit", *place, "20 + 22 =", "--schema", f"{tmp_path}/schema.json", "--max-tokens", "60", "--wait"),
        ("run-batch", *place, *files),
    ):
        ran = subprocess.run(
            [sys.executable, "-m", "millrace", *command], capture_output=True, text=True, timeout=LIMIT_S
        )
        assert ran.returncode == 0, ran.stderr
        if "--wait" in command:
            validate(json.loads(ran.stdout), SCHEMA)
            assert ran.stderr == ""
            cut = [sys.executable, "-m", "millrace", *("2" if each == "60" else each for each in command)]
            ran = subprocess.run(cut, capture_output=True, text=True, timeout=LIMIT_S)
            assert (ran.returncode, len(ran.stderr.splitlines())) == (0, 1)
            assert "cut at the limit of tokens" in ran.stderr
    answer = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]["choices"][0]
    validate(json.loads(answer["message"]["content"]), SCHEMA)
    assert answer["finish_reason"] == "stop"
    for job_id in ids:
        check(shared_client.wait(job_id, LIMIT_S))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("a killed worker", marks=pytest.mark.faults),
        pytest.param("TP 2", marks=pytest.mark.ranks),
    ],
)
def test_tool_calls_are_the_same_with(case: str, client: Client, start_engine: StartEngine, tmp_path: Path) -> None:
    source = "{# <tool_call> #}" + (TINY / "chat_template.jinja").read_text()
    model = model_with_template(tmp_path / "model", source)
    tools = [{"type": "function", "function": {"name": "now", "parameters": SCHEMA}}]
    how: dict[str, Any] = {
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "n": 4,
        "seed": 2,
    }

    def submit() -> str:
        return client.submit(messages=CHAT, tools=tools, stream=True, **how)

    engine = start_engine("--dtype", "float32", model=model)
    expected = [output.token_ids for output in client.wait(submit(), LIMIT_S).outputs]
    if case == "TP 2":
        engine.kill()
        start_engine("--dtype", "float32", "--tensor-parallel-size", "2", model=model)
        job_id = submit()
    else:
        job_id = submit()
        next(iter(client.stream(job_id)))
        os.kill(engine.worker_pids()[0], signal.SIGKILL)
    outputs = client.wait(job_id, LIMIT_S).outputs
    assert [output.token_ids for output in outputs] == expected
    assert [len(output.tool_calls) for output in outputs if output.finish_reason != "length"]


def test_forms_take_the_models_own_marks_where_they_are_added_tokens_that_are_not_special(
    client: Client, start_engine: StartEngine, tmp_path: Path
) -> None:
    """As in the tokenizers of Qwen."""
    source = (TINY / "chat_template.jinja").read_text() + "{{ end }}{# <tool_call> </think> #}"
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    model = model_with_template(tmp_path / "model", source, tags=tags)
    start_engine(model=model)
    ids = {tag: Tokenizer(model).mark_id(tag) or 0 for tag in tags}
    tools = [{"type": "function", "function": {**ADD, "strict": True}}]
    options: dict[str, Any] = {"messages": CHAT, "max_tokens": 100, "seed": 1}
    opened, closed = ({"chat_template_kwargs": {"end": f"<think>{end}"}} for end in ("", "\n\n</think>\n\n"))
    prefers = {tag: {"logit_bias": {str(ids[tag]): 60.0}} for tag in tags}
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    once = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    requests: list[dict[str, Any]] = [
        {**choice, **opened, **prefers["</think>"]},
        {**choice, **opened, "thinking_token_budget": 3},
        {**once, **opened, **prefers["</think>"]},
        {"tools": tools, **closed, **prefers["<tool_call>"]},
    ]
    ended, limited, required, strict = (client.wait(client.submit(**options, **fields), LIMIT_S) for fields in requests)
    assert ended.token_ids[0] == required.token_ids[0] == ids["</think>"]
    assert (ended.finish_reason, ended.content in ("yes", "no"), ended.reasoning) == ("stop", True, None)
    assert limited.token_ids.index(ids["</think>"]) == 3
    assert (limited.finish_reason, limited.content in ("yes", "no")) == ("stop", True)
    (call,) = required.tool_calls
    validate(json.loads(call.function.arguments), ADD["parameters"])
    assert required.token_ids.count(ids["<tool_call>"]) == required.token_ids.count(ids["</tool_call>"]) == 1
    assert strict.token_ids[0] == ids["<tool_call>"]
    assert strict.text.startswith('<tool_call>\n{"name": "add", "arguments": {')


def test_an_answer_in_a_form_of_the_caller_is_no_call(
    client: Client, start_engine: StartEngine, tmp_path: Path
) -> None:
    source = "{# <|python_tag|> #}" + (TINY / "chat_template.jinja").read_text()
    start_engine(model=model_with_template(tmp_path / "model", source))
    form: dict[str, Any] = {"type": "object", "properties": {"name": {"const": "add"}, "parameters": {"const": {}}}}
    form |= {"required": ["name", "parameters"], "additionalProperties": False}
    answer = '{"name":"add","parameters":{}}'
    options: dict[str, Any] = {"messages": CHAT, "max_tokens": 100}
    for strict in (False, True):
        tools = [{"type": "function", "function": {**ADD, "strict": strict}}]
        own: list[dict[str, Any]] = [{"json": form}, {"choice": [answer]}]
        for wanted in own:
            job = client.wait(client.submit(**options, tools=tools, structured_outputs=wanted), LIMIT_S)
            assert (job.content, job.tool_calls) == (answer, [])
        whole = {"grammar": f"start: {json.dumps(answer)}"}
        job = client.wait(client.submit(**options, tools=tools, structured_outputs=whole), LIMIT_S)
        assert (job.content, [call.function.name for call in job.tool_calls]) == (None, ["add"])


@pytest.mark.parametrize("family", ["<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"])
def test_required_calls_have_arguments_that_fit(
    family: str, client: Client, start_engine: StartEngine, tmp_path: Path
) -> None:
    source = f"{{# {family} </think> #}}" + (TINY / "chat_template.jinja").read_text()
    start_engine(model=model_with_template(tmp_path / "model", source))
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": ADD},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "maxProperties": 0}}},
    ]
    strict = [{"type": "function", "function": {**ADD, "strict": True}}]
    options: dict[str, Any] = {"messages": CHAT, "tools": tools, "parallel_tool_calls": False, "max_tokens": 200}
    named = {"type": "function", "function": {"name": "add"}}
    jobs = {
        choice: client.submit(**options, tool_choice=named if choice == "named" else choice, n=4, seed=2)
        for choice in ("named", "required")
    }
    for choice, job_id in jobs.items():
        job = client.wait(job_id, LIMIT_S)
        assert job.error is None
        for output in job.outputs:
            if output.finish_reason == "length":  # it has reasoned until then
                assert output.text.startswith("<think>")
                continue
            (call,) = output.tool_calls
            assert call.function.name == "add" or choice == "required"
            if call.function.name == "add":
                validate(json.loads(call.function.arguments), ADD["parameters"])
    bad: dict[str, Any] = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}
    bad["function"]["parameters"] = {"properties": {"a": {"uniqueItems": True}}}
    error = client.wait(client.submit(**{**options, "tools": [bad]}), LIMIT_S).error
    assert error is not None and error.field == "tools"
    assert error.message.startswith("tools: the parameters of f: at #/properties/a: Unimpl")
    for cause, fields in (("tool_choice", {"tool_choice": "required"}), ("strict tools", {"tools": strict})):
        error = client.wait(client.submit(**{**options, **fields, "min_tokens": 3}), LIMIT_S).error
        assert error is not None and error.field == "min_tokens" and f"given with {cause}: " in error.message
    form = {"json": {"type": "object", "properties": {"a": {"type": "objct"}}}}
    error = client.wait(client.submit(messages=CHAT, structured_outputs=form), LIMIT_S).error
    assert error is not None and error.field == "structured_outputs"
    assert "#/properties/a: Invalid type: objct" in error.message
