"""structured_outputs and response_format: what is accepted, in which form it travels, and how wrong ones are refused."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import pydantic
import pytest
from pydantic import BaseModel, Field, TypeAdapter

from millrace import (
    CompletionOutput,
    GenerationRequest,
    InvalidRequest,
    Job,
    OutputNotParsed,
    SamplingParams,
    StructuredOutputs,
)
from millrace.producer.openai_format import to_request
from millrace.producer.options import build_request
from millrace.producer.rq.payload import FUNCTION, read_submission
from millrace.producer.structured import MAX_BYTES
from millrace.producer.wire import canonical_body, parse_body
from millrace.results.job import Timings
from millrace.results.messages import JobError

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": [1, 2.0, None]}}, "required": ["b"]}
COMPACT = '{"type":"object","properties":{"b":{"type":"string"},"a":{"enum":[1,2.0,null]}},"required":["b"]}'
TAG = {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]}
COMPACT_TAG = '{"structures":[{"begin":"<f>","schema":{"type":"object"},"end":"</f>"}],"triggers":["<f"]}'

BY_NAME = r'\{"type": "json_schema", "json_schema": \{"name": \.\.\., "schema": \.\.\.\}\}'


class Mood(StrEnum):
    GOOD = "good"


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth > 1 else {}


@pytest.mark.parametrize(
    ("given", "form", "value"),
    [
        ({"json": SCHEMA}, "json", COMPACT),
        ({"json": COMPACT.replace(",", " ,\n ")}, "json", COMPACT),
        (
            {"json": {"type": "string", "schema": {}}},
            "json",
            '{"type":"string","schema":{}}',
        ),
        ({"json": True}, "json", "true"),
        ({"json": "false"}, "json", "false"),
        ({"json": nested(64)}, "json", msgspec.json.encode(nested(64)).decode()),
        ({"json": {"enum": ["[" * 100]}}, "json", '{"enum":["' + "[" * 100 + '"]}'),
        ({"regex": "[0-9]+", "json_object": False}, "regex", "[0-9]+"),
        ({"choice": ["yes", "no", "yes"]}, "choice", ["yes", "no"]),
        ({"choice": ("yes", "no")}, "choice", ["yes", "no"]),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"json_object": True, "json": None}, "json_object", True),
        ({"structural_tag": TAG}, "structural_tag", COMPACT_TAG),
        ({"structural_tag": COMPACT_TAG}, "structural_tag", COMPACT_TAG),
    ],
)
def test_each_form_has_one_value_and_travels_unchanged(given: dict[str, Any], form: str, value: Any) -> None:
    made = SamplingParams(structured_outputs=given)  # type: ignore[arg-type]
    assert made == SamplingParams(structured_outputs=StructuredOutputs(**given))
    wanted = made.structured_outputs
    assert wanted is not None
    assert wanted.form == form
    assert getattr(wanted, form) == value
    body = canonical_body(GenerationRequest(prompt="x", sampling=made))
    assert body == msgspec.json.encode({"prompt": "x", "structured_outputs": {form: value}})
    assert parse_body(body).sampling == made
    if form != "json" or "items" not in str(value):  # within 64 levels of the whole body
        assert parse_body(msgspec.json.encode({"prompt": "x", "structured_outputs": given})).sampling == made


WRONG: list[tuple[Any, str]] = [
    ({}, "give exactly one of json, regex, choice, grammar, json_object, structural_tag, got none"),
    ({"json_object": False}, "give exactly one .* got none"),
    ({"json": {}, "regex": "a"}, "give exactly one .* got json and regex"),
    ({"jsn": {}}, r"'jsn' is none of .*; did you mean json\?"),
    ({"backend": "x"}, "'backend' is none of .*; leave it out"),
    ({"json": 5}, "json must be a JSON schema, an object or a boolean, got 5"),
    ({"json": '["a"]'}, "json must be a JSON schema, an object or a boolean"),
    ({"json": "{"}, "json is not valid JSON: "),
    ({"json": ""}, "json must be a string that is not empty"),
    ({"json": nested(65)}, "json is nested too deeply; at most 64 levels"),
    ({"json": '{"enum":[' + "[]," * 30_000 + "[]]}"}, "json has more than 30,000 strings, lists and objects"),
    ({"json": {"const": "x" * MAX_BYTES}}, r"json has \d+ bytes, at most 262144 are allowed"),
    ({"regex": "é" * MAX_BYTES}, "regex has 524288 bytes"),
    ({"regex": ""}, "regex must be a string that is not empty"),
    ({"type": "object", "properties": {}}, r"'type' is none of .*; a schema goes into json: \{\"json\": \{\.\.\.\}\}$"),
    ({"json_schema": {}}, "'json_schema' is none of .*; use json$"),
    (
        {"json": {"name": "x", "strict": True, "schema": SCHEMA}},
        "json has a schema in schema.*; give the value of schema$",
    ),
    (
        {"json": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "json has a schema in json_schema.*; give the val",
    ),
    ({"json": json.dumps({"name": "x", "description": "d", "schema": {}})}, "json has a schema in schema"),
    ({"disable_any_whitespace": True}, ".*; outputs have no white space anyway; leave it out$"),
    ({"choice": []}, "choice must not be empty"),
    ({"choice": ["a", ""]}, "choice item 1 must be a string that is not empty"),
    ({"grammar": ""}, "grammar must be a string that is not empty"),
    ({"structural_tag": {}}, "structural_tag must be an object with structures and triggers"),
    ({"structural_tag": {**TAG, "triggers": []}}, "structural_tag triggers must not be empty"),
    (
        {"structural_tag": {**TAG, "triggers": ["g"]}},
        ".*item 0: begin must start with one of the triggers",
    ),
    ({"structural_tag": {**TAG, "structures": []}}, ".*structures must be a list that is not empty"),
    (
        {"structural_tag": {**TAG, "structures": [{"begin": "<f"}]}},
        ".*item 0 must be an object with begin, schema",
    ),
    (
        {"structural_tag": {**TAG, "structures": [{"begin": "<f", "schema": 1, "end": ""}]}},
        ".*item 0: schema must be",
    ),
    (
        {"structural_tag": {**TAG, "structures": [{"begin": "<f", "schema": {}, "end": 1}]}},
        ".*item 0: end must be",
    ),
]
NOT_JSON: list[tuple[Any, str]] = [
    ("regex", "must be an object with one of json, regex"),
    ({1: 2}, "1 is none of"),
    ({"json": {"enum": [math.nan]}}, "json has what JSON cannot hold"),
    ({"json": {"enum": (1,)}}, "json has what JSON cannot hold"),
    ({"json": {"const": "\ud800"}}, "json cannot be written as JSON"),
    ({"json": '{"const": 1e999}'}, "json is not valid JSON"),
    ({"regex": "\ud800"}, "regex cannot be encoded as UTF-8"),
    ({"regex": 5}, "regex must be a string"),
    ({"choice": "ab"}, "choice must be a list of strings"),
    ({"choice": Mood}, r"choice must be .*; use \[each\.value for each in \.\.\.\]$"),
    ({"choice": list(Mood)}, r"choice item 0 must be .*; use \[each\.value for each in \.\.\.\]$"),
    ({"json_object": 1}, "json_object must be true"),
]
"""Not from a body, or refused there with the decoder's message."""


