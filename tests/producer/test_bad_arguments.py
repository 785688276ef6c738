"""Every argument of every method with values that it cannot have: both clients answer with their own errors, in one line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from types import GeneratorType, NoneType
from typing import Any, cast

import pytest
from numpy import array, float64, int64, ndarray

from millrace import (
    AsyncClient,
    Client,
    GenerationRequest,
    InvalidRequest,
    MillraceError,
    SamplingParams,
    StructuredOutputs,
)
from millrace.producer.options import SubmitOptions
from millrace.producer.wire import parse_body

CONTROLS = "a\nb\r\t\x1b[31m\0\x85\u2028\u202e"


class Hostile:
    """Raises in whatever it is asked for."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")

    __hash__ = None  # type: ignore[assignment]


class Verbose:
    def __repr__(self) -> str:
        return CONTROLS * 10_000


@cache
def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


def bad_values() -> Iterator[tuple[str, Any]]:
    """Made anew for each test, as some can be used only once."""
    yield from {
        "None": None,
        "true": True,
        "false": False,
        "0": 0,
        "-1": -1,
        "5": 5,
        "2**70": 2**70,
        "10**5000": 10**5000,
        "1.5": 1.5,
        "5.0": 5.0,
        "nan": math.nan,
        "inf": math.inf,
        "an empty string": "",
        "a number in a string": "5",
        "half a surrogate pair": "\ud800",
        "control characters": CONTROLS,
        "a long string": CONTROLS * 90_000,
        "an event out of range": "18446744073709551616-0",
        "bytes": b"bytes",
        "a list": [],
        "a list of strings": ["a"],
        "a list of long strings": [CONTROLS * 90_000],
        "a list of numpy integers": [int64(1)],
        "a deep list": nested(100_000),
        "a tuple": (1, 2),
        "a set": {"a"},
        "a dict": {},
        "a dict by numbers": {1: 2},
        "a dict with a long key": {CONTROLS * 90_000: object()},
        "a dict with what JSON has not": {"a": {"b": (1,), "c": b"x", "d": {1: 2}, "e": 2**70, "f": math.nan}},
        "an iterator": (n for n in (1, 2)),
        "an array of integers": array([1, 2]),
        "an array of strings": array(["memory", "a"]),
        "an empty array": array([]),
        "a numpy integer": int64(1),
        "a numpy float": float64(0.5),
        "a type": int,
        "a function": lambda: None,
        "a hostile object": Hostile(),
        "a verbose object": Verbose(),
    }.items()


Call = Callable[[Any, Any], Any]
NUMBER = (int, float)
ITERABLE = (list, tuple, set, dict, ndarray, GeneratorType)

FIELDS: dict[str, tuple[type, ...]] = {
    "job_id": (str,),
    "model": (str,),
    "prompt_token_ids": (list,),
    "messages": (list,),
    "tools": (list,),
    "tool_choice": (),
    "parallel_tool_calls": (bool,),
    "add_generation_prompt": (bool,),
    "continue_final_message": (bool,),
    "chat_template_kwargs": (dict,),
    "tenant": (str,),
    "priority": (int,),
    "stream": (bool,),
    "deadline_s": NUMBER,
    "delay_s": NUMBER,
    "run_at": NUMBER,
    "meta": (dict,),
    "cache_salt": (str,),
    "max_retries": (int,),
    "sampling": (SamplingParams,),
    "max_tokens": (int,),
    "min_tokens": (int,),
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": (int,),
    "min_p": NUMBER,
    "seed": (int,),
    "stop": (str, list),
    "stop_token_ids": (list,),
    "ignore_eos": (bool,),
    "detokenize": (bool,),
    "skip_special_tokens": (bool,),
    "spaces_between_special_tokens": (bool,),
    "include_stop_str_in_output": (bool,),
    "truncate_prompt_tokens": (int,),
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logit_bias": (dict,),
    "allowed_token_ids": (list,),
    "bad_words": (list,),
    "thinking_token_budget": (int,),
    "n": (int,),
    "logprobs": (int,),
    "prompt_logprobs": (int,),
    "structured_outputs": (dict,),
    "response_format": (dict,),
    "response_model": (type,),
}
CHAT_FIELDS = list(FIELDS)[list(FIELDS).index("tools") : list(FIELDS).index("tenant")]


