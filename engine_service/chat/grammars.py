"""Grammars of chats: tool calls whose arguments fit their schemas, and forms of the output that follow free reasoning."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

from millrace.engine_service.chat.output_format import (
    CHANNEL,
    CONSTRAIN,
    END,
    HARMONY_CALLS,
    HERMES,
    HERMES_END,
    MESSAGE,
    MISTRAL,
    MISTRAL_ARGS,
    START,
    THINKING_MARKS,
    OutputFormat,
    ReasoningState,
)
from millrace.engine_service.chat.schemas import simplify
from millrace.producer import GenerationRequest, InvalidRequest, StructuredOutputs

_TEXT = "TEXT: /(.|\\n)*/"
_ANY_OBJECT = '{"type": "object"}'
_LINES = ("\n{", "}\n")
_BARE_SLASH = re.compile(r"\\.|[/\n]", re.DOTALL)
SpecialId = Callable[[str], int | None]
"""Returns the id of the token of a mark that texts of a grammar do not match; None for other texts."""
WHOLE_FORMS = ("grammar", "structural_tag")
"""The forms of the caller that are the whole output, with reasoning and calls."""
_SEPARATORS = {"item_separator": ", ?", "key_separator": ": ?"}
"""Separators in the arguments of calls: templates write them with or without spaces."""


def must_constrain_tools(request: GenerationRequest) -> bool:
    """Return whether the tool calls of the output have to fit the schemas of their tools. One with a form of its own has no
    others than the form allows."""
    if request.tools is None or request.tool_choice == "none" or request.sampling.structured_outputs is not None:
        return False
    return request.tool_choice != "auto" or any(tool["function"].get("strict") for tool in request.tools)


def chat_form(
    request: GenerationRequest,
    output_format: OutputFormat,
    special_id: SpecialId,
    before: ReasoningState,
) -> StructuredOutputs | None:
    """Return the form of a chat's output; None for free text. `before`: what the prompt does with the reasoning.

    Raises InvalidRequest for tools that cannot be constrained.
    """
    if must_constrain_tools(request):
        rules = _Rules(special_id)
        body = rules.tool_calls(request, output_format.tool_calls, has_args_mark=output_format.has_args_mark)
        try:
            if output_format.is_harmony:
                return rules.messages(body, '"analysis" | "commentary"', before, may_end=request.tool_choice == "auto")
            return rules.grammar(body, output_format.reasoning, before)
        except InvalidRequest as error:
            raise InvalidRequest("tools", error.message) from error
    wanted = request.sampling.structured_outputs
    if wanted is None or output_format.reasoning is None or before == "closed" or wanted.form in WHOLE_FORMS:
        return wanted
    rules = _Rules(special_id)
    if output_format.is_harmony:
        return rules.messages(rules.final(rules.form(wanted)), '"analysis"', before)
    return rules.grammar(rules.form(wanted), output_format.reasoning, before)


def form_grammar(wanted: StructuredOutputs) -> str:
    """Return the grammar of a form other than `grammar` and `structural_tag`."""
    rules = _Rules(lambda _: None)
    return rules.whole(rules.form(wanted))


def schema_grammar(schema: dict[str, Any] | bool) -> str:
    """Return the grammar of the JSON that satisfies a schema, without white space between its tokens."""
    return f"start: {_json(schema)}"


def structural_tag_grammar(tag: str, special_id: SpecialId) -> str:
    """Return the grammar of `StructuredOutputs.structural_tag`."""
    rules, given = _Rules(special_id), json.loads(tag)
    bodies: dict[str, list[str]] = {}
    for structure in given["structures"]:
        begin = structure["begin"]
        trigger = max(filter(begin.startswith, given["triggers"]), key=len)
        parts = (_literal(begin[len(trigger) :]), rules.json(structure["schema"]), _literal(structure["end"]))
        bodies.setdefault(trigger, []).append(" ".join(parts))
    tags = " | ".join(f"{rules.until(trigger)} ({' | '.join(some)})" for trigger, some in bodies.items())
    return rules.whole(f"({tags})* TEXT")


class _Rules:
    """Owns the rules of one grammar, in llguidance's variant of the Lark syntax."""

    def __init__(self, special_id: SpecialId) -> None:
        self._special_id = special_id
        self._rules = [_TEXT]

    def grammar(self, body: str, reasoning: str | None, before: ReasoningState) -> StructuredOutputs:
        """Return the grammar of `body`, after reasoning, which the prompt or the model opens, if the prompt has none."""
        if reasoning is not None and before != "closed":
            begin, end = THINKING_MARKS[reasoning]
            inside = f"{self.until(end)} /\\n{{0,4}}/"
            body = f"{inside} ({body})" if before == "open" else f"({self.mark(begin)} {inside})? ({body})"
        return StructuredOutputs(grammar=self.whole(body))

    def messages(self, last: str, channels: str, before: ReasoningState, *, may_end: bool = False) -> StructuredOutputs:
        """Return the grammar of harmony's messages: free ones in these channels, and then `last`. `may_end`: a message that
        the prompt has begun may be the last one."""
        next_begins = self._rule(f'{self.until(END)} {self.mark(START)} "assistant"')
        free = self._rule(f"{self.mark(CHANNEL)} ({channels}) {self.mark(MESSAGE)} {next_begins}")
        body = f"{free}* ({last})"
        if before is not None:
            body = f"{next_begins} {body}" + (" | TEXT" if may_end else "")
        return StructuredOutputs(grammar=self.whole(body))

    def final(self, body: str) -> str:
        """Return the expression for harmony's answer."""
        return f'{self.mark(CHANNEL)} "final" {self._content_type()} {self.mark(MESSAGE)} {body}'

    def _content_type(self) -> str:
        return f'(" json" | " "? {self.mark(CONSTRAIN)} "json")?'

    def whole(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules])

    def form(self, wanted: StructuredOutputs) -> str:
        if wanted.regex is not None:
            return f"/{_BARE_SLASH.sub(_escaped, wanted.regex)}/"
        if wanted.choice is not None:
            # A terminal: of a rule, the alternatives cost each token, and are limited to 2,000.
            self._rules.append(f"CHOICE: {' | '.join(map(_literal, wanted.choice))}")
            return "CHOICE"
        return self.json(json.loads(wanted.json or _ANY_OBJECT))

    def json(self, schema: dict[str, Any] | bool, **separators: str) -> str:
        """Return the name of a rule for JSON of this schema, compact but for the separators."""
        return self._rule(_json(schema, **separators))

    def tool_calls(self, request: GenerationRequest, family: str | None, *, has_args_mark: bool) -> str:
        """Return the expression for one or more calls; of "auto" also for text without any."""
        is_free = request.tool_choice == "auto"
        arguments = {name: self.json(schema, **_SEPARATORS) for name, schema in argument_schemas(request).items()}
        is_single = isinstance(request.tool_choice, dict) or not request.parallel_tool_calls

        def several(call: str, separator: str) -> str:
            if is_single:
                return call
            call = self._rule(call)
            return f"{call} ({_literal(separator)} {call})*"

        def objects(key: str, before: str = "{", after: str = "}") -> str:
            heads = {name: f'{before}"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ' for name in arguments}
            calls = [f"{_literal(heads[name])} {rule} {_literal(after)}" for name, rule in arguments.items()]
            return f"({' | '.join(calls)})"

        if family == "hermes":
            end = f"{objects('arguments', *_LINES)} {self.mark(HERMES_END)}"
            if is_free:
                return f"({self.until(HERMES)} {end})* TEXT"
            return several(f"{self.mark(HERMES)} {end}", "\n")
        if family == "llama3_json":
            calls = several(objects("parameters"), "; ")
            return f"/\\s*/ ({calls}) | /\\s*([^{{\\s](.|\\n)*)?/" if is_free else calls
        if family == "mistral":
            if has_args_mark:
                named = [f"{_literal(name)} {self.mark(MISTRAL_ARGS)} {rule}" for name, rule in arguments.items()]
                call = f"({' | '.join(named)})"
                calls = call if is_single else f"{call} ({self.mark(MISTRAL)} {call})*"
            else:
                calls = f'"[" {several(objects("arguments"), ", ")} "]"'
            return f"{self.until(MISTRAL)} {calls} | TEXT" if is_free else f"{self.mark(MISTRAL)} {calls}"
        if family == HARMONY_CALLS:  # one call: its mark of the end is a token that ends the output
            channel, after = self.mark(CHANNEL), f"{self._content_type()} {self.mark(MESSAGE)}"
            recipients = {_literal(f" to=functions.{name}"): rule for name, rule in arguments.items()}
            either = [
                f'({channel} "commentary" {to} | {to} {channel} "commentary") {after} {rule}'
                for to, rule in recipients.items()
            ]
            return " | ".join([*either, self.final("TEXT")] if is_free else either)
        rule = "the engine knows no form of tool calls for its model; use auto, or start it with --tool-call-parser"
        if family is not None:
            remedy = "leave out strict" if is_free else "use auto"
            rule = f"calls of the form {family} cannot be held to their schemas in this version; {remedy}"
        raise InvalidRequest("tools" if is_free else "tool_choice", rule)

    def mark(self, text: str) -> str:
        token_id = self._special_id(text)
        return _literal(text) if token_id is None else f"<[{token_id}]>"

    def until(self, text: str) -> str:
        """Return the name of a rule: any text, up to and with the first of these marks."""
        return self._rule(f"TEXT {self.mark(text)}", "[lazy]" if self._special_id(text) is None else "")

    def _rule(self, body: str, option: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{option}: {body}")
        return name


def argument_schemas(request: GenerationRequest) -> dict[str, dict[str, Any]]:
    """Return the schemas that the arguments of calls have to fit, by the functions that can be called. Raises
    InvalidRequest."""
    functions = [tool["function"] for tool in request.tools or ()]
    if isinstance(request.tool_choice, dict):
        name = request.tool_choice["function"]["name"]
        functions = [function for function in functions if function["name"] == name]
    return {function["name"]: _parameters(function, request.tool_choice == "auto") for function in functions}


def _json(schema: dict[str, Any] | bool, **separators: str) -> str:
    if schema is False:
        return "%json false"
    schema = {} if schema is True else copy.deepcopy(schema)
    simplify(schema)
    # llguidance reads its options there. Those of the user would switch off errors, and white space on.
    options = {"whitespace_flexible": False, **separators}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _escaped(found: re.Match[str]) -> str:
    return {"/": "\\/", "\n": "\\n"}.get(found[0], found[0])


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _parameters(function: dict[str, Any], is_free: bool) -> dict[str, Any]:
    """Return the schema of a function's arguments: an object, without entries if the function has no parameters. Raises
    InvalidRequest."""
    schema = function.get("parameters")
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    if is_free and not function.get("strict"):
        schema = {}
    if schema.get("type", "object") != "object":
        raise InvalidRequest("tools", f"the parameters of {function['name']} must have the type object")
    return {**schema, "type": "object"}