@pytest.mark.parametrize(("given", "message"), WRONG + NOT_JSON, ids=lambda value: str(value)[:40])
def test_a_wrong_one_is_refused_with_one_clear_error(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^structured_outputs: {message}") as caught:
        SamplingParams(structured_outputs=given)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(("given", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_one_in_a_body_is_refused_in_the_same_way(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^structured_outputs: {message}"):
        parse_body(msgspec.json.encode({"prompt": "x", "structured_outputs": given}))


@pytest.mark.parametrize("given", [5, [], "x", {"regex": 5}, {"choice": [1]}, {"choice": "ab"}, {"json_object": 1}])
def test_a_wrong_type_in_a_body_names_the_field(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^structured_outputs: "):
        parse_body(msgspec.json.encode({"prompt": "x", "structured_outputs": given}))


def test_the_order_of_a_schemas_keys_is_part_of_the_request() -> None:
    other = {"required": ["b"], **SCHEMA}
    requests = [build_request("x", {"structured_outputs": {"json": schema}}) for schema in (SCHEMA, other)]
    assert canonical_body(requests[0]) != canonical_body(requests[1])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_object", "json_schema": None}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"type": "structural_tag", **TAG}, {"structural_tag": TAG}),
    ],
)
def test_a_response_format_becomes_structured_outputs(given: dict[str, Any], wanted: Any) -> None:
    wanted = wanted and {**wanted, "given_as": "response_format"}
    expected = build_request("x", {"structured_outputs": wanted, "max_tokens": 5})
    sampling = SamplingParams(max_tokens=5)
    assert build_request("x", {"response_format": given, "sampling": sampling}) == expected
    assert sampling.structured_outputs is None
    assert parse_body(msgspec.json.encode({"prompt": "x", "max_tokens": 5, "response_format": given})) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("json_object", "must be an object, got 'json_object'"),
        ({}, "must be an object of the type text, json_object, json_schema or structural_tag, got {}"),
        ({"type": "xml"}, "must be an object of the type text"),
        ({"type": []}, "must be an object of the type text"),
        (
            {"type": "json_object", "schema": SCHEMA},
            f"'schema' does not belong to the type json_object; use {BY_NAME}$",
        ),
        (
            {"type": "json_object", "json_schema": {"schema": SCHEMA}},
            f"'json_schema' does not belong .*; use {BY_NAME}$",
        ),
        ({"type": "json_object", "strict": True}, "'strict' does not belong to the type json_object; leave it out$"),
        ({"type": "text", "schema": SCHEMA}, f"'schema' does not belong to the type text; use {BY_NAME}$"),
        (
            {"type": "json_schema", "name": "a", "schema": SCHEMA},
            f"'name' does not belong .*; put name and schema into json_schema: {BY_NAME}$",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"name": "a", "schema": SCHEMA}}},
            "json has a schema in schema, .*; give the value of schema$",
        ),
        ({"type": "json_schema"}, "json_schema must be .* got None"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "json_schema must be "),
        ({"type": "json_schema", "json_schema": {"schema": 5}}, "json must be a JSON schema"),
        ({"type": "structural_tag"}, "structural_tag must be an object with structures"),
    ],
)
def test_a_wrong_response_format_is_refused_by_its_name(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^response_format: {message}"):
        build_request("x", {"response_format": given})
    chat = {"messages": [{"role": "user", "content": "x"}], "response_format": given}
    with pytest.raises(InvalidRequest, match=f"^response_format: {message}"):
        parse_body(msgspec.json.encode(chat))
    with pytest.raises(InvalidRequest, match=f"^response_format: {message}"):
        to_request("/v1/chat/completions", chat)


def test_both_forms_together_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^response_format: cannot be combined with structured_outputs"):
        build_request("x", {"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": True}})


