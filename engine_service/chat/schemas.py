"""Where a JSON schema has other schemas in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_IN_ONE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LIST = ("prefixItems", "anyOf", "oneOf", "allOf")
_WITHOUT_EFFECT = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}
"""Values that allow everything, of keywords that llguidance refuses."""


def parts(schema: Any) -> Iterator[tuple[list[str], Any]]:
    """Return the schemas directly in a schema, each with its path."""
    if type(schema) is not dict:
        return
    for name, value in schema.items():
        if name in _IN_ONE and type(value) is dict:
            yield [name], value
        elif name in _BY_NAME and type(value) is dict:
            yield from (([name, key], part) for key, part in value.items())
        elif name in _IN_LIST and type(value) is list:
            yield from (([name, str(index)], part) for index, part in enumerate(value))


def drop_keywords_without_effect(schema: Any) -> None:
    """Remove them from a schema and all schemas in it."""
    if type(schema) is not dict:
        return
    for name, value in _WITHOUT_EFFECT.items():
        if schema.get(name) is value:
            del schema[name]
    for _, part in parts(schema):
        drop_keywords_without_effect(part)
