"""A process that makes llguidance's grammars of structured outputs, and checks them, within limits of time and memory.

    engine -> process   the Vocabulary, once; then for each structured output its StructuredOutputs
    process -> engine   for each of them a Checked

A grammar that takes too much ends the process.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import resource
import signal
import time
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from millrace.engine_service.chat.grammars import form_grammar, schema_grammar, structural_tag_grammar
from millrace.engine_service.chat.schemas import (
    drop_endless_parts,
    every_part,
    parts,
    simplify,
    target_path,
)
from millrace.engine_service.child_process import limit_memory, open_channel, receive, send
from millrace.producer.structured import StructuredOutputs

LIMIT_S = 2.0
"""CPU time for one grammar. Usual ones need less than 50 ms."""
MAX_MEMORY_BYTES = 2 * 1024**3
MAX_STACK_BYTES = 16 * 1024**2
_NUM_TRIAL_TOKENS = 400
_TRIAL_S = 0.5
"""CPU time of a trial."""
_SEARCH_S = 1.2
"""CPU time of the search for the place of an error."""
_MAX_PLACE_CHARS = 150
_MAX_REASON_CHARS = 250
_RULE_OF_GBNF = re.compile(r"^\s*([\w-]+)\s*::=", re.MULTILINE)
_TEXT_OF_GBNF = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_CODE_OF_GBNF = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_JSON_RULE = re.compile(r"^(\w+: %json )(\{.*\})$", re.MULTILINE)
"""As the grammars of chats have it."""
_LONE_BACKSLASH = re.compile(r"(?<!\\)(\\\\)*\\\Z")
_COUNTED_GROUP = re.compile(r"\)[*+]?\{\d")
_NO_FORCING = '\n%llguidance {"no_forcing": true}'
"""Masks allow each token with which a text goes on. Without this llguidance writes, for each token, all the text that must
follow, and allows only the first token of it: 50 ms for 200,000 characters."""
_IN_SCHEMA = "at 1(8): failed to compile JSON schema: "
_NO_DETAILS = "<non-verbose/>"
_BEHIND_REFERENCE = re.compile(r" while processing json-schema:///\S*\Z")
_BECAUSE_OF = re.compile(
    r"required property '(.*)' is unsatisfiable|prefixItems\[(\d+)\] is|required item is", re.DOTALL
)
"""Errors of an object or a list that has a part which nothing satisfies."""
_ECHO = re.compile(r"\n *\d+ \| .*", re.DOTALL)
"""The lines of a grammar that llguidance repeats after an error."""
_UNSATISFIABLE = "no text satisfies it"
_TOO_MUCH_WORK = "takes too much work to compile; make it simpler"
_OF_TOO_MUCH_WORK = ("fuel exhausted", "initial_lexer_fuel", "Unable to determine if regex is empty")
_PLAINER = (
    (re.compile(r"(?:invalid regex .*)?regex parse error:.*error: (.*)", re.DOTALL), r"regex parse error: \1"),
    (re.compile(r"(error: look-around.*)"), r"\1; use a class such as [^x], or check it after parsing"),
    (
        re.compile(r"(?:invalid regex .*)?lookarounds not supported yet; .*", re.DOTALL),
        r"regex parse error: anchors inside it, and word boundaries, are not supported; leave them out",
    ),
    (
        re.compile(r"oneOf constraints are not supported.*"),
        "oneOf is supported only where no two branches match the same; use anyOf, or branches that exclude one another",
    ),
    (
        re.compile(r"Resource '(?:json-schema:///)?(.*)' is not present in a registry.*"),
        r"\1: only references within the schema (#/...) are followed",
    ),
)
"""Errors of llguidance that name its own options, or repeat the form, and what to say instead."""
_NO_ROOT = "a GBNF grammar needs a rule root"
_ENDLESS = (
    "no finite value satisfies it, since it always requires itself; leave it out of required, or allow another value"
)
_INEXACT = "integers beyond 2^53 would not be kept exactly; use strings"
_TOO_AMBIGUOUS = (
    "nested repetitions match the same text in too many ways; use smaller counts, or separate the repetitions"
)
_CHECK_LATER = "; leave it out, and check it after parsing"
_UNREADABLE = "; leave it out, or use a model whose tokenizer is byte-level BPE, or SentencePiece with byte fallback"


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


def _limit_stack(num_bytes: int) -> None:
    """A form that needs more ends this process, and no worker: `ulimit -s` may allow any stack here, but not in a thread."""
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    with contextlib.suppress(ValueError, OSError):  # as in limit_memory
        resource.setrlimit(resource.RLIMIT_STACK, (num_bytes if most < 0 else min(num_bytes, most), most))


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
        reason = _UNREADABLE if "can't determine decoder type" in str(error) else f": {_shortened(str(error))}"
        refused = Checked(error=f"is not possible with the tokenizer of this model{reason}")
        while receive(channel) is not None:
            send(channel, refused)
        return
    limit_memory(MAX_MEMORY_BYTES)
    _limit_stack(MAX_STACK_BYTES)
    decoder = msgspec.json.Decoder(StructuredOutputs)
    while (raw := receive(channel)) is not None:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # its signal ends the process
        checked = check(decoder.decode(raw), tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(channel, checked)


def check(wanted: StructuredOutputs, tokenizer: LLTokenizer) -> Checked:
    """Return the grammar of what is wanted, or an error that names the place in a schema."""
    try:
        return Checked(_grammar(wanted, tokenizer))
    except Exception as refused:  # also of the parser of GBNF, which has no class of its own
        return Checked(error=f"{wanted.form}: {_shortened(str(refused), _MAX_PLACE_CHARS + _MAX_REASON_CHARS)}")


def _grammar(wanted: StructuredOutputs, tokenizer: LLTokenizer) -> str:
    match wanted.form:
        case "json":
            return _schema_grammar(json.loads(wanted.json), tokenizer)
        case "structural_tag":
            tag = json.loads(wanted.structural_tag)
            for index, structure in enumerate(tag["structures"]):
                try:
                    _schema_grammar(structure["schema"], tokenizer)
                except ValueError as refused:
                    raise ValueError(f"structures: item {index}: schema: {refused}") from None
            lark = structural_tag_grammar(json.dumps(tag), lambda text: _special_id(text, tokenizer))
        case "grammar":
            text = wanted.grammar or ""
            if rules := _RULE_OF_GBNF.findall(text):
                if "root" not in rules:
                    raise ValueError(_NO_ROOT)
                lark = gbnf_to_lark(_TEXT_OF_GBNF.sub(_with_characters, text))
            else:
                lark = _JSON_RULE.sub(lambda rule: _checked_rule(rule, tokenizer), text)
        case _:
            if _LONE_BACKSLASH.search(wanted.regex or ""):  # llguidance would drop it
                raise ValueError("incomplete escape sequence: it ends with a single backslash")
            lark = form_grammar(wanted)
    grammar = _of_lark(lark)
    if error := _error(grammar, tokenizer):
        raise ValueError(error.rpartition("regex parse error: ")[2] if wanted.form == "regex" else error)
    if wanted.form in ("regex", "grammar") and _is_too_ambiguous(grammar, tokenizer):
        raise ValueError(_TOO_AMBIGUOUS)
    return grammar


def _schema_grammar(schema: Any, tokenizer: LLTokenizer) -> str:
    """Return the grammar of a schema, without its parts that only an endless value satisfies. Raises ValueError."""
    if (path := drop_endless_parts(schema)) is not None:
        raise ValueError(f"at {_place(path)}: {_ENDLESS}")
    for path, part in every_part(schema):
        for name, value in part.items() if type(part) is dict else ():
            if name in ("const", "enum") and _has_inexact_integer(value):
                raise ValueError(f"at {_place([*path, name])}: {_INEXACT}")
            if name in ("exclusiveMinimum", "exclusiveMaximum") and type(value) is bool:  # llguidance would ignore it
                raise ValueError(f"at {_place([*path, name])}: must be a number, as in all drafts since the sixth")
    grammar = _of_schema(schema)
    if error := _error(grammar, tokenizer):
        path, reason = _Search(schema, tokenizer).innermost(error)
        what_to_do = _CHECK_LATER if reason.startswith("Unimplemented keys") else ""
        raise ValueError(f"at {_place(path)}: {_shortened(reason)}{what_to_do}")
    for path, part in every_part(schema):
        if type(part) is dict and _COUNTED_GROUP.search(str(part.get("pattern"))):
            text = {name: part[name] for name in ("pattern", "minLength", "maxLength") if name in part}
            if _is_too_ambiguous(_of_schema({"type": "string", **text}), tokenizer):
                raise ValueError(f"at {_place(path)}: {_TOO_AMBIGUOUS}")
    return grammar


def _has_inexact_integer(value: Any) -> bool:
    """Whether llguidance, for which numbers are floats of 64 bits, would make another integer of one in a JSON value."""
    if type(value) is int:
        return abs(value) > 2**53
    inner = value.values() if type(value) is dict else value if type(value) is list else ()
    return any(map(_has_inexact_integer, inner))


def _checked_rule(rule: re.Match[str], tokenizer: LLTokenizer) -> str:
    schema = json.loads(rule[2])
    simplify(schema)
    _schema_grammar(schema, tokenizer)
    return rule[1] + json.dumps(schema)


def _with_characters(text: re.Match[str]) -> str:
    """Return a literal or a class of GBNF with characters instead of their codes: the converter drops the zeros of these."""
    is_class = text[0].startswith("[")

    def character(code: re.Match[str]) -> str:
        number = int(code[code.lastindex], 16) if code.lastindex else None
        if number is None or 0xD800 <= number < 0xE000 or number > 0x10FFFF:
            return code[0]
        if is_class and number < 0x80:
            return f"\\x{number:02x}"
        return chr(number) if is_class else json.dumps(chr(number), ensure_ascii=False)[1:-1]

    return _CODE_OF_GBNF.sub(character, text[0])


def _is_too_ambiguous(grammar: str, tokenizer: LLTokenizer) -> bool:
    """Return whether a text of the grammar, drawn at random, soon exceeds what a step may cost.

    llguidance follows all ways to read a text: those of (a{1,500}){1,500} grow with its square.
    """
    if not _COUNTED_GROUP.search(grammar):
        return False
    matcher = LLMatcher(tokenizer, grammar, limits=LLParserLimits(verbose_errors=False), log_level=0)
    draw, until_s = random.Random(0), time.process_time() + _TRIAL_S
    last: int | None = None
    ends: set[int] = set()  # tokens that have ended a text, such as a quote: longer texts cost more
    for _ in range(_NUM_TRIAL_TOKENS):
        token_id = _drawn(matcher.compute_bitmask(), ends, draw, tokenizer)
        if matcher.is_error():
            return True
        if time.process_time() > until_s or (token_id is None and last is None):
            break
        if token_id is not None:
            matcher.consume_token(token_id)
        else:
            assert last is not None
            ends.add(last)
            matcher.rollback(1)
        last = token_id
    return False


def _drawn(mask: bytes, ends: set[int], draw: random.Random, tokenizer: LLTokenizer) -> int | None:
    """Return a random token id of a mask that is neither special nor in `ends`. None if there is none."""
    allowed, num_bits = int.from_bytes(mask, "little"), 8 * len(mask)
    while allowed:
        above = allowed >> (start := draw.randrange(num_bits)) << start
        lowest = above or allowed
        token_id = (lowest & -lowest).bit_length() - 1
        if token_id not in ends and not tokenizer.is_special_token(token_id):
            return token_id
        allowed &= ~(1 << token_id)
    return None


def _special_id(text: str, tokenizer: LLTokenizer) -> int | None:
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    return token_ids[0] if len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0]) else None


def _of_schema(schema: Any) -> str:
    """Return the grammar of the JSON that satisfies a schema, without white space between its tokens."""
    return _of_lark(schema_grammar(schema))


def _of_lark(text: str) -> str:
    return LLMatcher.grammar_from_lark(text + _NO_FORCING)


def _error(grammar: str, tokenizer: LLTokenizer) -> str:
    """Return why the grammar cannot be used, or ""."""
    matcher = LLMatcher(tokenizer, grammar, limits=LLParserLimits(verbose_errors=False), log_level=0)
    can_begin = any(matcher.compute_bitmask())  # may be too much work
    error = _ECHO.sub("", matcher.get_error()).removeprefix(_IN_SCHEMA).removesuffix(_NO_DETAILS).rstrip()
    if error.startswith("NoExtension") or not (error or can_begin):
        return _UNSATISFIABLE
    if any(sign in error for sign in _OF_TOO_MUCH_WORK):
        return _TOO_MUCH_WORK
    error = _BEHIND_REFERENCE.sub("", error)
    for pattern, plainer in _PLAINER:
        error = pattern.sub(plainer, error)
    return error


class _Search:
    """Looks for the innermost part of a schema that has an error."""

    def __init__(self, schema: Any, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._until_s = time.process_time() + _SEARCH_S
        self._at = {tuple(path): part for path, part in every_part(schema)}
        self._shared = {
            name: schema[name] for name in ("$defs", "definitions") if type(schema) is dict and name in schema
        }

    def innermost(self, error: str) -> tuple[list[str], str]:
        """Return the path of the part, and its error. `error`: that of the whole schema. After `_SEARCH_S` of CPU time the
        result may be a part that contains the innermost one."""
        path: tuple[str, ...] = ()
        visited = {path}
        while (found := self._next(path, error)) is not None and found[0] not in visited:
            path, error = found
            visited.add(path)
        return list(path), error

    def _next(self, path: tuple[str, ...], error: str) -> tuple[tuple[str, ...], str] | None:
        """Return a part that is in the part at a path, or that it refers to, and that causes its error."""
        part = self._at[path]
        target = target_path(part, self._at)
        if target is not None and (cause := self._error_at(target)):
            return target, cause
        if because := _BECAUSE_OF.search(error):
            name, index = because.groups()
            step = ("prefixItems", index) if index else ("items",) if name is None else ("properties", name)
            if (each := path + step) in self._at and (cause := self._error_at(each)):
                return each, cause
        inner = (path + tuple(step) for step, _ in parts(part))
        return next(((each, error) for each in inner if self._error_at(each) == error), None)

    def _error_at(self, path: tuple[str, ...]) -> str:
        if time.process_time() > self._until_s:
            return ""
        part = self._at[path]
        return _error(_of_schema({**self._shared, **part} if type(part) is dict else part), self._tokenizer)


def _place(path: list[str]) -> str:
    return _shortened(
        "#" + "".join(f"/{each.replace('~', '~0').replace('/', '~1')}" for each in path), _MAX_PLACE_CHARS
    )


def _shortened(error: str, num_chars: int = _MAX_REASON_CHARS) -> str:
    """Return an error in one line: a long one without its middle, as the reason is often at the end."""
    line = " ".join(error.split())
    half = num_chars // 2
    return line if len(line) <= num_chars else f"{line[:half]}...{line[3 - half :]}"


if __name__ == "__main__":
    main()
