"""Requests and answers in OpenAI's format."""

from __future__ import annotations

import re
from typing import Any, get_type_hints

import msgspec
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from millrace.producer import GenerationRequest, InvalidRequest, SamplingParams, StructuredOutputs
from millrace.producer.openai_format import AnsweredLine, ended_line, parse_line, refused_line
from millrace.results.job import CompletionOutput, Job, Timings
from millrace.results.logprobs import Logprob, TokenLogprobs
from millrace.results.messages import FunctionCall, JobError, ToolCall, Usage

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


def line(url: str, body: dict[str, Any], **other: Any) -> bytes:
    return msgspec.json.encode(
        {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m", **body}, **other}
    )


def parsed(url: str, body: dict[str, Any]) -> GenerationRequest:
    return parse_line(line(url, body))[1]


def test_a_completion_has_openais_defaults_and_names() -> None:
    request = parsed(COMPLETIONS, {"prompt": "2 + 2 =", "temperature": 0, "stop": "\n", "seed": 3, "user": "u"})
    assert request == GenerationRequest(
        prompt="2 + 2 =", model="m", sampling=SamplingParams(temperature=0, stop="\n", seed=3)
    )


def test_defaults_fill_the_gaps_of_a_line_which_needs_no_model() -> None:
    body = {"messages": MESSAGES, "top_p": None, "max_completion_tokens": 5, "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    defaults = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 50}
    answered, request = parse_line(msgspec.json.encode(line), defaults)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0, 0.9, 5)
    assert (answered.model, request.model) == (None, None)


def test_a_chat_generates_to_the_end_of_the_context_unless_it_says_otherwise() -> None:
    assert parsed(CHAT, {"messages": MESSAGES}) == GenerationRequest(
        messages=MESSAGES, model="m", sampling=SamplingParams(max_tokens=None)
    )
    for name in ("max_tokens", "max_completion_tokens"):
        assert parsed(CHAT, {"messages": MESSAGES, name: 7}).sampling.max_tokens == 7


def test_a_response_format_is_the_form_of_the_output() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    sampling = SamplingParams(
        max_tokens=None, structured_outputs=StructuredOutputs(json=schema, given_as="response_format")
    )
    expected = GenerationRequest(messages=MESSAGES, model="m", sampling=sampling)
    assert parsed(CHAT, {"messages": MESSAGES, "response_format": form}) == expected


@pytest.mark.parametrize("prompt", ["p", ["p"]])
def test_a_prompt_may_be_alone_in_a_list(prompt: Any) -> None:
    assert parsed(COMPLETIONS, {"prompt": prompt}).prompt == "p"


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]]])
def test_a_prompt_may_be_token_ids(prompt: Any) -> None:
    assert parsed(COMPLETIONS, {"prompt": prompt}).prompt_token_ids == [1, 2]


