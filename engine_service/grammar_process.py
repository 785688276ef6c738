"""A process that makes llguidance's grammars of structured outputs, and checks them, within limits of time and memory.

    engine -> process   the Vocabulary, once; then for each structured output its StructuredOutputs
    process -> engine   for each of them a Checked

A grammar that takes too much ends the process.
"""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from millrace.engine_service.chat.grammars import structural_tag_grammar
from millrace.engine_service.chat.schemas import drop_keywords_without_effect, parts
from millrace.engine_service.child_process import limit_memory, open_channel, receive, send
from millrace.producer.structured import StructuredOutputs

LIMIT_S = 2.0
"""CPU time for one grammar. Usual ones need less than 50 ms."""
MAX_MEMORY_BYTES = 2 * 1024**3
_MAX_REASON_CHARS = 250
_IN_GBNF = re.compile(r"^\s*root\s*::=", re.MULTILINE)
_NO_DETAILS = " <non-verbose/>"
_UNSATISFIABLE = "no text satisfies it"


class Vocabulary(msgspec.Struct, frozen=True):
    """What the outputs are made of."""

    tokenizer: str
    """In the form of a tokenizer.json."""
    size: int
    """Number of token ids of the model."""
    eos_token_ids: list[int]


class Checked(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar, or why there is none."""

    grammar: str = ""
    error: str = ""


def main() -> None:
    channel = open_channel()
    if (raw := receive(channel)) is None:
        return
    vocabulary = msgspec.json.decode(raw, type=Vocabulary)
    try:
        tokenizer = LLTokenizer(
            vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=vocabulary.eos_token_ids, slices=[]
        )
    except BaseException as error:  # its parser's errors, and panics of Rust
        refused = Checked(error=f"is not possible with the tokenizer of this model: {_shortened(str(error))}")
        while receive(channel) is not None:
            send(channel, refused)
        return
    limit_memory(MAX_MEMORY_BYTES)
    decoder = msgspec.json.Decoder(StructuredOutputs)
    while (raw := receive(channel)) is not None:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # its signal ends the process
        checked = check(decoder.decode(raw), tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(channel, checked)


def check(wanted: StructuredOutputs, tokenizer: LLTokenizer) -> Checked:
    """Return the grammar of what is wanted, or an error that names the place in a schema."""
    try:
        grammar = _grammar(wanted, tokenizer)
    except Exception as refused:  # of the parser of GBNF, which has no class of its own
        return Checked(error=f"{wanted.form}: {_shortened(str(refused))}")
    error = _error(grammar, tokenizer)
    if not error:
        return Checked(grammar)
    place = ""
    if wanted.json is not None:
        schema = json.loads(wanted.json)
        shared = {name: schema[name] for name in ("$defs", "definitions") if type(schema) is dict and name in schema}
        place = "at #" + "".join(f"/{each}" for each in _path(schema, shared, error, tokenizer)) + ": "
    return Checked(error=f"{wanted.form}: {place}{_shortened(error)}")


def _grammar(wanted: StructuredOutputs, tokenizer: LLTokenizer) -> str:
    match wanted.form:
        case "json":
            return _of_schema(json.loads(wanted.json))
        case "json_object":
            return _of_schema({"type": "object"})
        case "regex":
            return LLMatcher.grammar_from_regex(wanted.regex or "")
        case "choice":
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice or [])
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case "structural_tag":
            lark = structural_tag_grammar(wanted.structural_tag, lambda text: _special_id(text, tokenizer))
            return LLMatcher.grammar_from_lark(lark)
        case _:
            text = wanted.grammar or ""
            return LLMatcher.grammar_from_lark(gbnf_to_lark(text) if _IN_GBNF.search(text) else text)


def _special_id(text: str, tokenizer: LLTokenizer) -> int | None:
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    return token_ids[0] if len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0]) else None


def _of_schema(schema: Any) -> str:
    """Return the grammar of the JSON that satisfies a schema, without white space between its tokens."""
    drop_keywords_without_effect(schema)
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_flexible": False} if type(schema) is dict else None
    )


def _error(grammar: str, tokenizer: LLTokenizer) -> str:
    """Return why the grammar cannot be used; "" if it can."""
    matcher = LLMatcher(tokenizer, grammar, limits=LLParserLimits(verbose_errors=False), log_level=0)
    can_begin = any(matcher.compute_bitmask())  # may be too much work
    error = matcher.get_error().removesuffix(_NO_DETAILS) if matcher.is_error() else ""
    return _UNSATISFIABLE if error.startswith("NoExtension") or not (error or can_begin) else error


def _path(schema: Any, shared: dict[str, Any], error: str, tokenizer: LLTokenizer) -> list[str]:
    """Return the way to the innermost part of a schema that has this error."""
    for path, part in parts(schema):
        whole = {**shared, **part} if type(part) is dict else part
        if _error(_of_schema(whole), tokenizer) == error:
            return path + _path(part, shared, error, tokenizer)
    return []


def _shortened(error: str) -> str:
    return " ".join(error.split())[:_MAX_REASON_CHARS]


if __name__ == "__main__":
    main()
