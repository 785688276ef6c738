"""The schemas inside a JSON schema, and which of them no finite value satisfies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_IN_ONE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SHARED = ("$defs", "definitions")
_IN_LIST = ("prefixItems", "anyOf", "oneOf", "allOf")
_WITHOUT_EFFECT = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}
"""Keywords that llguidance refuses, with the value that allows everything."""
_FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""The formats that llguidance checks. It refuses others, which are remarks by JSON Schema's own rules."""
_VERSION_OF_UUID = re.compile("uuid([1-8])")
"""Formats of pydantic, which checks the version and the variant."""
_REMARKS = {"title", "description", "default", "examples"}


def parts(schema: Any) -> Iterator[tuple[list[str], Any]]:
    """Yield the schemas directly in a schema, each with its path."""
    if type(schema) is not dict:
        return
    for name, value in schema.items():
        if name in _IN_ONE and type(value) is dict:
            yield [name], value
        elif name in _BY_NAME and type(value) is dict:
            yield from (([name, key], part) for key, part in value.items())
        elif name in _IN_LIST and type(value) is list:
            yield from (([name, str(index)], part) for index, part in enumerate(value))


def simplify(schema: Any) -> None:
    """Write a schema, and all schemas in it, with the keywords that llguidance knows, as far as they say the same."""
    shared = _shared_parts(schema) if type(schema) is dict else {}
    for _, part in list(every_part(schema)):
        if type(part) is dict:
            _drop_keywords_without_effect(part)
            _use_known_format(part)
            _use_pattern_of_names(part, shared)


def _drop_keywords_without_effect(part: dict[str, Any]) -> None:
    for name, value in _WITHOUT_EFFECT.items():
        if part.get(name) is value:
            del part[name]


def _use_known_format(part: dict[str, Any]) -> None:
    if type(name := part.get("format")) is not str or name in _FORMATS:
        return
    if version := _VERSION_OF_UUID.fullmatch(name):
        part["format"] = "uuid"
        part.setdefault("pattern", f"^.{{14}}{version[1]}.{{4}}[89abAB]")
    else:
        del part["format"]


def _use_pattern_of_names(part: dict[str, Any], shared: Mapping[tuple[str, ...], Any]) -> None:
    """Replace `propertyNames` by `patternProperties`, where one pattern says the same, as for the keys of a dict."""
    if type(names := part.get("propertyNames")) is not dict or part.keys() & {"properties", "patternProperties"}:
        return
    path = target_path(names, shared) if names.keys() - _REMARKS == {"$ref"} else None
    pattern = _pattern(names if path is None else shared[path])
    if pattern is not None:
        del part["propertyNames"]
        part["patternProperties"] = {pattern: part.get("additionalProperties", True)}
        part["additionalProperties"] = False


def _pattern(part: Any) -> str | None:
    """Return the pattern of the strings that a schema allows; None for a schema that says more than one pattern."""
    if type(part) is not dict or part.get("type", "string") != "string":
        return None
    keywords = part.keys() - _REMARKS - {"type"}
    if keywords == {"pattern"} and type(part["pattern"]) is str:
        return str(part["pattern"])
    values = part["enum"] if keywords == {"enum"} else [part["const"]] if keywords == {"const"} else None
    if type(values) is not list or not all(type(value) is str for value in values) or not values:
        return None
    return f"^(?:{'|'.join(map(re.escape, values))})$"


def every_part(schema: Any) -> Iterator[tuple[list[str], Any]]:
    """Yield a schema and all schemas in it, each with its path."""
    yield [], schema
    for path, part in parts(schema):
        for rest, inner in every_part(part):
            yield path + rest, inner


def target_path(part: Any, at: Mapping[tuple[str, ...], Any]) -> tuple[str, ...] | None:
    """Return the path of the schema that `part` refers to. None if `at`, the schemas by path, does not have it."""
    reference = part.get("$ref") if type(part) is dict else None
    if type(reference) is not str or not reference.startswith("#"):
        return None
    steps = reference[1:].split("/")
    path = tuple(step.replace("~1", "/").replace("~0", "~") for step in steps[1:])
    return path if steps[0] == "" and path in at else None


def drop_endless_parts(schema: Any) -> list[str] | None:
    """Replace each inner schema that no finite value satisfies, because it always requires itself, by false.

    If no finite value satisfies the whole schema, return the path of a part that causes this; otherwise None.
    """
    return _Recursion(schema).drop() if type(schema) is dict else None