def submit_with(name: str) -> Call:
    if name in CHAT_FIELDS:
        chat = [{"role": "user", "content": "x"}]
        return lambda client, value: client.submit(messages=chat, **{name: value})
    prompt = None if name in ("prompt_token_ids", "messages") else "x"
    return lambda client, value: client.submit(prompt, **{name: value})


ARGUMENTS: dict[str, tuple[Call, tuple[type, ...]]] = {
    **{f"submit({name}=)": (submit_with(name), (*types, NoneType)) for name, types in FIELDS.items()},
    "submit(prompt=)": (lambda client, value: client.submit(value), (str, NoneType)),
    "submit(batch=)": (lambda client, value: client.submit("x", batch=value), (str, NoneType)),
    "submit(durability=)": (lambda client, value: client.submit("x", durability=value), (str,)),
    "submit_many(requests=)": (lambda client, value: client.submit_many(value), ITERABLE),
    "submit_many(batch=)": (lambda client, value: client.submit_many([], batch=value), (str, NoneType)),
    "submit_many(durability=)": (lambda client, value: client.submit_many([], durability=value), (str,)),
    "cancel(job_id=)": (lambda client, value: client.cancel(value), (str,)),
    "cancel_many(job_ids=)": (lambda client, value: client.cancel_many(value), ITERABLE),
    "delete_many(job_ids=)": (lambda client, value: client.delete_many(value), ITERABLE),
    "cancel_batch(batch=)": (lambda client, value: client.cancel_batch(value), (str,)),
    "retry(job_id=)": (lambda client, value: client.retry(value), (str,)),
    "retry_batch(batch=)": (lambda client, value: client.retry_batch(value), (str,)),
    "sleep(level=)": (lambda client, value: client.sleep(value), (int,)),
    "sleep(engine_id=)": (lambda client, value: client.sleep(engine_id=value), (str, NoneType)),
    "reset_prefix_cache()": (lambda client, value: client.reset_prefix_cache(engine_id=value), (str, NoneType)),
    "wake(engine_id=)": (lambda client, value: client.wake(engine_id=value), (str, NoneType)),
    "set_settings(settings=)": (lambda client, value: client.set_settings(value), (dict,)),
    "set_settings(value=)": (lambda client, value: client.set_settings({"max_events": value}), (int, NoneType)),
    "get(job_id=)": (lambda client, value: client.get(value), (str,)),
    "wait(job_id=)": (lambda client, value: client.wait(value, 0), (str,)),
    "wait(timeout_s=)": (lambda client, value: client.wait("nobody", value), (*NUMBER, NoneType)),
    "stream(job_id=)": (lambda client, value: client.stream(value), (str,)),
    "stream(after=)": (lambda client, value: client.stream("nobody", value), (str, NoneType)),
    "as_completed(job_ids=)": (lambda client, value: client.as_completed(value, 0), ITERABLE),
    "as_completed(timeout_s=)": (
        lambda client, value: client.as_completed(["nobody"], value),
        (*NUMBER, NoneType),
    ),
    "position(job_id=)": (lambda client, value: client.position(value), (str,)),
    "batch_status(batch=)": (lambda client, value: client.batch_status(value), (str,)),
    "list_jobs(state=)": (lambda client, value: client.list_jobs(value), (str,)),
    "list_jobs(limit=)": (lambda client, value: client.list_jobs("queued", value), (int,)),
}


def check_message(error: MillraceError) -> None:
    assert len(str(error)) < 500
    assert str(error).isprintable()
    if isinstance(error, InvalidRequest):
        assert str(error).startswith(error.field + ": ")


async def run(client: Any, call: Call, value: Any) -> None:
    """The call to its end, or to its first element."""
    found = call(client, value)
    if isinstance(client, Client):
        next(found, None) if hasattr(found, "__next__") else None
    else:
        await (anext(found, None) if hasattr(found, "__anext__") else found)


def test_every_option_of_submit_is_tried() -> None:
    assert set(FIELDS) == set(SubmitOptions.__annotations__)