def test_an_rq_job_takes_both_forms() -> None:
    for form in ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}):
        expected = build_request("x", form)  # type: ignore[arg-type]
        submission = read_submission("a", json.dumps([FUNCTION, None, ["x"], form]).encode())
        assert submission.body == canonical_body(expected)


# --- models ---


class Answer(BaseModel):
    city: str
    people: int


class Plain(msgspec.Struct):
    city: str
    people: int


class Broken:
    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        raise RuntimeError("no schema")


@pytest.mark.parametrize(
    ("model", "schema"), [(Answer, Answer.model_json_schema()), (Plain, msgspec.json.schema(Plain)), (int, None)]
)
def test_a_response_model_is_its_json_schema(model: Any, schema: dict[str, Any] | None) -> None:
    form = {"json": schema or {"type": "integer"}, "given_as": "response_model"}
    expected = build_request("x", {"structured_outputs": form})
    assert build_request("x", {"response_model": model}) == expected
    assert build_request("x", {"response_model": None}) == build_request("x", {})


@pytest.mark.parametrize("model", [5, "Answer", Answer(city="a", people=1), object, Broken])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^response_model: must be a pydantic model, or another type"):
        build_request("x", {"response_model": model})


def test_a_model_where_a_schema_is_expected_is_answered_with_response_model() -> None:
    todo = "; use response_model= of submit, or the class's JSON schema$"
    with pytest.raises(InvalidRequest, match=f"^response_format: must be an object, got <class .*Answer'>{todo}"):
        build_request("x", {"response_format": Answer})  # type: ignore[typeddict-item]
    by_name = {"type": "json_schema", "json_schema": {"name": "answer", "schema": Answer}}
    with pytest.raises(InvalidRequest, match=f"^response_format: json must be .*, got <class .*Answer'>{todo}"):
        build_request("x", {"response_format": by_name})
    with pytest.raises(InvalidRequest, match=f"^structured_outputs: json must be .*, got <class .*Answer'>{todo}"):
        build_request("x", {"structured_outputs": {"json": Answer}})
    with pytest.raises(InvalidRequest, match=r"^response_format: must be an object, got 5$"):
        build_request("x", {"response_format": 5})  # type: ignore[typeddict-item]


def test_a_model_beside_another_form_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^response_model: cannot be combined with structured_outputs"):
        build_request("x", {"response_model": Answer, "structured_outputs": {"json": {}}})
    with pytest.raises(InvalidRequest, match=r"^response_model: cannot be combined with sampling"):
        build_request("x", {"response_model": Answer, "sampling": SamplingParams()})
    with pytest.raises(InvalidRequest, match=r"^response_format: cannot be combined with response_model"):
        build_request("x", {"response_model": Answer, "response_format": {"type": "json_object"}})


def job(text: str, finish_reason: str | None = "stop", content: str | None = None) -> Job:
    output = CompletionOutput(index=0, text=text, token_ids=[], finish_reason=finish_reason, content=content)
    return Job(
        id="a",
        state="finished",
        text=text,
        token_ids=[],
        outputs=[output],
        finish_reason=finish_reason,
        usage=None,
        error=None,
        timings=Timings(created_ms=0),
    )


