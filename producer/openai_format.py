"""Requests and answers in the format of OpenAI's API, for `/v1/completions` and `/v1/chat/completions`.

A line of a batch file is `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`; see `docs/run-batch.md`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from millrace.producer.checks import remedy
from millrace.producer.errors import InvalidRequest
from millrace.producer.request import CHAT_FIELDS, GenerationRequest
from millrace.producer.sampling import SamplingParams
from millrace.producer.wire import check_names, decoding_reason
from millrace.results.errors import one_line, shown
from millrace.results.job import CompletionOutput, Job
from millrace.results.logprobs import Logprob, TokenLogprobs
from millrace.results.messages import JobError

Url = Literal["/v1/completions", "/v1/chat/completions"]
URLS: tuple[Url, Url] = ("/v1/completions", "/v1/chat/completions")

_SAMPLING_NAMES = frozenset(SamplingParams.__struct_fields__)
_REQUEST_NAMES = frozenset({"priority", "cache_salt", "response_format"})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "include_reasoning": (True,),
    "length_penalty": (1, 1.0),
    "logprobs": (False,),
    "modalities": (["text"],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "store": (True, False),
    "stream": (False,),
    "suffix": ("",),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
}
"""Fields of OpenAI's and vLLM's APIs without an equal here, and the values with which they change nothing. null changes
nothing in any field."""
_INSTEAD = {
    "echo": "for the log-probabilities of a prompt use prompt_logprobs",
    **dict.fromkeys(("text", "text_format"), "use response_format, as the API of chat completions has it"),
}
_WITHOUT_EFFECT = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "user"}
)
"""Fields that say nothing about the text."""
_ALIASES = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}
"""Names of a chat's fields in OpenAI's API, and ours."""


class BatchLine(msgspec.Struct, frozen=True):
    """A line of a batch file. `body` is not checked yet."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class AnsweredLine(msgspec.Struct, frozen=True):
    """What the answer to a line needs of it."""

    custom_id: str
    url: Url
    model: str | None
    """None in a line without one, which any model answers."""
    num_top: int | None = None
    """For how many of the most likely tokens the answer has log-probabilities; -1: all. None: it has none at all."""
    aliases: Mapping[str, str] = {}
    """By the name of a field the name that the line has for it, for errors."""


_line_decoder = msgspec.json.Decoder(BatchLine)


