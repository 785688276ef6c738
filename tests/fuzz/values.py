"""Seeded generators of bad values, bad JSON bodies and bad bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from millrace.producer import GenerationRequest, SamplingParams

FIELDS = sorted({*GenerationRequest.__struct_fields__, *SamplingParams.__struct_fields__} - {"sampling"})

ODD_CHARACTERS = "\x00\n\r\t\x1b[31m\x7f\x85\u2028\u2029\u202e\ufeff\U0001f600\u00e9'\"\\`{}$"

ODD_NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, -(2**63) - 1, 2**70, 10**400),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")),
)

LARGE = 900_000
"""Bytes of what is large, and fits a body."""


def odd_text(rng: random.Random) -> str:
    """Return a short text with characters that a log or a terminal must not get."""
    return "".join(rng.choice(ODD_CHARACTERS + "abc ") for _ in range(rng.randint(0, 12)))


def large_text(rng: random.Random) -> str:
    """Return a text of about LARGE bytes: words, one character, spaces, digits, or characters outside ASCII."""
    unit = rng.choice(["x", " ", "hello world ", "0", "\u00e9", "\U0001f600", "a\n", "<|endoftext|>", "\x00"])
    return unit * (rng.randint(1_000, LARGE) // len(unit.encode()))


def value(rng: random.Random, depth: int = 0) -> Any:
    """Return any value that JSON, or JSON with NaN, can carry."""
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice([None, True, False]),
        lambda: rng.choice(ODD_NUMBERS),
        lambda: odd_text(rng),
        list,
        dict,
        lambda: rng.choice(["1", "true", "null", "default", "\ud800", "x" * 200, "../../etc", "%s%n", "{queue}"]),
    ]
    if depth < 3:
        kinds += [
            lambda: [value(rng, depth + 1) for _ in range(rng.randint(1, 4))],
            lambda: {odd_text(rng): value(rng, depth + 1) for _ in range(rng.randint(1, 4))},
        ]
    if depth == 0 and rng.random() < 0.05:
        kinds = [
            lambda: large_text(rng),
            lambda: [rng.randint(-1, 600) for _ in range(rng.randint(1_000, 200_000))],
            lambda: [f"stop {n}" for n in range(rng.randint(100, 60_000))],
            lambda: [{"role": "user", "content": "hi"}] * rng.randint(100, 20_000),
        ]
    return rng.choice(kinds)()


def _schema(rng: random.Random, depth: int = 0) -> Any:
    """Return a JSON schema, often an unusual, contradictory or invalid one."""
    inner = _schema(rng, depth + 1) if depth < 3 else {"type": "integer"}
    return rng.choice(
        [
            *(
                True,
                False,
                {},
                {"type": "string", "pattern": rng.choice(["(", "a{1000,}", "(a+)+b", "[^\\x00]*", "\\1"])},
            ),
            {"type": rng.choice(["object", "array", "null", "text", ["string", 7], odd_text(rng)])},
            {"type": "object", "properties": {odd_text(rng): inner}, "required": [odd_text(rng)]},
            {"type": "array", "items": inner, "minItems": rng.choice([0, 3, -1, 10**6]), "maxItems": 2},
            {"type": "integer", "minimum": rng.choice(ODD_NUMBERS), "maximum": rng.choice(ODD_NUMBERS)},
            {"enum": [value(rng) for _ in range(rng.randint(0, 3))]},
            {rng.choice(["anyOf", "allOf", "oneOf", "not"]): rng.choice([[inner, inner], inner, []])},
            {"$ref": rng.choice(["#", "#/$defs/a", "#/$defs/none", "http://127.0.0.1:9/x"]), "$defs": {"a": inner}},
        ]
    )


def _structured_outputs(rng: random.Random) -> Any:
    tag = {"begin": rng.choice(["<a>", "", "b"]), "schema": _schema(rng), "end": rng.choice(["</a>", odd_text(rng)])}
    return rng.choice(
        [
            {"json": rng.choice([_schema(rng), json.dumps(_schema(rng)), odd_text(rng)])},
            {"regex": rng.choice(["(", "(a|a)*", "a{999}{999}", "\\p{Greek}+", "^$", odd_text(rng), "x" * 100_000])},
            {"choice": [rng.choice(["yes", odd_text(rng), "\u00e9" * 50_000]) for _ in range(rng.randint(0, 3))]},
            {"grammar": rng.choice(["start: start", 'start: "a" start | ', "start: /(/", "x", 'start: "a"~0..99999'])},
            {
                "structural_tag": {
                    "structures": [tag] * rng.randint(0, 2),
                    "triggers": rng.choice([["<"], [], ["<a>", "b"]]),
                }
            },
            {"json_object": True, rng.choice(["regex", "choice", "json"]): value(rng)},
        ]
    )


def _tools(rng: random.Random) -> Any:
    """Return tools. Only a small one is repeated many times: else an input might have hundreds of MB."""
    function = {
        "name": rng.choice(["f", odd_text(rng)]),
        "parameters": _schema(rng),
        "strict": rng.choice([True, None, 1]),
    }
    tools = [{"type": rng.choice(["function", "tool"]), "function": function}] * rng.choice([1, 2])
    return rng.choice([tools, [{"type": "function", "function": {"name": "f"}}] * 1025])


NEARLY_GOOD: dict[str, Callable[[random.Random], Any]] = {
    "structured_outputs": _structured_outputs,
    "response_format": lambda rng: rng.choice(
        [
            {"type": "json_schema", "json_schema": {"name": "n", "schema": _schema(rng), "strict": True}},
            {"type": "structural_tag", **_structured_outputs(rng)},
            {"type": rng.choice(["json_object", "text", odd_text(rng)])},
        ]
    ),
    "tools": _tools,
    "tool_choice": lambda rng: {"type": "function", "function": {"name": rng.choice(["f", odd_text(rng)])}},
    "messages": lambda rng: [{"role": rng.choice(["user", "tool", odd_text(rng)]), "content": odd_text(rng)}],
    "bad_words": lambda rng: [odd_text(rng) for _ in range(rng.randint(1, 130))],
    "allowed_token_ids": lambda rng: [rng.randint(0, 600) for _ in range(rng.randint(0, 1025))],
    "logit_bias": lambda rng: {str(rng.randint(-1, 600)): rng.choice(ODD_NUMBERS) for _ in range(rng.randint(1, 4))},
    **dict.fromkeys(("logprobs", "prompt_logprobs", "n", "thinking_token_budget"), lambda rng: rng.randint(-1, 66)),
    "cache_salt": odd_text,
}
"""By field: values that pass the first checks."""


def fields(rng: random.Random) -> dict[str, Any]:
    """Return the fields of a request that is good but for one to three of them."""
    body: dict[str, Any] = {"prompt": "3 + 4 =", "max_tokens": rng.randint(1, 4), "temperature": 0}
    for _ in range(rng.randint(1, 3)):
        name = odd_text(rng) if rng.random() < 0.15 else rng.choice(rng.choice([FIELDS, list(NEARLY_GOOD)]))
        if name == "prompt" or rng.random() < 0.05:
            body.pop("prompt", None)
        body[name] = NEARLY_GOOD[name](rng) if name in NEARLY_GOOD and rng.random() < 0.7 else value(rng)
        if name in ("tools", "tool_choice", "messages"):  # a chat, often a whole one
            body.pop("prompt", None)
            body |= {other: NEARLY_GOOD[other](rng) for other in ("messages", "tools") if rng.random() < 0.7}
    return body


def body(rng: random.Random, job_id: str) -> bytes:
    """Return the bytes of one bad entry of the inbox. Most of them name `job_id`."""
    kinds: dict[Callable[[], bytes], float] = {
        lambda: _dump({"id": job_id, **fields(rng)}): 10,
        lambda: _dump(fields(rng)): 2,
        lambda: _damaged(rng, _dump({"id": job_id, **fields(rng)})): 4,
        lambda: _repeated(rng, job_id): 1,
        lambda: _nested(rng, job_id): 1,
        lambda: _just_below_limits(rng, job_id): 0.5,
        lambda: _dump({odd_text(rng) * rng.choice([1, 1, 20_000]): 1, "id": job_id, "prompt": "x"}): 1,
        lambda: _dump({"id": job_id, "model": large_text(rng), "prompt": "x"}): 0.3,
        lambda: _dump({"id": job_id, "prompt": large_text(rng)}): 1,
        lambda: _dump({"id": job_id, "messages": [{"role": "user", "content": large_text(rng)}]}): 0.3,
        lambda: _dump({"outer": {"id": job_id}, "prompt": "x"})[: rng.randint(10, 60)]: 0.5,
        lambda: rng.randbytes(rng.randint(0, 200)): 1,
        lambda: b"x" * rng.randint(1_000_000, 8_000_000): 0.2,
        lambda: b"1" * rng.randint(1, 5_000): 0.3,
    }
    (made,) = rng.choices(list(kinds), list(kinds.values()))
    return made()


def _dump(made: Any) -> bytes:
    return json.dumps(made, ensure_ascii=bool(len(str(made)) % 2)).encode("utf-8", "surrogatepass")


def _damaged(rng: random.Random, raw: bytes) -> bytes:
    """Cut, flip or insert bytes."""
    damaged = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(damaged) or 1)
        match rng.randrange(4):
            case 0:
                del damaged[at:]
            case 1:
                damaged[at : at + 1] = rng.randbytes(1)
            case 2:
                damaged[at:at] = rng.choice([b",", b"{", b"]", b"\xff", b"\x00", b'"', b"\\ud800", b"NaN", b"\n"])
            case _:
                del damaged[at : at + rng.randint(1, 8)]
    return bytes(damaged)


def _repeated(rng: random.Random, job_id: str) -> bytes:
    """Many names, of which one or all are repeated."""
    number = rng.choice([1, 3, 1_000, 30_000])
    names = ",".join(f'"a{n if rng.random() < 0.9 else 0}":{n}' for n in range(number))
    inner = rng.choice(['"prompt":"x"', f'"meta":{{{names}}},"prompt":"x"', f'{names},"prompt":"x","prompt":"y"'])
    return f'{{"id":"{job_id}",{inner}}}'.encode()


def _nested(rng: random.Random, job_id: str) -> bytes:
    depth = rng.choice([60, 70, 1_000, 100_000])
    left, right = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    inner = left * depth + b"1" + right * rng.choice([depth, depth - 1])
    name = rng.choice([b"messages", b"meta", b"prompt", b"unknown"])
    return b'{"id":"' + job_id.encode() + b'","prompt":"x","' + name + b'":' + inner + b"}"


def _just_below_limits(rng: random.Random, job_id: str) -> bytes:
    """Return a body with nearly as many names, lists and objects, or commas as a request may have."""
    names = ",".join(f'"a{n}":{n}' for n in range(24_900))
    empty, numbers = ",".join(["[]"] * 29_900), ",".join(["0.5"] * 199_000)
    messages = ",".join(['{"role":"user","content":"hi"}'] * 5_900)
    nested = ",".join(['{"a":' * 25 + "1" + "}" * 25] * 590)
    inner = rng.choice(
        [
            f'"tools":[{{{names},"a0":1}}]',
            f'"messages":[{{"role":"user","content":"a","x":[{nested}]}}]',
            f'"messages":[{{"role":"user","content":"a","x":[{empty}]}}]',
            f'"messages":[{messages}]',
            f'"prompt_token_ids":[{numbers}]',
        ]
    )
    return f'{{"id":"{job_id}",{inner}}}'.encode()


def python_value(rng: random.Random) -> Any:
    """Return a value that a Python caller might pass by mistake."""
    kinds: list[Callable[[], Any]] = [
        lambda: value(rng),
        lambda: value(rng),
        lambda: rng.randbytes(4),
        lambda: object(),
        lambda: {1, 2},
        lambda: (1, "a"),
        lambda: 1 + 2j,
        lambda: Exception,
        lambda: iter([1]),
        lambda: _Hostile(),
    ]
    return rng.choice(kinds)()


class _Hostile:
    """A value that no operation takes."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]
