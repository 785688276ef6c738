"""What the form of an output must be: a JSON schema, a regular expression, a choice, a grammar, or structural tags."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Any, Literal

import msgspec

from millrace.producer.checks import NamesUnknown, few_parts, is_deeper, json_value, remedy, text, texts
from millrace.producer.errors import InvalidRequest
from millrace.results.errors import shown
from millrace.results.models import adapter

MAX_BYTES = 256 * 1024
"""Largest size of a schema, a regular expression, the choices, a grammar, or structural tags."""
MAX_DEPTH = 64
"""Levels of objects and lists in a schema."""

Form = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
_FORMS: tuple[Form, ...] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_FIELD = "structured_outputs"
_OTHER_FIELDS = ("response_format", "response_model")
_IN_JSON_SCHEMA = '{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
_KEYWORDS = frozenset(
    [
        *("$ref", "$dynamicRef", "$defs", "$schema", "$id", "definitions"),
        *("type", "enum", "const", "format", "pattern"),
        *("anyOf", "oneOf", "allOf", "not", "if", "then", "else", "properties", "patternProperties", "required"),
        *("additionalProperties", "propertyNames", "items", "prefixItems", "contains", "minItems", "maxItems"),
        *("minProperties", "maxProperties", "minLength", "maxLength", "minimum", "maximum", "multipleOf"),
    ]
)
"""Keywords of JSON Schema that say something about a value, and those that only schemas have."""


class StructuredOutputs(
    msgspec.Struct, metaclass=NamesUnknown, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The form of an output. Exactly one field is given. Raises InvalidRequest, a ValueError."""

    json: Any = None
    """A JSON schema: an object, a boolean, or one of them as a JSON string. A compact string after construction."""
    regex: str | None = None
    """A regular expression that the whole output matches, in the syntax of Rust's crate `regex`, without anchors."""
    choice: list[str] | None = None
    """The strings of which the output is one."""
    grammar: str | None = None
    """A context-free grammar in llguidance's variant of the Lark syntax, or in GBNF with a rule `root`."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: Any = None
    """{"structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}: text is free up to a trigger; from
    there on it is the `begin` of a structure, JSON of its schema, and its `end`. A compact string after construction."""
    given_as: str | None = None
    """response_format or response_model, where the form was given so. Errors name that field."""

    @property
    def form(self) -> Form:
        """The name of the field that is given."""
        return next(name for name in _FORMS if getattr(self, name) is not None)

    @property
    def field(self) -> str:
        """The field of the request that has the form."""
        return self.given_as or _FIELD

    def __post_init__(self) -> None:
        if self.given_as not in (None, *_OTHER_FIELDS):
            rule = f"given_as must be {' or '.join(_OTHER_FIELDS)}"
            raise InvalidRequest(_FIELD, f"{rule}, got {shown(self.given_as)}")
        if self.json_object is False:
            _set(self, "json_object", None)
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequest(_FIELD, f"give exactly one of {', '.join(_FORMS)}, got {found}")
        (form,) = given
        value = getattr(self, form)
        if form in ("json", "structural_tag"):
            _set(self, form, (_normalized_text if type(value) is str else _normalized)(form, value))
        elif form == "choice":
            value = list(value) if type(value) is tuple else value
            wrong = texts(value)
            _require(form, f"{wrong}{_enum_remedy(value)}" if wrong else None if value else "must not be empty")
            _set(self, form, list(dict.fromkeys(value)))
        elif form == "json_object":
            _require(form, None if value is True else f"must be true, got {shown(value)}")
        else:
            _require(form, text(value))
        value = getattr(self, form)
        num_bytes = (
            0 if value is True else sum(len(part.encode()) for part in ([value] if type(value) is str else value))
        )
        if num_bytes > MAX_BYTES:
            raise InvalidRequest(_FIELD, f"{form} has {num_bytes} bytes, at most {MAX_BYTES} are allowed")


StructuredOutputsParams = StructuredOutputs
"""vLLM's name."""


def structured_outputs(value: Any) -> StructuredOutputs:
    """Return the object for a dict of its fields, or the object itself. Raises InvalidRequest."""
    if isinstance(value, StructuredOutputs):
        return value
    if type(value) is not dict:
        raise InvalidRequest(_FIELD, f"must be an object with one of {', '.join(_FORMS)}, got {shown(value)}")
    if unknown := next((name for name in value if name not in (*_FORMS, "given_as")), None):
        raise unknown_form(unknown)
    return StructuredOutputs(**value)


def unknown_form(name: Any) -> InvalidRequest:
    what = remedy(name, _FORMS) if type(name) is str else "leave it out"
    if name in _KEYWORDS:
        what = 'a schema goes into json: {"json": {...}}'
    return InvalidRequest(_FIELD, f"{shown(name)} is none of {', '.join(_FORMS)}; {what}")


def from_response_format(value: Any) -> StructuredOutputs | None:
    """Return what OpenAI's `response_format` asks for; None for text. Raises InvalidRequest."""
    kind = value.get("type") if type(value) is dict else None
    try:
        if type(kind) is str and kind in _KEYS_BY_TYPE:
            _check_keys(value, kind)
        if kind == "text":
            return None
        if kind == "json_object":
            return StructuredOutputs(json_object=True, given_as="response_format")
        if kind == "json_schema":
            named = value.get("json_schema")
            if type(named) is not dict or named.get("schema") is None:
                raise InvalidRequest(_FIELD, f'json_schema must be {{"name": ..., "schema": ...}}, got {shown(named)}')
            return StructuredOutputs(json=named["schema"], given_as="response_format")
        if kind == "structural_tag":
            tag = {name: value[name] for name in value if name != "type"}
            return StructuredOutputs(structural_tag=tag, given_as="response_format")
    except InvalidRequest as error:
        raise InvalidRequest("response_format", error.message) from error
    rule = "must be an object of the type text, json_object, json_schema or structural_tag"
    raise InvalidRequest("response_format", f"{rule}, got {shown(value)}")


_KEYS_BY_TYPE: dict[str, tuple[str, ...]] = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "json_schema"),
}