@pytest.mark.parametrize("kind", [Client, AsyncClient], ids=["sync", "async"])
@pytest.mark.parametrize("argument", ARGUMENTS)
async def test_only_our_errors_come_out(argument: str, kind: Any, redis_url: str, queue_name: str) -> None:
    call, right_types = ARGUMENTS[argument]
    client = kind(redis_url, queue_name)
    for name, value in bad_values():
        try:
            await run(client, call, value)
        except MillraceError as error:
            check_message(error)
            refused = isinstance(error, InvalidRequest)
        else:
            refused = False
        plain = value.tolist() if type(value).__module__ == "numpy" else value
        assert refused or type(plain) in right_types, f"{name} was taken"
    await client.close() if kind is AsyncClient else client.close()


@pytest.mark.parametrize("kind", [Client, AsyncClient], ids=["sync", "async"])
def test_only_our_errors_come_out_of_the_constructor(kind: Any) -> None:
    for name, value in bad_values():
        for arguments in ({"url": value}, {"url": "redis://localhost", "queue": value}):
            try:
                kind(**arguments)
            except MillraceError as error:
                check_message(error)
            else:
                assert value is None or type(value) is str, f"{name} was taken"


@pytest.mark.parametrize("name", ["", "id", CONTROLS, CONTROLS * 90_000, "\ud800"], ids=lambda name: repr(name)[:20])
def test_a_name_that_is_no_argument_is_named(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r": is not an argument of submit; ") as caught:
        Client("redis://127.0.0.1:1").submit("x", **cast(SubmitOptions, {name: 1}))
    check_message(caught.value)


def test_what_json_would_change_is_refused() -> None:
    """Else a reader would be given something else in `Job.meta`."""
    for value in (
        (1,),
        b"x",
        {1: 2},
        {"a"},
        math.nan,
        -math.inf,
        object(),
        Hostile(),
        array([1]),
        nested(100_000),
    ):
        with pytest.raises(InvalidRequest, match=r"^meta: ") as caught:
            GenerationRequest(prompt="x", meta={"a": value})
        check_message(caught.value)
        with pytest.raises(InvalidRequest, match=r"^messages: item 0 ") as caught:
            GenerationRequest(messages=[{"role": "user", "content": value}])
        check_message(caught.value)
    GenerationRequest(prompt="x", meta={"a": [1, 1.5, "é", None, True, {"b": 2**70 + 1}]})


def test_a_mistyped_name_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(InvalidRequest, match=r"^max_token: is not a field of a request; did you mean max_tokens\?$"):
        parse_body(b'{"prompt":"x","max_token":4}')
    with pytest.raises(
        InvalidRequest, match=r"^max_new_tokens: is not an argument of submit; did you mean max_tokens\?$"
    ):
        Client("redis://127.0.0.1:1").submit("x", **cast(SubmitOptions, {"max_new_tokens": 1}))
    with pytest.raises(InvalidRequest, match=r"^colour: is not a field of a request; leave it out$"):
        parse_body(b'{"prompt":"x","colour":4}')


