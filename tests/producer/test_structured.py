"""structured_outputs and response_format: what is accepted, in which form it travels, and how wrong ones are refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from millrace import GenerationRequest, InvalidRequest, SamplingParams, StructuredOutputs
from millrace.producer.options import build_request
from millrace.producer.structured import MAX_BYTES
from millrace.producer.wire import canonical_body, parse_body

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": [1, 2.0, None]}}, "required": ["b"]}
COMPACT = '{"type":"object","properties":{"b":{"type":"string"},"a":{"enum":[1,2.0,null]}},"required":["b"]}'
TAG = {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]}
COMPACT_TAG = '{"structures":[{"begin":"<f>","schema":{"type":"object"},"end":"</f>"}],"triggers":["<f"]}'


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth > 1 else {}


@pytest.mark.parametrize(
    ("given", "form", "value"),
    [
        ({"json": SCHEMA}, "json", COMPACT),
        ({"json": COMPACT.replace(",", " ,\n ")}, "json", COMPACT),
        ({"json": True}, "json", "true"),
        ({"json": "false"}, "json", "false"),
        ({"json": nested(64)}, "json", msgspec.json.encode(nested(64)).decode()),
        ({"json": {"enum": ["[" * 100]}}, "json", '{"enum":["' + "[" * 100 + '"]}'),
        ({"regex": "[0-9]+", "json_object": False}, "regex", "[0-9]+"),
        ({"choice": ["yes", "no", "yes"]}, "choice", ["yes", "no"]),
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
    ({"json": {"const": "x" * MAX_BYTES}}, r"json has \d+ bytes, at most 262144 are allowed"),
    ({"regex": "é" * MAX_BYTES}, "regex has 524288 bytes"),
    ({"regex": ""}, "regex must be a string that is not empty"),
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
        ({"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"type": "structural_tag", **TAG}, {"structural_tag": TAG}),
    ],
)
def test_a_response_format_becomes_structured_outputs(given: dict[str, Any], wanted: Any) -> None:
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
        ({"type": "json_schema"}, "json_schema must be .* got None"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "json_schema must be "),
        ({"type": "json_schema", "json_schema": {"schema": 5}}, "json must be a JSON schema"),
        ({"type": "structural_tag"}, "structural_tag must be an object with structures"),
    ],
)
def test_a_wrong_response_format_is_refused_by_its_name(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^response_format: {message}"):
        build_request("x", {"response_format": given})


def test_both_forms_together_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^response_format: cannot be combined with structured_outputs"):
        build_request("x", {"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": True}})
