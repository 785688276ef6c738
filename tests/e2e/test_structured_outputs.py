"""Structured outputs: valid, beside free rows in one batch, and the same tokens however the steps are planned and placed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from millrace import LLM, Client, GenerationRequest, SamplingParams, StructuredOutputs
from millrace.engine_service.errors import EngineError
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import LIMIT_S, TINY
from tests.e2e.models import make_servable

PROMPT = "Tom and Mia and Tom and Mia and Tom"
LENGTH = 80
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 5, "maximum": 99},
        "kind": {"enum": ["a", "b\n", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "at": {"type": "string", "format": "date"},
        "next": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
    },
    "required": ["id", "kind", "tags", "at", "next"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}},
}
REGEX = r"[a-f]{3}-[0-9]{1,4}(é|🌍)x"
CHOICE = ["red", 'gr"een\n', "blue"]
NESTED = 'start: "(" start ")" | "."'
FORMS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "json": {"json": SCHEMA},
    "regex": {"regex": REGEX},
    "choice": {"choice": CHOICE},
    "grammar": {"grammar": NESTED},
    "object": {"json_object": True},
    "long": {"regex": "[a-z ]{600}"},
    "string": {"json": {"type": "string", "minLength": 600}},
}
DRAWN: dict[str, Any] = {"temperature": 1.3, "max_tokens": LENGTH, "n": 2, "seed": 5}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (name, {**how, "structured_outputs": form})
    for how in (DRAWN, {"temperature": 0, "max_tokens": LENGTH})
    for name, form in FORMS.items()
]
PARAMS = [SamplingParams(**fields) for _, fields in REQUESTS]
SMALL_POOL: dict[str, Any] = {"block_size": 4, "num_blocks": 100, "max_num_batched_tokens": 24}
Tokens = list[list[list[int]]]


def generate(model: Path = TINY, **options: Any) -> tuple[Tokens, int]:
    """Return the tokens of all requests in one batch, and the number of preemptions."""
    with LLM(model, device="cpu", dtype="float32", max_model_len=148, **({"executor": "uni"} | options)) as llm:
        outputs = llm.generate([PROMPT] * len(PARAMS), PARAMS, use_tqdm=False)
        assert sum(output.num_cached_tokens > 0 for output in outputs) > len(PARAMS) // 2
        for (name, _), output in zip(REQUESTS, outputs, strict=True):
            for one in output.outputs:
                check(name, one.text, one.finish_reason)
        return [[one.token_ids for one in output.outputs] for output in outputs], llm.stats().num_preemptions


def check(name: str, text: str, finish_reason: str | None) -> None:
    if finish_reason == "length":
        assert name in ("none", "json", "object", "grammar", "long", "string"), text
        assert text[:1] == '"' or name != "string"
        return
    match name:
        case "json":
            Draft202012Validator(SCHEMA).validate(json.loads(text))
        case "regex":
            assert re.fullmatch(REGEX, text)
        case "choice":
            assert text in CHOICE
        case "grammar":
            depth = len(text) // 2
            assert text == "(" * depth + "." + ")" * depth
        case "object":
            assert isinstance(json.loads(text), dict)
        case "long" | "string":
            raise AssertionError("it ended before its form was complete")


@pytest.fixture(scope="module")
def expected() -> Tokens:
    """Return the tokens of each request when it runs alone."""
    with LLM(TINY, device="cpu", executor="uni", dtype="float32", max_model_len=148) as llm:
        outputs = [llm.generate(PROMPT, params, use_tqdm=False)[0].outputs for params in PARAMS]
    return [[one.token_ids for one in some] for some in outputs]


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("is_short", [False, True], ids=["all at once", "preempted"])
def test_mixed_in_one_batch(run_ahead: bool, is_short: bool, expected: Tokens) -> None:
    tokens, num_preemptions = generate(executor="uni", run_ahead=run_ahead, **(SMALL_POOL if is_short else {}))
    assert tokens == expected
    assert (num_preemptions > 0) == is_short


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"executor": "mp"}, id="mp"),
        pytest.param({"executor": "mp", "tensor_parallel_size": 2}, id="TP 2", marks=pytest.mark.ranks),
        pytest.param({"executor": "mp", "pipeline_parallel_size": 2}, id="PP 2", marks=pytest.mark.ranks),
    ],
)
def test_in_processes_of_their_own(options: dict[str, Any], expected: Tokens) -> None:
    assert generate(**options)[0] == expected


def test_random_weights_follow_the_form(tmp_path: Path) -> None:
    """They give every text the same chance, and the vocabulary of the model may be larger than the tokenizer's."""
    model = make_servable("llama", tmp_path, eos_token_id=2, vocab_size=600)
    generate(model, executor="uni")