class _Recursion:
    """Owns the set of the parts of a schema that some finite value satisfies, as far as references decide it."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._root = schema
        self._parts = [(path, part) for path, part in every_part(schema) if type(part) is dict]
        self._at = {tuple(path): part for path, part in self._parts}
        self._finite: set[int] = set()
        """The `id()` of parts."""

    def drop(self) -> list[str] | None:
        if not any("$ref" in part for _, part in self._parts):
            return None
        self._find()
        if id(self._root) not in self._finite:
            return self._reason()
        for path, part in self._parts:
            if id(part) not in self._finite and path:
                self._replace(path)
        return None

    def _find(self) -> None:
        """Fill `_finite`. A part is added after the parts that it needs, so passes are repeated until one adds nothing."""
        left, num_before = [part for _, part in reversed(self._parts)], -1
        while len(self._finite) > num_before:
            num_before = len(self._finite)
            for part in left:
                if self._is_finite(part):
                    self._finite.add(id(part))
            left = [part for part in left if id(part) not in self._finite]

    def _knows(self, part: Any) -> bool:
        return id(part) in self._finite if type(part) is dict else part is not False

    def _is_finite(self, part: dict[str, Any]) -> bool:
        target = self._target(part)
        if target is not None and not self._knows(target):
            return False
        if not all(map(self._knows, _listed(part, "allOf"))):
            return False
        if any(_listed(part, name) and not any(map(self._knows, part[name])) for name in ("anyOf", "oneOf")):
            return False
        types = part.get("type")
        types = {types} if type(types) is str else set(map(str, types)) if type(types) is list else set()
        if not types or types - {"object", "array"} or "const" in part or "enum" in part:
            return True
        return ("object" in types and self._has_finite_object(part)) or (
            "array" in types and self._has_finite_array(part)
        )

    def _has_finite_object(self, part: dict[str, Any]) -> bool:
        named, patterns = _named(part, "properties"), _named(part, "patternProperties")
        others = part.get("additionalProperties", True)
        for name in _listed(part, "required"):
            if type(name) is not str or (name not in named and patterns):
                continue
            if not self._knows(named.get(name, others)):
                return False
        return not part.get("minProperties") or any(map(self._knows, [*named.values(), *patterns.values(), others]))

    def _has_finite_array(self, part: dict[str, Any]) -> bool:
        least, first = part.get("minItems", 0), _listed(part, "prefixItems")
        if type(least) is not int or not all(map(self._knows, first[:least])):
            return type(least) is not int
        return least <= len(first) or self._knows(part.get("items", True))

    def _target(self, part: dict[str, Any]) -> dict[str, Any] | None:
        path = target_path(part, self._at)
        return None if path is None else self._at[path]

    def _reason(self) -> list[str]:
        """Follow parts that are not finite from the root. Return the path of the one that refers back to an earlier one."""
        path: tuple[str, ...] = ()
        begun = {path}
        while True:
            part = self._at[path]
            inner = [
                path + tuple(step) for step, each in parts(part) if not self._knows(each) and step[0] not in _SHARED
            ]
            target = target_path(part, self._at)
            if target is not None and not self._knows(self._at[target]):
                if target in begun:
                    return list(path)
                path = target
            elif not inner:
                return list(path)
            else:
                path = inner[0]
            begun.add(path)

    def _replace(self, path: list[str]) -> None:
        place: Any = self._root
        for step in path[:-1]:
            place = place[int(step) if type(place) is list else step]
            if place is False:  # the part that contains this one was replaced
                return
        place[int(path[-1]) if type(place) is list else path[-1]] = False


def named_types(part: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema within `root` names, itself, by a reference to `$defs` or in its alternatives. None of
    them: it allows any."""
    shared = _shared_parts(root)
    types: set[str] = set()
    left, seen = [part], set[int]()
    while left:
        part = left.pop()
        if type(part) is not dict or id(part) in seen:  # references may form a circle
            continue
        seen.add(id(part))
        named = part.get("type")
        types.update([named] if type(named) is str else map(str, named) if type(named) is list else ())
        left += [each for name in ("anyOf", "oneOf", "allOf") for each in _listed(part, name)]
        if (path := target_path(part, shared)) is not None:
            left.append(shared[path])
    return types


def _shared_parts(root: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    return {(kind, name): each for kind in _SHARED for name, each in _named(root, kind).items()}


def _listed(part: dict[str, Any], name: str) -> list[Any]:
    value = part.get(name)
    return value if type(value) is list else []


def _named(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = part.get(name)
    return value if type(value) is dict else {}