def parse_line(raw: bytes, defaults: Mapping[str, Any] | None = None) -> tuple[AnsweredLine, GenerationRequest]:
    """Return what the answer needs of a line, and its request, which has no id. `defaults` are fields for a body that
    lacks them. Raises InvalidRequest with the name of the field."""
    try:
        line = _line_decoder.decode(raw)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise InvalidRequest(path.strip("`.").partition(".")[0] or "line", f"is not valid: {message}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("line", f"is not valid JSON in UTF-8: {decoding_reason(raw, error)}") from error
    check_names(raw)
    if line.method != "POST":
        raise InvalidRequest("method", f"must be POST, got {shown(line.method)}")
    url = next((url for url in URLS if url == line.url), None)
    if url is None:
        raise InvalidRequest("url", f"must be one of {', '.join(URLS)}, got {shown(line.url)}")
    model = line.body.get("model")
    if model is not None and (type(model) is not str or not model):
        raise InvalidRequest("model", f"must be the name of the model, got {shown(model)}")
    given = {_ALIASES.get(name, name) for name, value in line.body.items() if value is not None}
    gaps = {name: value for name, value in (defaults or {}).items() if name not in given}
    request = to_request(url, {**line.body, **gaps})
    return AnsweredLine(line.custom_id, url, model, request.sampling.logprobs, _aliases(url, line.body)), request


def to_request(url: Url, body: dict[str, Any]) -> GenerationRequest:
    """Return the request for the body of a call. Raises InvalidRequest, also for fields that are not supported."""
    is_chat = url == "/v1/chat/completions"
    given = {name: value for name, value in body.items() if value is not None}
    fields: dict[str, Any] = {"model": given.pop("model", None)}
    sampling: dict[str, Any] = {"max_tokens": None} if is_chat else {}
    text_field = "messages" if is_chat else "prompt"
    if text_field not in given:
        raise InvalidRequest(text_field, "is missing")
    fields |= {"messages": given.pop("messages")} if is_chat else _prompt(given.pop("prompt"))
    if is_chat and "max_completion_tokens" in given:
        if "max_tokens" in given:
            raise InvalidRequest("max_completion_tokens", "is another name of max_tokens; give one of them")
        given["max_tokens"] = given.pop("max_completion_tokens")
    if is_chat:
        sampling |= _chat_logprobs(given.pop("logprobs", False), given.pop("top_logprobs", None))
    if given.get("add_special_tokens") is (not is_chat):  # vLLM's field, and its default: a template writes them itself
        del given["add_special_tokens"]
    for name, value in given.items():
        if name in _WITHOUT_EFFECT or _is_neutral(name, value):
            continue
        if name in _SAMPLING_NAMES:
            sampling[name] = value
        elif name in _REQUEST_NAMES or (is_chat and name in CHAT_FIELDS):
            fields[name] = value
        elif name in _NEUTRAL:
            instead = _INSTEAD.get(name, "leave it out")
            raise InvalidRequest(name, f"is not supported with the value {shown(value)}; {instead}")
        else:
            known = (*_SAMPLING_NAMES, *_REQUEST_NAMES, text_field, *((*CHAT_FIELDS, *_ALIASES) if is_chat else ()))
            raise InvalidRequest(name, f"is not supported by {url}; {_INSTEAD.get(name) or remedy(name, known)}")
    try:
        return GenerationRequest(sampling=SamplingParams(**sampling), **fields)
    except InvalidRequest as error:
        raise _renamed(error, _aliases(url, body)) from error


def _aliases(url: Url, body: dict[str, Any]) -> dict[str, str]:
    if url == "/v1/chat/completions":
        return {name: alias for alias, name in _ALIASES.items() if body.get(alias) is not None}
    return {"prompt_token_ids": "prompt"} if type(body.get("prompt")) is list else {}


def _renamed(error: InvalidRequest, aliases: Mapping[str, str]) -> InvalidRequest:
    """Return the error in the names that its line has for the fields."""
    return InvalidRequest(_in_names(error.field, aliases), _in_names(error.message, aliases))


def _in_names(text: str, aliases: Mapping[str, str]) -> str:
    for name, alias in aliases.items():
        text = re.sub(rf"(?<![\w-]){name}\b", alias, text)
    return text


def _is_neutral(name: str, value: Any) -> bool:
    return any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ()))


def _chat_logprobs(is_wanted: Any, num_top: Any) -> dict[str, int]:
    if type(is_wanted) is not bool:
        raise InvalidRequest("logprobs", f"must be true or false in a chat, got {shown(is_wanted)}")
    if num_top is not None and (type(num_top) is not int or num_top < -1):
        raise InvalidRequest("top_logprobs", f"must be an integer of at least -1, got {shown(num_top)}")
    if num_top and not is_wanted:
        raise InvalidRequest("top_logprobs", "needs logprobs; set logprobs to true")
    return {"logprobs": num_top or 0} if is_wanted else {}


def _prompt(value: Any) -> dict[str, Any]:
    """Return the field for a prompt: a string, token ids, or a list of one of them."""
    if type(value) is list and len(value) == 1 and type(value[0]) in (str, list):
        value = value[0]
    if type(value) is list and value and type(value[0]) in (str, list):
        raise InvalidRequest("prompt", f"has {len(value)} prompts; give one on each line")
    return {"prompt_token_ids": value} if type(value) is list else {"prompt": value}


# --- answers ---


def ended_line(line_id: str, line: AnsweredLine, job: Job) -> dict[str, Any]:
    """Return the line of the output file for a job that has ended."""
    if job.state == "finished" and job.has_result:
        return _answer(line_id, line.custom_id, 200, _result(line, job))
    if job.state == "failed" and job.error is not None:
        return _answer(line_id, line.custom_id, *_failure(line, job.error))
    if not job.has_result:
        code, message = "result_expired", f"the result of job {job.id} has expired"
    else:
        code = "batch_expired" if job.state == "expired" else "batch_cancelled"
        message = (
            f"job {job.id} was {job.state}" if job.state == "cancelled" else f"the deadline of job {job.id} has passed"
        )
    error = {"code": code, "message": message}
    return {"id": line_id, "custom_id": line.custom_id, "response": None, "error": error}


