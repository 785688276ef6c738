"""The process that checks structured outputs: what it accepts, what it says, and what a grammar may cost."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from pydantic import UUID4, BaseModel, Field, IPvAnyAddress, SecretStr
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from millrace.engine_service.chat.schemas import drop_endless_parts
from millrace.engine_service.grammar_process import check
from millrace.engine_service.grammars import Grammars
from millrace.engine_service.text import Tokenizer
from millrace.producer import InvalidRequest, StructuredOutputs
from tests.e2e.engines import TINY
from tests.matchers import TOKENIZER, accepts, accepts_value, checked, is_beginning, matcher_for


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars(Tokenizer(TINY), 512, [2])
    yield grammars
    grammars.close()


def pid(grammars: Grammars) -> int:
    assert grammars._process is not None
    return grammars._process._process.pid


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"json": True},
        {"regex": '[a-z]+/\n"x"'},
        {"choice": ['a"b\\', "\n", "é🌍"]},
        {"choice": [f"label {number}" for number in range(5000)]},
        {"json": {"enum": [2**53, -(2**53)]}},
        {"grammar": 'start: start "a" | "b"'},
        {"grammar": '# as in vLLM\nroot ::= a "b"\na ::= "c " | "d "'},
        {"json_object": True},
    ],
)
def test_each_form_has_a_grammar(grammars: Grammars, form: dict[str, Any]) -> None:
    wanted = StructuredOutputs(**form)
    assert not grammars.is_known(wanted)
    grammar = grammars.grammar(wanted)
    assert grammar
    assert grammars.is_known(wanted)
    assert grammars.grammar(StructuredOutputs(**form)) == grammar


def test_options_of_llguidance_in_a_schema_have_no_effect() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    options = {"whitespace_flexible": True, "item_separator": ";"}
    assert checked({**schema, "x-guidance": options}) == checked({**schema, "x-guidance": 5}) == checked(schema)


def test_gbnf_may_name_characters_by_their_codes() -> None:
    gbnf = r"""# "[ \u0022