@pytest.mark.parametrize(
    ("name", "todo"),
    [
        ("eta", "use run_at, in seconds since the epoch"),
        ("countdown", "use delay_s, in seconds"),
        *[
            (name, "use deadline_s, in seconds from the submission")
            for name in ("timeout", "time_limit", "soft_time_limit", "job_timeout", "expires")
        ],
    ],
)
def test_a_name_of_another_job_queue_is_answered_with_ours(name: str, todo: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name}: is not an argument of submit; {todo}$"):
        Client("redis://127.0.0.1:1").submit("x", **cast(SubmitOptions, {name: 60}))
    wrong: dict[str, Any] = {name: 60}
    with pytest.raises(InvalidRequest, match=rf"^{name}: is not an argument of GenerationRequest; {todo}$"):
        GenerationRequest(prompt="x", **wrong)
    with pytest.raises(InvalidRequest, match=rf"^{name}: is not a field of a request; {todo}$"):
        parse_body(b'{"prompt":"x","%s":60}' % name.encode())
    with pytest.raises(InvalidRequest, match=rf"^{name}: is not an argument of SamplingParams; (?!use)"):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("name", "todo"),
    [
        ("num_predict", "use max_tokens"),
        ("n_predict", "use max_tokens"),
        ("format", r'use structured_outputs=\{"json": \.\.\.\}'),
        ("grammar", r'use structured_outputs=\{"grammar": \.\.\.\}'),
        ("extra_body", "use its fields as fields of the request"),
        ("num_return_sequences", "use n"),
        ("do_sample", "use temperature=0 for greedy decoding"),
        ("options", "use its fields as fields of the request"),
        ("system", "use a message with the role system"),
        ("num_ctx", "use the engine's option max_model_len"),
    ],
)
def test_a_name_of_ollama_llamacpp_or_transformers_is_answered_with_ours(name: str, todo: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name}: is not an argument of submit; {todo}$"):
        Client("redis://127.0.0.1:1").submit("x", **cast(SubmitOptions, {name: 1}))
    with pytest.raises(InvalidRequest, match=rf"^{name}: is not a field of a request; {todo}$"):
        parse_body(b'{"prompt":"x","%s":1}' % name.encode())


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("json", ["guided_json", "json_schema", "schema", "response_schema", "output_format", "text_format", "json"]),
        ("json_object", ["guided_json_object", "json_object", "response_mime_type"]),
        ("regex", ["guided_regex", "regex"]),
        ("choice", ["guided_choice", "choice", "choices"]),
    ],
)
def test_a_name_that_asks_for_a_form_is_answered_with_its_field(form: str, names: list[str]) -> None:
    value = "True" if form == "json_object" else "..."
    todo = re.escape(f'use structured_outputs={{"{form}": {value}}}')
    of_sampling = re.escape(f'use SamplingParams(structured_outputs={{"{form}": {value}}})')
    for name in names:
        wrong: dict[str, Any] = {name: 1}
        with pytest.raises(InvalidRequest, match=f"^{name}: is not an argument of submit; {todo}$"):
            Client("redis://127.0.0.1:1").submit("x", **cast(SubmitOptions, wrong))
        with pytest.raises(InvalidRequest, match=f"^{name}: is not a field of a request; {todo}$"):
            parse_body(b'{"prompt":"x","%s":1}' % name.encode())
        with pytest.raises(InvalidRequest, match=f"^{name}: is not an argument of SamplingParams; {todo}$"):
            SamplingParams(**wrong)
        with pytest.raises(InvalidRequest, match=f"^{name}: is not an argument of GenerationRequest; {of_sampling}$"):
            GenerationRequest(prompt="x", **wrong)
        if name != form:
            with pytest.raises(InvalidRequest, match=f"^{name}: is not an argument of StructuredOutputs; use {form}$"):
                StructuredOutputs(**wrong)


def test_a_response_model_is_only_for_submit() -> None:
    todo = r'only the client\'s submit takes it; use structured_outputs=\{"json": \.\.\.\}$'
    with pytest.raises(InvalidRequest, match=f"^response_model: is not a field of a request; {todo}"):
        parse_body(b'{"prompt":"x","response_model":{}}')
    with pytest.raises(InvalidRequest, match=f"^response_model: is not an argument of SamplingParams; {todo}"):
        SamplingParams(response_model=int)  # type: ignore[call-arg]


def test_dates_and_durations_of_python_are_answered_with_their_seconds() -> None:
    for name in ("deadline_s", "delay_s"):
        wrong: dict[str, Any] = {name: timedelta(seconds=5)}
        with pytest.raises(InvalidRequest, match=rf"^{name}: must be .*, got .*; use its \.total_seconds\(\)$"):
            GenerationRequest(prompt="x", **wrong)
        wrong = {name: datetime.now(UTC)}  # its timestamp would be a wrong duration
        with pytest.raises(InvalidRequest, match=rf"^{name}: must be .*, got datetime[^;]*$"):
            GenerationRequest(prompt="x", **wrong)
    with pytest.raises(InvalidRequest, match=r"^run_at: must be .*, got .*; use its \.timestamp\(\)$"):
        GenerationRequest(prompt="x", run_at=datetime.now(UTC))  # type: ignore[arg-type]
