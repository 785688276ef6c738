"""Outputs of many schemas and other forms: each that ended by itself has the form, each that was cut is its beginning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from llguidance import LLMatcher

from millrace import LLM, CompletionOutput, SamplingParams, StructuredOutputs
from tests.matchers import TOKENIZER, is_beginning, matcher_for
from tests.processes import ROOT
from tests.schemas import schemas

CHECKED_FORMATS = FormatChecker(["email", "ipv4", "ipv6", "uuid"])
"""Without those of dates: grammars do not know the calendar."""
MAX_TOKENS = 120


def check(output: CompletionOutput, schema: Any) -> bool:
    """Check an output. Return whether it is complete."""
    if output.finish_reason == "length":
        assert is_beginning(matcher_for(schema), output.text), (schema, output.text)
        return False
    assert output.finish_reason == "stop"
    try:
        value = json.loads(output.text)
    except ValueError:
        pytest.fail(f"no JSON: {schema} {output.text!r}")
    Draft202012Validator(schema, format_checker=CHECKED_FORMATS).validate(value)
    return True


def start(**options: Any) -> LLM:
    return LLM(ROOT / "examples" / "tiny_model", max_model_len=512, seed=3, **options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """For tests whose requests have seeds."""
    with start() as llm:
        yield llm


def generate(llm: LLM, requests: list[SamplingParams]) -> list[list[CompletionOutput]]:
    return [one.outputs for one in llm.generate(["The answer:"] * len(requests), requests, use_tqdm=False)]


def generated(requests: list[SamplingParams], **options: Any) -> list[list[CompletionOutput]]:
    with start(**options) as llm:
        return generate(llm, requests)


def json_params(schema: Any, **fields: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputs(json=schema), max_tokens=MAX_TOKENS, **fields)


@pytest.mark.slow
def test_outputs_of_three_hundred_schemas_are_valid_or_beginnings() -> None:
    wanted = list(schemas())
    assert len(wanted) == 300
    hot = [json_params(schema, seed=number, n=2) for number, (_, schema) in enumerate(wanted)]
    greedy = [json_params(schema, temperature=0) for _, schema in wanted]
    free = [SamplingParams(max_tokens=MAX_TOKENS, seed=number) for number in range(20)]
    outputs = generated(hot + greedy + free)
    num_complete = sum(
        check(output, schema)
        for (_, schema), *both in zip(wanted, outputs, outputs[len(wanted) :], strict=False)
        for some in both
        for output in some
    )
    assert num_complete > 600
    assert outputs[-20:] == generated(free)  # the grammars of their neighbours do not matter


@pytest.mark.parametrize("run_ahead", [True, False])
def test_outputs_of_some_schemas_are_valid_among_free_rows_and_preemption(run_ahead: bool) -> None:
    wanted = [schema for _, schema in schemas(num_each=2)]
    requests = [json_params(schema, seed=number) for number, schema in enumerate(wanted)]
    free = [SamplingParams(max_tokens=60, seed=1)]
    outputs = generated(requests + free, run_ahead=run_ahead, num_blocks=60, max_num_seqs=16)
    assert sum(check(output, schema) for schema, (output,) in zip(wanted, outputs, strict=False)) > 12


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "(ab|c){2,5}[0-9]"}, "(ab|c){2,5}[0-9]"),
        ({"choice": ["yes", "no", "nö"]}, "yes|no|nö"),
        ({"grammar": 'start: "<" NUMBER ">"\nNUMBER: /[0-9]{1,4}/'}, "<[0-9]{1,4}>"),
        ({"json_object": True}, r"\{.*"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_forms_are_kept(form: dict[str, Any], pattern: str, llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(**form), n=8, seed=5, max_tokens=40)
    ((*outputs,),) = generate(llm, [params])
    for output in outputs:
        assert re.fullmatch(pattern, output.text, re.DOTALL), output.text
        assert output.finish_reason == "stop" or "json_object" in form


def test_a_structural_tag_constrains_what_follows_its_trigger(llm: LLM) -> None:
    tag = {"structures": [{"begin": " ", "schema": {"enum": [1, 2]}, "end": ";"}], "triggers": [" "]}
    params = SamplingParams(structured_outputs=StructuredOutputs(structural_tag=tag), n=8, seed=5, max_tokens=60)
    ((*outputs,),) = generate(llm, [params])
    assert sum(output.text.count(" ") for output in outputs) > 3
    for output in outputs:
        assert re.fullmatch(r"([^ ]| [12];)*( [12]?)?", output.text, re.DOTALL), output.text


def test_the_matcher_of_these_tests_takes_bytes() -> None:
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_regex("é+"))
    assert is_beginning(matcher, "é") and is_beginning(matcher, "é\ufffd") and not is_beginning(matcher, "e")