def refused_line(
    line_id: str, custom_id: str | None, error: InvalidRequest, aliases: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the line of the output file for a line of the input that cannot run. `aliases`: those of that line."""
    error = _renamed(error, aliases or {})
    return _answer(line_id, custom_id, 400, _error("invalid_request_error", str(error), error.field, None))


def _answer(line_id: str, custom_id: str | None, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": line_id, "body": body}
    return {"id": line_id, "custom_id": custom_id, "response": response, "error": None}


def _failure(line: AnsweredLine, error: JobError) -> tuple[int, dict[str, Any]]:
    if error.kind == "model_mismatch":
        return 404, _error("invalid_request_error", error.message, "model", "model_not_found")
    if error.kind == "invalid_request":
        field = error.field and _in_names(error.field, line.aliases)
        return 400, _error("invalid_request_error", _in_names(error.message, line.aliases), field, None)
    return 500, _error("server_error", error.message, None, error.kind)


def _error(kind: str, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": one_line(message), "type": kind, "param": param, "code": code}}


def _result(line: AnsweredLine, job: Job) -> dict[str, Any]:
    is_chat = line.url == "/v1/chat/completions"
    prompt_logprobs = {} if job.prompt_logprobs is None else {"prompt_logprobs": job.prompt_logprobs}
    choices: list[dict[str, Any]] = []
    for output in job.outputs:
        logprobs = None
        if output.logprobs is not None and line.num_top is not None:
            logprobs = (_chat_tokens if is_chat else _completion_tokens)(output.logprobs, line.num_top)
        choice: dict[str, Any] = {"index": output.index, "logprobs": logprobs, "finish_reason": output.finish_reason}
        choice["stop_reason"] = output.stop_reason
        if is_chat:
            choice["message"] = _message(output)
            if output.tool_calls and output.finish_reason == "stop":
                choice["finish_reason"] = "tool_calls"
        else:
            choice["text"] = output.text
            choice |= prompt_logprobs
        choices.append(choice)
    assert job.usage is not None
    usage = job.usage
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{job.id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": (job.timings.ended_ms or job.timings.created_ms) // 1000,
        "model": line.model or "",
        "choices": choices,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
        "metrics": {**job.timings.durations, "attempt": job.attempt, "engine": job.engine},
        **(prompt_logprobs if is_chat else {}),
    }


def _message(output: CompletionOutput) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": output.content, "refusal": None}
    if output.reasoning is not None:
        message["reasoning"] = message["reasoning_content"] = output.reasoning  # vLLM's name, and the older one
    if output.tool_calls:
        calls = msgspec.to_builtins(output.tool_calls)
        message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
    return message


def _chat_tokens(tokens: list[TokenLogprobs], num_top: int) -> dict[str, Any]:
    def described(token_id: int, one: Logprob) -> dict[str, Any]:
        text = _text_of(token_id, one)
        return {"token": text, "logprob": one.logprob, "bytes": list(text.encode())}

    content = []
    for token in tokens:
        top = [described(*each) for each in _most_likely(token, num_top)]
        content.append({**described(*next(iter(token.items()))), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _completion_tokens(tokens: list[TokenLogprobs], num_top: int) -> dict[str, Any]:
    own = [next(iter(token.items())) for token in tokens]
    texts = [_text_of(*each) for each in own]
    # As in vLLM, the token itself is there too. Of tokens with one text it counts, else the most likely one.
    top = [
        {_text_of(*each): each[1].logprob for each in [*reversed(_most_likely(token, num_top)), own[i]]}
        for i, token in enumerate(tokens)
    ]
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for _, one in own],
        "top_logprobs": top,
        "text_offset": [0, *itertools.accumulate(map(len, texts))][: len(texts)],
    }


def _most_likely(token: TokenLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    ordered = sorted(token.items(), key=lambda each: -each[1].logprob)
    return ordered if num_top < 0 else ordered[:num_top]


def _text_of(token_id: int, one: Logprob) -> str:
    return f"token_id:{token_id}" if one.decoded_token is None else one.decoded_token