root ::= "\x41\u00e9\U0001F600\u0022\x5C\u000a\\u0041" x
x ::= [\u03b1-\u03C9\x5D\u005e\u002D]+ # [
"""
    grammar = check(StructuredOutputs(grammar=gbnf), TOKENIZER).grammar
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert accepts(matcher, 'Aé😀"\\\n\\u0041λω]^-')
    for other in ("b", "u", "3", "\\", "["):
        assert not is_beginning(matcher, 'Aé😀"\\\n\\u0041' + other)


TEXT = "hello world " * 10_000


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"const": TEXT}},
        {"regex": TEXT},
        {"regex": '"(hello world ){10000}"'},
        {"choice": [TEXT]},
        {"grammar": f'%llguidance {{"no_forcing": false}}\nstart: {json.dumps(TEXT)}'},
        {"grammar": f"root ::= {json.dumps(TEXT)}"},
        {"structural_tag": {"triggers": ["h"], "structures": [{"begin": TEXT, "schema": {}, "end": ""}]}},
    ],
    ids=lambda form: next(iter(form)),
)
def test_a_mask_allows_each_token_with_which_a_text_goes_on(grammars: Grammars, form: dict[str, Any]) -> None:
    """Also where the rest of the text is certain. llguidance would spell it out for each token, and allow only one."""
    tokenizer = LLTokenizer(Tokenizer(TINY).as_json(), n_vocab=512, eos_token=[2])
    matcher = LLMatcher(tokenizer, grammars.grammar(StructuredOutputs(**form)), log_level=0)
    quote, first = tokenizer.tokenize_str('"h')
    matcher.try_consume_tokens([quote])
    matcher.consume_token(first)
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    assert [tokenizer.decode_str([token_id]) for token_id in range(512) if mask >> token_id & 1] == ["e", "el", "ell"]


def test_a_schema_that_allows_everything_has_no_white_space_either(grammars: Grammars) -> None:
    assert grammars.grammar(StructuredOutputs(json=True)) == grammars.grammar(StructuredOutputs(json={}))


REQUIRES_A: dict[str, Any] = {"type": "object", "required": ["a"]}
SHORT = {"type": "string", "minLength": 5, "maxLength": 2}
REQUIRES_SHORT = {**REQUIRES_A, "properties": {"a": SHORT}}
ENDLESS = {**REQUIRES_A, "properties": {"a": {"$ref": "#/$defs/n"}}}


def deep(num_levels: int, inner: dict[str, Any]) -> dict[str, Any]:
    return {"items": deep(num_levels - 1, inner)} if num_levels else inner


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"type": "strin"}}, "json: at #: Invalid type: strin"),
        (
            {"json": {"properties": {"a": {"anyOf": [{"type": "null"}, {"items": {"pattern": "(?=a)"}}]}}}},
            "json: at #/properties/a/anyOf/1/items: regex parse error",
        ),
        (
            {"json": {"$defs": {"x": {"minimum": 5, "maximum": 3, "type": "integer"}}, "items": {"$ref": "#/$defs/x"}}},
            "json: at #/$defs/x: Unsatisfiable schema: minimum (5)",
        ),
        ({"json": {"properties": {"a": {"unevaluatedItems": False}}}}, 'at #/properties/a: Unimplemented keys: ["un'),
        (
            {"json": {**REQUIRES_A, "properties": {"a": False}}},
            "json: at #/properties/a: Unsatisfiable schema: schema is",
        ),
        (
            {"json": {**REQUIRES_A, "properties": {"a": {"$ref": "#/$defs/b~1c"}}, "$defs": {"b/c": REQUIRES_SHORT}}},
            "json: at #/$defs/b~1c/properties/a: Unsatisfiable schema: minLength (5) is greater than maxLength (2)",
        ),
        (
            {"json": {"oneOf": [{"type": "array", "prefixItems": [True, REQUIRES_SHORT], "minItems": 2}]}},
            "json: at #/oneOf/0/prefixItems/1/properties/a: Unsatisfiable schema: minLength (5)",
        ),
        (
            {"json": {"type": "array", "items": {"anyOf": [SHORT, SHORT]}, "minItems": 1}},
            "json: at #/items/anyOf/0: Unsatisfiable schema: minLength (5)",
        ),
        ({"json": deep(40, {"type": "objct"})}, "items/items/items: Invalid type: objct"),
        ({"json": {"items": {"pattern": "(long)" * 200 + "("}}}, "json: at #/items: regex parse error: unclosed group"),
        ({"json": {"items": {"pattern": "a^b"}}}, "json: at #/items: regex parse error: anchors inside it, and word"),
        ({"json": {"items": {"type": "integer", "multipleOf": 982451653}}}, "json: at #/items: takes too much work to"),
        ({"json": {"pattern": "a.{500}", "maxLength": 3000}}, "json: at #: takes too much work to compile; make it"),
        ({"json": {"oneOf": [{"maximum": 2}, {"minimum": 1}]}}, "match the same; use anyOf, or branches that exclude"),
        (
            {"json": {"items": {"$ref": "other.json#/x"}}},
            "json: at #/items: other.json: only references within the schema (#/...) are followed",
        ),
        ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, 'json: at #: Unimplemented keys: ["not"]'),
        ({"regex": "(long)" * 200 + "("}, "regex: unclosed group"),
        ({"regex": "error: ("}, "regex: unclosed group"),
        ({"regex": r"a\b c"}, "regex: anchors inside it, and word boundaries, are not supported; leave them out"),
        ({"grammar": "start: x\nx: /(a/"}, "grammar: at 2(4): regex parse error: unclosed group"),
        ({"regex": "ab\\\\\\"}, "regex: incomplete escape sequence"),
        ({"json": False}, "json: at #: Unsatisfiable schema: schema is false"),
        ({"json": {"$ref": "#"}}, "json: at #: no finite value satisfies it"),
        (
            {"json": {**REQUIRES_A, "properties": {"a": {"$ref": "#"}}}},
            "json: at #/properties/a: no finite value satisfies it",
        ),
        (
            {"json": {"items": {"$ref": "#/$defs/n"}, "minItems": 1, "type": "array", "$defs": {"n": ENDLESS}}},
            "json: at #/$defs/n/properties/a: no finite value satisfies it",
        ),
        (
            {"json": {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"$ref": "#"}]}},
            "json: at #/anyOf/0/items: no finite value satisfies it",
        ),
        (
            {"json": {"allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": ENDLESS}}},
            "at #/$defs/n/properties/a: no finite value",
        ),
        ({"regex": "((a{1,500}){1,500}){1,500}"}, "regex: nested repetitions match the same text in too many ways"),
        ({"grammar": "start: /(.{1,100}){1,100}/"}, "grammar: nested repetitions match"),
        (
            {"json": {"properties": {"b": {"type": "string", "pattern": "^([a-z]{1,90} ?){1,500}$"}}}},
            "json: at #/properties/b: nested repetitions match",
        ),
        ({"json": {"$ref": "#/$defs/gone"}}, "does not exist"),
        ({"regex": "(a"}, "unclosed group"),
        (
            {"regex": "a(?!b)"},
            "regex: look-around, including look-ahead and look-behind, is not supported; use a class",
        ),
        ({"grammar": "start: x"}, 'unknown name: "x"'),
        (
            {"json": {"properties": {"a": {"const": {"id": [2**60]}}}}},
            r"json: at #/properties/a/const: integers beyond 2^53",
        ),
        ({"json": {"enum": [1, 2**53 + 1]}}, "json: at #/enum: integers beyond 2^53"),
        ({"json": {"maximum": 4, "exclusiveMaximum": True}}, "json: at #/exclusiveMaximum: must be a number"),
        ({"grammar": "root ::= x"}, "grammar: Rule 'x' not found"),
        ({"grammar": '# a comment\nx ::= "a"'}, "grammar: a GBNF grammar needs a rule root"),
        ({"grammar": "root ::= ("}, "grammar: "),
        ({"grammar": "start: start"}, "no text satisfies it"),
        ({"grammar": "start: ("}, "grammar: "),
        (
            {
                "structural_tag": {
                    "triggers": ["<"],
                    "structures": [{"begin": "<", "schema": {"items": {"type": "strin"}}, "end": ""}],
                }
            },
            "structural_tag: structures: item 0: schema: at #/items: Invalid type: strin",
        ),
    ],
)
def test_what_cannot_be_used_is_an_error_with_its_place(grammars: Grammars, form: dict[str, Any], message: str) -> None:
    wanted = StructuredOutputs(**form)
    for _ in range(2):
        with pytest.raises(InvalidRequest) as error:
            grammars.grammar(wanted)
        assert error.value.field == "structured_outputs"
        assert message in error.value.message
        assert len(str(error.value)) < 500
        assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {**REQUIRES_A, "type": ["object", "null"], "properties": {"a": {"$ref": "#"}}},
        {**REQUIRES_A, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "integer"}]}}},
        {**REQUIRES_A, "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}},
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        {"type": "object", "additionalProperties": {"$ref": "#"}},
        {"$ref": "#/$defs/b~1c", "$defs": {"b/c": {"type": "null"}}},
    ],
)
def test_a_recursive_schema_that_a_finite_value_satisfies_stays_as_it_is(
    grammars: Grammars, schema: dict[str, Any]
) -> None:
    assert grammars.grammar(StructuredOutputs(json=schema))
    assert drop_endless_parts(kept := copy.deepcopy(schema)) is None
    assert kept == schema


@pytest.mark.parametrize("place", ["json", "structural_tag", "tools"])
def test_an_optional_part_without_an_end_is_left_out(grammars: Grammars, place: str) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/n"}, "y": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
        "additionalProperties": False,
        "$defs": {"n": ENDLESS},
    }
    tag = {"triggers": ["<"], "structures": [{"begin": "<", "schema": schema, "end": ""}]}
    forms: dict[str, dict[str, Any]] = {
        "json": {"json": schema},
        "structural_tag": {"structural_tag": tag},
        "tools": {"grammar": f'start: "<" r1\nr1: %json {json.dumps(schema)}'},
    }
    matcher = LLMatcher(TOKENIZER, grammars.grammar(StructuredOutputs(**forms[place])), log_level=0)
    begin = "" if place == "json" else "<"
    assert is_beginning(matcher, begin + '{"y') and not is_beginning(matcher, begin + '{"x')
    assert is_beginning(matcher, begin + '{"y":null') or is_beginning(matcher, begin + '{"y": null')
    assert not is_beginning(matcher, begin + '{"y":{') and not is_beginning(matcher, begin + '{"y": {')


@pytest.mark.parametrize(
    "regex", ["([a-z]{1,20} ){1,500}", "(.{1,10}){1,10}", "(((a{1,500}b){1,500}c){1,500}d){1,500}", "a{1,100000}"]
)
def test_repetitions_that_are_read_in_few_ways_are_taken(grammars: Grammars, regex: str) -> None:
    assert grammars.grammar(StructuredOutputs(regex=regex))
    pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": f"^{regex}$"}}}
    assert grammars.grammar(StructuredOutputs(json=pattern))


def test_keywords_that_mean_nothing_are_not_refused(grammars: Grammars) -> None:
    item = {"type": "array", "items": {"type": "integer"}}
    plain = {
        "$defs": {"x": item},
        "anyOf": [{"type": "object"}, {"$ref": "#/$defs/x"}, {"const": {"uniqueItems": False}}],
    }
    wordy = {
        **plain,
        "$defs": {"x": {**item, "uniqueItems": False, "unevaluatedItems": True}},
        "unevaluatedProperties": True,
    }
    assert grammars.grammar(StructuredOutputs(json=wordy)) == grammars.grammar(StructuredOutputs(json=plain))
    tag = {"begin": "<", "schema": wordy, "end": ">"}
    assert grammars.grammar(StructuredOutputs(structural_tag={"triggers": ["<"], "structures": [tag]}))
    for refused in ({"uniqueItems": True}, {"unevaluatedItems": False}):
        with pytest.raises(InvalidRequest, match=r"Unimplemented keys: .*; leave it out, and check it after parsing$"):
            grammars.grammar(StructuredOutputs(json={**item, **refused}))


UNCHECKED_FORMATS = (
    *("path", "binary", "password", "byte", "int32", "base64", "base64url", "regex", "ipvanyaddress", "ipv4network"),
    *("uri-reference", "json-pointer", "idn-email", "uuid9", "no such format"),
)


def test_a_format_that_cannot_be_checked_is_a_remark() -> None:
    for name in UNCHECKED_FORMATS:
        schema = {"anyOf": [{"type": "string", "format": name, "maxLength": 3}, {"const": {"format": name}}]}
        for value in ("", "a b", "é", "long", 5, {}, {"format": name}):
            assert accepts_value(matcher_for(schema), value) == Draft202012Validator(schema).is_valid(value), name


def test_a_version_of_a_uuid_is_checked() -> None:
    assert not accepts_value(matcher_for({"type": "string", "format": "uuid4"}), "x")
    for version in range(1, 9):
        schema = {"properties": {"id": {"type": "string", "format": f"uuid{version}"}}}
        for other in range(1, 9):
            value = {"id": f"7d444840-9dc0-{other}1d1-b245-5ffdce74fad2"}
            assert accepts_value(matcher_for(schema), value) == (other == version)
            assert not accepts_value(matcher_for(schema), {"id": value["id"].replace("-b", "-3")})
    own = matcher_for({"type": "string", "format": "uuid4", "pattern": "^7"})
    assert accepts_value(own, "7d444840-9dc0-41d1-b245-5ffdce74fad2")
    assert not accepts_value(own, "8d444840-9dc0-41d1-b245-5ffdce74fad2")


NAMES = ["a", "b-c", "d.e f", 'q"uo\te', "é\n", "(^|$)*", "a\nb", "#&~-"]


@pytest.mark.parametrize(
    "names",
    [
        {"enum": NAMES},
        {"enum": NAMES[:2], "type": "string", "title": "Names"},
        {"const": "d.e f"},
        {"pattern": "^[ab]", "description": "the first letters"},
        {"$ref": "#/$defs/names"},
    ],
    ids=str,
)
def test_a_map_with_names_of_one_pattern_has_no_others(names: dict[str, Any]) -> None:
    one = {
        "$defs": {"names": {"enum": NAMES[:2], "type": "string"}},
        "type": "object",
        "propertyNames": names,
        "additionalProperties": {"type": "integer"},
        "minProperties": 1,
        "maxProperties": 2,
    }
    for schema in (one, {"$defs": one["$defs"], "type": "array", "items": one}):
        is_valid = Draft202012Validator(schema).is_valid
        values = [{}, *({name: 1} for name in (*NAMES, "ab", "x", "", "d_e f")), {"a": 1, "b-c": 2}, {"a": "1"}, []]
        for value in [[each] for each in values] if "items" in schema else values:
            assert accepts_value(matcher_for(schema), value) == is_valid(value), value


@pytest.mark.parametrize(
    "names",
    [{"maxLength": 5}, {"enum": ["a", 1]}, {"enum": []}, {"pattern": "a", "maxLength": 2}, {"$ref": "#/$defs/no"}],
)
def test_names_that_take_more_than_one_pattern_are_refused(names: dict[str, Any]) -> None:
    assert "propertyNames" in checked({"type": "object", "propertyNames": names}).error


class Color(Enum):
    RED = "red"
    BLUE = "light blue"


class UsualTypes(BaseModel):
    version: UUID4
    place: Path
    pattern: re.Pattern[str]
    address: IPvAnyAddress
    secret: SecretStr
    by_color: dict[Color, int]
    by_word: dict[Literal["x", "y"], bool]
    by_letters: dict[Annotated[str, Field(pattern="^[a-z]+$")], int]


def test_usual_types_of_pydantic_have_a_grammar() -> None:
    model = UsualTypes(
        version=UUID("7d444840-9dc0-41d1-b245-5ffdce74fad2"),
        place=Path("/a"),
        pattern=re.compile("a+"),
        address=IPv4Address("1.2.3.4"),
        secret=SecretStr("b"),
        by_color={Color.BLUE: 1},
        by_word={"y": True},
        by_letters={"ab": 3},
    )
    schema, value = UsualTypes.model_json_schema(), model.model_dump(mode="json")
    Draft202012Validator(schema).validate(value)
    assert accepts_value(matcher_for(schema), value)
    assert not accepts_value(matcher_for(schema), {**value, "by_color": {"green": 1}})


BOMBS: dict[str, dict[str, Any]] = {
    "many patterns": {"json": {"properties": {f"k{i}": {"pattern": f"^(a|b{i}){{1,200}}$"} for i in range(6000)}}},
    "nested counts": {"regex": "(((a{1,500}b){1,500}c){1,500}d){1,500}"},
    "many choices": {"choice": [f"{i}{'x' * 20}" for i in range(10_000)]},
    "deep groups": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "ambiguous": {"grammar": "start: a a a a a a\na: b b b b | \nb: c c c c |\nc: start | /x*/ | /x+/ | /(xx)*/"},
    "wide": {"grammar": "start: " + " | ".join(f'"{i}" start' for i in range(8000))},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_grammar_that_takes_too_much_is_refused_and_others_go_on(grammars: Grammars, name: str) -> None:
    """Some of them are cheap after all. What counts is that there is an answer."""
    with contextlib.suppress(InvalidRequest):
        grammars.grammar(StructuredOutputs(**BOMBS[name]))
    assert grammars.grammar(StructuredOutputs(regex=f"good{name}"))


def test_a_known_form_does_not_wait_while_another_one_is_checked(grammars: Grammars) -> None:
    known = StructuredOutputs(regex="known")
    grammar = grammars.grammar(known)
    with ThreadPoolExecutor(1) as pool, grammars._lock:  # as it is during a check
        found = pool.submit(grammars.grammar, known).result(timeout=60)
    assert found == grammar


def test_a_process_that_is_killed_is_replaced(grammars: Grammars) -> None:
    grammars.grammar(StructuredOutputs(regex="before"))
    before = pid(grammars)
    os.kill(before, signal.SIGKILL)
    os.waitpid(before, 0)
    assert grammars.grammar(StructuredOutputs(regex="after"))
    assert pid(grammars) != before


def test_a_tokenizer_without_bytes_is_refused(tmp_path: Any) -> None:
    raw: Any = RawTokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece()
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer_class(tokenizer_object=raw).save_pretrained(tmp_path)
    grammars = Grammars(Tokenizer(tmp_path), 3, [0])
    try:
        with pytest.raises(InvalidRequest, match=r"tokenizer of this model; leave it out, .* with byte fallback$"):
            grammars.grammar(StructuredOutputs(regex="a"))
    finally:
        grammars.close()