def _check_keys(value: dict[str, Any], kind: str) -> None:
    """Raise InvalidRequest for a key that the type of a `response_format` does not have. null changes nothing."""
    unknown = next((name for name in value if name not in _KEYS_BY_TYPE[kind] and value[name] is not None), None)
    if unknown is None:
        return
    what = "leave it out"
    if kind == "json_schema" and unknown in ("name", "schema", "strict", "description"):
        what = f"put name and schema into json_schema: {_IN_JSON_SCHEMA}"
    elif unknown in ("schema", "json_schema"):
        what = f"use {_IN_JSON_SCHEMA}"
    raise InvalidRequest(_FIELD, f"{shown(unknown)} does not belong to the type {kind}; {what}")


def class_remedy(value: Any) -> str:
    """Return what to do with a class where a schema is expected, such as a pydantic model; "" for another value."""
    return "; use response_model= of submit, or the class's JSON schema" if isinstance(value, type) else ""


def for_model(model: Any) -> StructuredOutputs:
    """Return the form of a pydantic model, or of another type that msgspec decodes. Raises InvalidRequest."""
    try:
        if isinstance(model, type) and hasattr(model, "model_json_schema"):
            return StructuredOutputs(json=model.model_json_schema(), given_as="response_model")
        by_pydantic = adapter(model)
        schema = msgspec.json.schema(model) if by_pydantic is None else by_pydantic.json_schema()
        return StructuredOutputs(json=schema, given_as="response_model")
    except InvalidRequest as error:
        raise InvalidRequest("response_model", error.message) from error
    except Exception as error:  # of pydantic, of the model's own code, or msgspec's TypeError
        rule = "must be a pydantic model, or another type that msgspec decodes"
        raise InvalidRequest("response_model", f"{rule}, got {shown(model)}: {error}") from error


@lru_cache(maxsize=32)
def _normalized_text(form: Form, value: str) -> str:
    _require(form, text(value) or few_parts(value.encode()))
    try:
        return _normalized(form, msgspec.json.decode(value))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(_FIELD, f"{form} is not valid JSON: {error}") from error


def _normalized(form: Form, value: Any) -> str:
    """Return a schema or structural tags as compact JSON. The keys keep their order, which is that of the output."""
    if form == "json":
        rule = "must be a JSON schema, an object or a boolean"
        _require(form, None if type(value) in (dict, bool) else f"{rule}, got {shown(value)}{class_remedy(value)}")
        _require(form, _wrapped_schema(value))
    else:
        _require(form, _structural_tag(value))
    _require(form, json_value(value))
    found = msgspec.json.encode(value)
    if is_deeper(found, MAX_DEPTH):
        raise InvalidRequest(_FIELD, f"{form} is nested too deeply; at most {MAX_DEPTH} levels are allowed")
    return found.decode()


def _wrapped_schema(value: Any) -> str | None:
    """OpenAI's object with a schema in it, as a schema, would allow any JSON."""
    if type(value) is bool:
        return None
    name = next((name for name in ("json_schema", "schema") if type(value.get(name)) is dict), None)
    is_response_format = value.get("type") == "json_schema"
    if name is None or (value.keys() & _KEYWORDS and not is_response_format):
        return None
    return f"has a schema in {name}, and no keyword of JSON Schema beside it; give the value of schema"


def _enum_remedy(value: Any) -> str:
    """Return what to do with an Enum, or with its members, where strings are expected; "" for other values."""
    is_enum = isinstance(value, type) and issubclass(value, Enum)
    has_members = isinstance(value, list | set) and any(isinstance(each, Enum) for each in value)
    return "; use [each.value for each in ...]" if is_enum or has_members else ""


def _structural_tag(value: Any) -> str | None:
    if type(value) is not dict or value.keys() != {"structures", "triggers"}:
        return f"must be an object with structures and triggers, got {shown(value)}"
    structures, triggers = value["structures"], value["triggers"]
    if wrong := texts(triggers) or (None if triggers else "must not be empty"):
        return f"triggers {wrong}"
    if type(structures) is not list or not structures:
        return f"structures must be a list that is not empty, got {shown(structures)}"
    for i, structure in enumerate(structures):
        if type(structure) is not dict or structure.keys() != {"begin", "schema", "end"}:
            return f"structures: item {i} must be an object with begin, schema and end, got {shown(structure)}"
        if wrong := text(structure["begin"]):
            return f"structures: item {i}: begin {wrong}"
        if not structure["begin"].startswith(tuple(triggers)):
            return f"structures: item {i}: begin must start with one of the triggers, got {shown(structure['begin'])}"
        if type(structure["end"]) is not str:
            return f"structures: item {i}: end must be a string, got {shown(structure['end'])}"
        if type(structure["schema"]) not in (dict, bool):
            return f"structures: item {i}: schema must be an object or a boolean, got {shown(structure['schema'])}"
    return None


def _require(form: Form, wrong: str | None) -> None:
    if wrong:
        raise InvalidRequest(_FIELD, f"{form} {wrong}")


_set = msgspec.structs.force_setattr