@pytest.mark.parametrize(
    "body",
    [
        {"stream": False, "logprobs": None, "n": 1, "response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "none", "store": False, "metadata": {"a": "b"}, "presence_penalty": 0},
        {
            "prompt_cache_key": "k",
            "prompt_cache_retention": "24h",
            "add_special_tokens": False,
            "include_reasoning": True,
        },
        {"use_beam_search": False, "length_penalty": 1.0, "return_token_ids": False, "truncation_side": "left"},
    ],
)
def test_fields_that_change_nothing_are_taken(body: dict[str, Any]) -> None:
    assert parsed(CHAT, {"messages": MESSAGES, **body}) == parsed(CHAT, {"messages": MESSAGES})


@pytest.mark.parametrize(("url", "kind"), [(CHAT, ChatParams), (COMPLETIONS, CompletionParams)])
def test_no_field_of_openais_types_is_taken_and_ignored(url: str, kind: Any) -> None:
    text_field = {"messages": MESSAGES} if url == CHAT else {"prompt": "p"}
    say_nothing_of_the_text = {"metadata", "safety_identifier", "user"}
    for name in get_type_hints(kind).keys() - say_nothing_of_the_text:
        if not name.startswith("prompt_cache_"):
            with pytest.raises(InvalidRequest) as refused:
                parsed(url, {**text_field, name: {"unlikely": 1}})
            assert refused.value.field == name


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        (CHAT, {"messages": MESSAGES, "stream": True}, "stream"),
        *[(CHAT, {"messages": MESSAGES, "logprobs": value}, "logprobs") for value in (1, "true", [True])],
        *[
            (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": value}, "top_logprobs")
            for value in (-2, "2", True, 1.0)
        ],
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        (COMPLETIONS, {"prompt": "p", "logprobs": True}, "logprobs"),
        (COMPLETIONS, {"prompt": "p", "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"messages": MESSAGES, "prompt": "p"}, "prompt"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"prompt": "p"}, "messages"),
        (COMPLETIONS, {"prompt": "p", "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": "p", "use_beam_search": True}, "use_beam_search"),
        *[(CHAT, {"messages": MESSAGES, "add_special_tokens": value}, "add_special_tokens") for value in (True, "no")],
        (COMPLETIONS, {"prompt": "p", "add_special_tokens": False}, "add_special_tokens"),
        (COMPLETIONS, {"prompt": "p", "logprobs": -2}, "logprobs"),
        (COMPLETIONS, {"prompt": "p", "max_completion_tokens": 3}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": "p", "max_token": 3}, "max_token"),
        (COMPLETIONS, {"prompt": ["p", "q"]}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, -1]}, "prompt"),
        (COMPLETIONS, {"prompt": [1], "prompt_token_ids": [1]}, "prompt_token_ids"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": "p", "temperature": "hot"}, "temperature"),
        (COMPLETIONS, {"prompt": "p", "model": 7}, "model"),
        (COMPLETIONS, {"prompt": "p", "id": "mine"}, "id"),
        ("/v1/embeddings", {"input": "p"}, "url"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(url: str, body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_line(line(url, body))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("url", "field", "remedy"),
    [
        (COMPLETIONS, "max_token", "did you mean max_tokens?"),
        (COMPLETIONS, "max_completion_tokens", "use max_tokens"),
        (COMPLETIONS, "weather", "leave it out"),
        (CHAT, "guided_json", 'use structured_outputs={"json": ...}'),
        (CHAT, "text", "use response_format"),
        (CHAT, "text_format", "use response_format"),
        (CHAT, "extra_body", "use its fields as fields of the request"),
        (CHAT, "max_completion_token", "did you mean max_completion_tokens?"),
        (CHAT, "chat_template", "the operator of the engine chooses the template; leave it out"),
    ],
)
def test_an_unknown_field_is_refused_with_the_one_that_could_be_meant(url: str, field: str, remedy: str) -> None:
    text_field = {"messages": MESSAGES} if url == CHAT else {"prompt": "p"}
    with pytest.raises(InvalidRequest, match=re.escape(f"{field}: is not supported by {url}; {remedy}")):
        parsed(url, {**text_field, field: 3})


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"{", "line"),
        (b"\xff\xfe", "line"),
        (b"[" * 100_000, "line"),
        (b"[]", "line"),
        (b'{"custom_id": 3, "method": "POST", "url": "u", "body": {}}', "custom_id"),
        (b'{"custom_id": "a", "method": "POST", "url": "u"}', "line"),
        (b'{"custom_id": "a", "method": "POST", "url": "u", "body": {"prompt": "x", "prompt": "y"}}', "prompt"),
        (line(CHAT, {"messages": MESSAGES}, method="GET"), "method"),
    ],
)
def test_a_broken_line_is_refused(raw: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_line(raw)
    assert refused.value.field == field
    assert len(str(refused.value)) < 500


def test_half_a_surrogate_pair_is_called_what_it_is_in_a_line_too() -> None:
    with pytest.raises(InvalidRequest, match=r"^line: .*a string has half of a surrogate pair, such as "):
        parse_line(line(COMPLETIONS, {"prompt": "HALF"}).replace(b"HALF", b"\\ud800"))


# --- answers ---


def ended(
    state: str = "finished",
    error: JobError | None = None,
    *,
    num_outputs: int = 1,
    has_result: bool = True,
    logprobs: list[TokenLogprobs] | None = None,
) -> Job:
    """`logprobs`: also those of the prompt, behind its first token."""
    outputs = [
        CompletionOutput(index=i, text=f"t{i}", token_ids=[1], finish_reason="stop", content=f"t{i}", logprobs=logprobs)
        for i in range(num_outputs)
    ]
    return Job(
        id="j",
        state=state,
        text="t0",
        token_ids=[1],
        outputs=outputs,
        finish_reason="stop",
        usage=Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4),
        error=error,
        timings=Timings(created_ms=1000, started_ms=2500, first_token_ms=3000, ended_ms=9000),
        attempt=2,
        engine="e-1",
        has_result=has_result,
        prompt_logprobs=None if logprobs is None else [None, *logprobs],
    )


def known(url: str) -> AnsweredLine:
    body = {"messages": MESSAGES} if url == CHAT else {"prompt": "p"}
    return parse_line(line(url, body))[0]


def test_a_chat_is_answered_in_openais_form() -> None:
    answer = ended_line("r-1", known(CHAT), ended(num_outputs=2))
    assert (answer["id"], answer["custom_id"], answer["error"]) == ("r-1", "a", None)
    assert (answer["response"]["status_code"], answer["response"]["request_id"]) == (200, "r-1")
    body = answer["response"]["body"]
    assert (body["id"], body["object"], body["created"], body["model"]) == ("chatcmpl-j", "chat.completion", 9, "m")
    assert [choice["message"]["content"] for choice in body["choices"]] == ["t0", "t1"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop"]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    times = {"queued_s": 1.5, "prefill_s": 0.5, "decode_s": 6.0, "total_s": 8.0}
    assert body["metrics"] == {**times, "attempt": 2, "engine": "e-1"}


def test_a_completion_is_answered_in_openais_form() -> None:
    body = ended_line("r-1", known(COMPLETIONS), ended())["response"]["body"]
    assert (body["id"], body["object"], body["choices"][0]["text"]) == ("cmpl-j", "text_completion", "t0")


SCORED: list[TokenLogprobs] = [
    {7: Logprob(-0.5, 1, " h"), 8: Logprob(-1.5, 2, "é")},
    {9: Logprob(-4.0, 5, ""), 7: Logprob(-0.25, 1, " h"), 8: Logprob(-2.0, 2, "é")},
    {8: Logprob(-0.75, 1, "é"), 9: Logprob(-9999.0, 3, "")},
]


def test_log_probabilities_of_a_chat_have_openais_form() -> None:
    assert parsed(CHAT, {"messages": MESSAGES, "logprobs": True}).sampling.logprobs == 0
    assert parsed(CHAT, {"messages": MESSAGES, "logprobs": False, "top_logprobs": 0}).sampling.logprobs is None
    assert parsed(CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": -1}).sampling.logprobs == -1
    call, request = parse_line(line(CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}))
    assert request.sampling.logprobs == 2
    body = ended_line("r-1", call, ended(logprobs=SCORED))["response"]["body"]
    content = body["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["logprob"], one["bytes"]) for one in content] == [
        (" h", -0.5, [32, 104]),
        ("", -4.0, []),
        ("é", -0.75, [195, 169]),
    ]
    assert [[each["token"] for each in one["top_logprobs"]] for one in content] == [[" h", "é"], [" h", "é"], ["é", ""]]
    (choice,) = ChatCompletion.model_validate_json(msgspec.json.encode(body), strict=True).choices
    assert choice.logprobs is not None
    assert choice.logprobs.model_dump() == body["choices"][0]["logprobs"]


def test_an_answer_with_everything_is_read_by_openais_types() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": MESSAGES, "tools": tools, "n": 2, "logprobs": True, "top_logprobs": 1, "prompt_logprobs": 1}
    call, _ = parse_line(line(CHAT, body))
    made = ended(num_outputs=2, logprobs=SCORED)
    tool_call = ToolCall(id="call_1", function=FunctionCall(name="f", arguments="{}"))
    parts: dict[str, Any] = {"content": None, "reasoning": "Hm", "tool_calls": [tool_call]}
    job = msgspec.structs.replace(made, outputs=[msgspec.structs.replace(made.outputs[0], **parts), made.outputs[1]])
    answer = msgspec.json.encode(ended_line("r-1", call, job)["response"]["body"])
    completion = ChatCompletion.model_validate_json(answer, strict=True)
    first, second = completion.choices
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "stop")
    assert first.message.tool_calls is not None
    assert [each.id for each in first.message.tool_calls] == ["call_1"]
    assert first.message.model_extra == {"reasoning": "Hm", "reasoning_content": "Hm"}
    assert (second.message.content, second.message.tool_calls, second.message.model_extra) == ("t1", None, {})
    assert all(choice.logprobs is not None for choice in (first, second))
    assert [choice.model_extra for choice in (first, second)] == [{"stop_reason": None}, {"stop_reason": None}]
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 4
    assert completion.model_extra is not None
    assert len(completion.model_extra["prompt_logprobs"]) == 4


def test_log_probabilities_of_a_completion_have_openais_older_form() -> None:
    call, request = parse_line(line(COMPLETIONS, {"prompt": "p", "logprobs": 2, "prompt_logprobs": 1}))
    assert (request.sampling.logprobs, request.sampling.prompt_logprobs) == (2, 1)
    body = ended_line("r-1", call, ended(logprobs=SCORED))["response"]["body"]
    assert body["choices"][0]["logprobs"] == {
        "tokens": [" h", "", "é"],
        "token_logprobs": [-0.5, -4.0, -0.75],
        "top_logprobs": [{" h": -0.5, "é": -1.5}, {" h": -0.25, "é": -2.0, "": -4.0}, {"é": -0.75, "": -9999.0}],
        "text_offset": [0, 2, 2],
    }
    assert body["choices"][0]["prompt_logprobs"] == [None, *SCORED]
    Completion.model_validate_json(msgspec.json.encode(body), strict=True)
    alone, _ = parse_line(line(COMPLETIONS, {"prompt": "p", "logprobs": 0}))
    (choice,) = ended_line("r-1", alone, ended(logprobs=SCORED))["response"]["body"]["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{" h": -0.5}, {"": -4.0}, {"é": -0.75}], "as in vLLM"


def test_an_answer_says_at_what_it_stopped() -> None:
    job = ended()
    stopped = msgspec.structs.replace(job, outputs=[msgspec.structs.replace(job.outputs[0], stop_reason="\n")])
    for url in (CHAT, COMPLETIONS):
        (choice,) = ended_line("r-1", known(url), stopped)["response"]["body"]["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "\n")


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [("invalid_request", 400, None), ("model_mismatch", 404, "model_not_found"), ("crashed", 500, "crashed")],
)
def test_a_failed_job_is_an_answer_with_an_error(kind: str, status: int, code: str | None) -> None:
    answer = ended_line("r-1", known(CHAT), ended("failed", JobError(kind=kind, message="why")))
    assert answer["response"]["status_code"] == status
    error = answer["response"]["body"]["error"]
    assert (error["message"], error["code"]) == ("why", code)


@pytest.mark.parametrize("alias", ["", "max_completion_tokens", "top_logprobs"])
def test_an_error_has_the_name_that_the_line_has(alias: str) -> None:
    given = {alias: 5, "logprobs": True} if alias else {"max_tokens": 5, "logprobs": True}
    call, _ = parse_line(line(CHAT, {"messages": MESSAGES, **given}))
    name = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}.get(alias, "logprobs")
    message = f"{name}: is too much, see --max-logprobs"
    error = JobError(kind="invalid_request", message=message, field=name)
    expected = message.replace(name, alias or name, 1)
    found = ended_line("r-1", call, ended("failed", error))["response"]["body"]["error"]
    assert (found["param"], found["message"]) == (alias or name, expected)
    refused = refused_line("r-1", None, InvalidRequest(name, message.partition(": ")[2]), call.aliases)
    assert refused["response"]["body"]["error"]["message"] == expected


@pytest.mark.parametrize("prompt", [[999999], [[999999]]])
def test_an_error_of_the_token_ids_names_the_prompt(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: must not be empty$"):
        parse_line(line(COMPLETIONS, {"prompt": []}))
    call, _ = parse_line(line(COMPLETIONS, {"prompt": prompt}))
    message = "prompt_token_ids: has the token id 999999, outside of the vocabulary"
    error = JobError(kind="invalid_request", message=message, field="prompt_token_ids")
    found = ended_line("r-1", call, ended("failed", error))["response"]["body"]["error"]
    assert (found["param"], found["message"]) == ("prompt", message.replace("prompt_token_ids", "prompt"))


def test_an_error_of_a_text_may_advise_token_ids() -> None:
    call, _ = parse_line(line(COMPLETIONS, {"prompt": "p"}))
    message = "prompt: the engine's model has no tokenizer; send prompt_token_ids"
    error = JobError(kind="invalid_request", message=message, field="prompt")
    found = ended_line("r-1", call, ended("failed", error))["response"]["body"]["error"]
    assert found["message"] == message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_completion_tokens": "5"}, "max_completion_tokens: must be an integer from 1 "),
        ({"max_completion_tokens": 3, "min_tokens": 4}, "min_tokens: is 4, more than max_completion_tokens, 3"),
        ({"max_completion_tokens": 3, "max_tokens": 3}, "max_completion_tokens: is another name of "),
        ({"logprobs": True, "top_logprobs": 2**31}, "top_logprobs: must be an integer from -1 "),
        ({"logprobs": 5, "top_logprobs": 2}, "logprobs: must be true or false in a chat"),
    ],
)
def test_a_refused_field_has_the_name_that_the_line_has(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        parse_line(line(CHAT, {"messages": MESSAGES, **body}))


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (ended("expired"), "batch_expired"),
        (ended("cancelled"), "batch_cancelled"),
        (ended(has_result=False), "result_expired"),
    ],
)
def test_a_job_without_an_answer_has_an_error_of_the_batch(job: Job, code: str) -> None:
    answer = ended_line("r-1", known(CHAT), job)
    assert (answer["response"], answer["error"]["code"]) == (None, code)


def test_a_refused_line_is_an_answer_with_openais_error() -> None:
    answer = refused_line("r-1", None, InvalidRequest("url", "must be another"))
    assert answer["custom_id"] is None
    assert answer["response"] == {
        "status_code": 400,
        "request_id": "r-1",
        "body": {
            "error": {
                "message": "url: must be another",
                "type": "invalid_request_error",
                "param": "url",
                "code": None,
            }
        },
    }