def test_what_others_exclude_stays_excluded() -> None:
    """A row without any token left fails alone, with the reason."""
    params = SamplingParams(
        temperature=0, structured_outputs=StructuredOutputs(regex="[ab]{3}"), allowed_token_ids=[69, 200]
    )
    excluded = "allowed_token_ids excludes every token that continues the form"
    reason = f"the form of the output allows no token at output 3: {excluded}"
    with LLM(TINY, device="cpu", executor="uni") as llm:
        text = llm.get_tokenizer().decode([69])
        barred = SamplingParams(structured_outputs=StructuredOutputs(regex="[ab]"), bad_words=["a", "b"])
        with pytest.raises(EngineError, match="bad_words excludes every token that continues the form"):
            llm.generate(PROMPT, barred, use_tqdm=False)
        with pytest.raises(EngineError, match=reason):
            llm.generate(PROMPT, params, use_tqdm=False)
        ended = SamplingParams(
            temperature=0, structured_outputs=StructuredOutputs(regex="[ab]{3}"), logit_bias={"69": 50.0}
        )
        output = llm.generate(PROMPT, ended, use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason) == (3 * text, "stop")


# --- through the queue ----------------------------------------------------------------------------------------------


def submit_all(client: Client) -> list[str]:
    requests = [GenerationRequest(prompt=PROMPT, sampling=params, stream=True) for params in PARAMS]
    return list(client.submit_many(requests))


def tokens_of(client: Client, job_ids: list[str]) -> Tokens:
    return [[one.token_ids for one in client.wait(job_id, LIMIT_S).outputs] for job_id in job_ids]


def test_through_the_queue(start_engine: StartEngine, client: Client, expected: Tokens) -> None:
    start_engine()
    bad: dict[str, dict[str, Any]] = {
        "at #/properties/a/items: Invalid type": {"json": {"properties": {"a": {"items": {"type": "strin"}}}}},
        "unclosed group": {"regex": "(a"},
        "no finite value satisfies it": {"json": {"$ref": "#"}},
    }
    refused = {words: client.submit(prompt=PROMPT, structured_outputs=form) for words, form in bad.items()}
    endless = client.submit(prompt=PROMPT, structured_outputs={"regex": "a"}, ignore_eos=True)
    job_ids = submit_all(client)
    assert tokens_of(client, job_ids) == expected
    for words, job_id in refused.items():
        error = client.wait(job_id, LIMIT_S).error
        assert error is not None
        assert (error.kind, error.field) == ("invalid_request", "structured_outputs")
        assert words in error.message
    error = client.wait(endless, LIMIT_S).error
    assert error is not None
    assert (error.kind, error.field) == ("invalid_request", "ignore_eos")


@pytest.mark.faults
def test_after_the_worker_is_killed(start_engine: StartEngine, client: Client, expected: Tokens) -> None:
    engine = start_engine()
    job_ids = submit_all(client)
    assert next(iter(client.stream(job_ids[-1]))).text[:1] == '"'  # in the middle of a JSON string
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    assert tokens_of(client, job_ids) == expected


@pytest.mark.faults
def test_after_the_engine_is_killed_and_another_takes_over(
    start_engine: StartEngine, client: Client, expected: Tokens
) -> None:
    engine = start_engine()
    job_ids = submit_all(client)
    assert next(iter(client.stream(job_ids[-1]))).text[:1] == '"'  # in the middle of a JSON string
    engine.kill()
    start_engine()
    assert tokens_of(client, job_ids) == expected
    assert client.wait(job_ids[-1], LIMIT_S).attempt == 2
