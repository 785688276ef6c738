"""JSON schemas in the shape of public suites: a fixed number of each family, with a fixed seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

WORDS = ("name", "id", "tags", "größe", "a b", 'quo"te', "items", "x", "1", "$ref", "price")
PATTERNS = (
    "^[A-Z]{2}[0-9]{3}$",
    "^(foo|ba[rz])+$",
    "a.c",
    "^\\d{3}-\\d{4}$",
    "^[^\\s]{1,8}$",
    "^\\w+@\\w+\\.com$",
    "é+",
)
FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")


def schemas(num_each: int = 25, seed: int = 17) -> Iterator[tuple[str, Schema]]:
    """Yield the name of its family with each schema: `num_each` of twelve families."""
    rng = random.Random(seed)
    for family in FAMILIES:
        for _ in range(num_each):
            yield family.__name__.strip("_"), family(rng)


def _object(rng: random.Random, part: Callable[[random.Random], Schema], most: int = 4) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, most))
    required = [name for name in names if rng.random() < 0.6]
    properties = {name: part(rng) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _leaf(rng: random.Random) -> Schema:
    kinds = (_enums, _bounds, _lengths, lambda _: {"type": rng.choice(["boolean", "null", "integer", "number"])})
    return rng.choice(kinds)(rng)


def _nested(rng: random.Random, depth: int = 3) -> Schema:
    return _object(rng, lambda rng: _nested(rng, depth - 1) if depth > 1 and rng.random() < 0.4 else _leaf(rng))


def _enums(rng: random.Random) -> Schema:
    values = ["red", "grün", "", 'a"b', "\n", 7, -1, True, None, [1, "two"], {"k": "v"}]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _references(rng: random.Random) -> Schema:
    place = rng.choice(["$defs", "definitions"])
    return {
        **_object(rng, lambda rng: {"$ref": f"#/{place}/{rng.choice(['a', 'b~1c'])}"}),
        place: {"a": _leaf(rng), "b/c": _object(rng, _leaf, 2)},
    }


def _unions(rng: random.Random) -> Schema:
    kind = rng.choice(["anyOf", "oneOf"])
    tagged = [
        {
            "type": "object",
            "properties": {"kind": {"const": tag}, "value": _leaf(rng)},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }
        for tag in ("circle", "square", "line")
    ]
    return {kind: rng.choice([tagged, [{"type": "string", "maxLength": 9}, {"type": "integer"}, {"type": "null"}]])}


def _merged(rng: random.Random) -> Schema:
    low = rng.randint(-5, 5)
    number = {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 50)}
    parts = [{"properties": {"x": number}, "required": ["x"]}, {"properties": {"y": _leaf(rng)}, "required": ["y"]}]
    return {"type": "object", "allOf": parts, "properties": {"x": True, "y": True}, "additionalProperties": False}


def _patterns(rng: random.Random) -> Schema:
    return _object(rng, lambda rng: {"type": "string", "pattern": rng.choice(PATTERNS)}, 2)


def _formats(rng: random.Random) -> Schema:
    return _object(rng, lambda rng: {"type": "string", "format": rng.choice(FORMATS)}, 2)


def _bounds(rng: random.Random) -> Schema:
    low, kind = rng.randint(-1000, 1000), rng.choice(["integer", "number"])
    bounds = rng.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
    schema = {"type": kind, bounds[0]: low, bounds[1]: low + rng.randint(20, 500)}
    return {**schema, "multipleOf": rng.choice([3, 5])} if kind == "integer" and rng.random() < 0.3 else schema


def _arrays(rng: random.Random) -> Schema:
    least = rng.randint(0, 2)
    schema: Schema = {"type": "array", "items": _leaf(rng), "minItems": least, "maxItems": least + rng.randint(0, 3)}
    if rng.random() < 0.4:
        schema |= {"prefixItems": [_leaf(rng), _leaf(rng)]}
    return schema


def _recursive(rng: random.Random) -> Schema:
    again = rng.choice(
        [
            {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        ]
    )
    properties = {"value": _leaf(rng), "next": again}
    node = {"type": "object", "properties": properties, "required": ["value"], "additionalProperties": False}
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _maps(rng: random.Random) -> Schema:
    if rng.random() < 0.5:
        return {"type": "object", "patternProperties": {"^[a-c]$": _leaf(rng)}, "additionalProperties": False}
    return {"type": "object", "additionalProperties": _leaf(rng), "minProperties": 1, "maxProperties": 3}


def _lengths(rng: random.Random) -> Schema:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


FAMILIES: tuple[Callable[[random.Random], Schema], ...] = (
    *(_nested, _enums, _references, _unions, _merged, _patterns),
    *(_formats, _bounds, _arrays, _recursive, _maps, _lengths),
)