def test_a_parsed_output_is_a_value_or_an_object_of_a_model() -> None:
    text = '{"city": "Rome", "people": 3}'
    assert job(text).parsed() == {"city": "Rome", "people": 3}
    assert job(text).parsed(Answer) == Answer(city="Rome", people=3)
    assert job(text).parsed(Plain) == Plain("Rome", 3)
    assert job("<think>3?</think>" + text, content=text).parsed(Answer).people == 3


WITH_MODELS: list[tuple[Any, str, Any]] = [
    (list[Answer], '[{"city": "Rome", "people": 3}]', [Answer(city="Rome", people=3)]),
    (Answer | None, '{"city": "Rome", "people": 3}', Answer(city="Rome", people=3)),
    (dict[str, Answer], '{"a": {"city": "Rome", "people": 3}}', {"a": Answer(city="Rome", people=3)}),
    (Annotated[int, Field(ge=3)], "3", 3),
    (TypeAdapter(list[int]), "[3]", [3]),
]


@pytest.mark.parametrize(("model", "text", "value"), WITH_MODELS, ids=lambda value: str(value)[:40])
def test_a_type_with_models_in_it_is_pydantics(model: Any, text: str, value: Any) -> None:
    by_pydantic = model if isinstance(model, TypeAdapter) else TypeAdapter(model)
    expected = {"json": by_pydantic.json_schema(), "given_as": "response_model"}
    assert build_request("x", {"response_model": model}) == build_request("x", {"structured_outputs": expected})
    assert job(text).parsed(model) == value
    with pytest.raises(OutputNotParsed, match="validation error"):
        job('"x"').parsed(model)


@pydantic.dataclasses.dataclass
class Positive:
    number: Annotated[int, Field(gt=0)]


def test_a_dataclass_of_pydantic_keeps_its_rules() -> None:
    (form,) = [build_request("x", {"response_model": Positive}).sampling.structured_outputs]
    assert form is not None and '"exclusiveMinimum":0' in form.json
    assert job('{"number": 3}').parsed(Positive) == Positive(3)
    with pytest.raises(OutputNotParsed, match="greater than 0"):
        job('{"number": 0}').parsed(Positive)


def test_other_types_are_decoded_without_pydantic() -> None:
    assert job("[[3]]").parsed(list[tuple[int, ...]]) == [(3,)]
    assert job('[{"city": "Rome", "people": 3}]').parsed(list[Plain]) == [Plain("Rome", 3)]


def test_what_has_ended_an_output_is_in_the_error() -> None:
    for stop_reason, what in (('"}', "stop string '\"}'"), (7, "stop token 7")):
        cut = job('{"city": "Rome')
        cut = msgspec.structs.replace(cut, outputs=[msgspec.structs.replace(cut.outputs[0], stop_reason=stop_reason)])
        with pytest.raises(OutputNotParsed, match=f"^the {what} has ended the output: .*truncated$"):
            cut.parsed()


def test_the_error_of_a_job_that_has_failed_is_in_the_error() -> None:
    failed = msgspec.structs.replace(job("", "error"), error=JobError(kind="invalid_request", message="json: at #: no"))
    for one in (failed, msgspec.structs.replace(failed, outputs=[])):
        with pytest.raises(OutputNotParsed, match=r"^job 'a' has failed: invalid_request: json: at #: no$") as caught:
            one.parsed(Answer)
        assert caught.value.finish_reason == "error"


@pytest.mark.parametrize(
    ("cut", "model", "message"),
    [
        (job('{"city": "Ro', "length"), None, "max_tokens has cut the output; ask for more tokens"),
        (job("", "cancelled"), None, "the output is not complete: finish_reason is cancelled"),
        (job("", None), None, "there is no output yet"),
        (msgspec.structs.replace(job("", None), outputs=[]), Answer, "there is no output yet"),
        (msgspec.structs.replace(job("", None), has_result=False), Answer, "the result of job '.*' has expired"),
        (job("Rome"), None, "JSON is malformed"),
        (job("[" * 5000 + "]" * 5000), None, "recursion"),
        (job('{"city": 5}'), Answer, "2 validation errors for Answer"),
        (job('{"city": 5}'), Plain, "Expected `str`, got `int`"),
    ],
)
def test_an_output_that_was_cut_or_does_not_fit_is_not_parsed(cut: Job, model: Any, message: str) -> None:
    with pytest.raises(OutputNotParsed, match=message) as caught:
        cut.parsed(model)
    assert str(caught.value).isprintable()
    assert caught.value.finish_reason == cut.finish_reason
