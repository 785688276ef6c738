"""Seeded generators of bad values, bad JSON bodies and bad bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

FIELDS = (
    *("id", "model", "prompt", "prompt_token_ids", "messages", "tenant", "priority", "stream", "deadline_s", "delay_s"),
    *("run_at", "meta", "max_retries", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("stop", "stop_token_ids", "ignore_eos", "detokenize", "skip_special_tokens", "n", "logit_bias"),
    *("tools", "tool_choice", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    *("logprobs", "prompt_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words"),
    *("thinking_token_budget", "truncate_prompt_tokens", "include_stop_str_in_output", "spaces_between_special_tokens"),
    *("structured_outputs", "response_format"),
)

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


def fields(rng: random.Random) -> dict[str, Any]:
    """Return the fields of a request that is good but for one to three of them."""
    body: dict[str, Any] = {"prompt": "3 + 4 =", "max_tokens": rng.randint(1, 4), "temperature": 0}
    for _ in range(rng.randint(1, 3)):
        name = odd_text(rng) if rng.random() < 0.15 else rng.choice(FIELDS)
        if name == "prompt" or rng.random() < 0.05:
            body.pop("prompt", None)
        body[name] = value(rng)
    return body


def body(rng: random.Random, job_id: str) -> bytes:
    """Return the bytes of one bad entry of the inbox. Most of them name `job_id`."""
    kinds: dict[Callable[[], bytes], float] = {
        lambda: _dump({"id": job_id, **fields(rng)}): 10,
        lambda: _dump(fields(rng)): 2,
        lambda: _damaged(rng, _dump({"id": job_id, **fields(rng)})): 4,
        lambda: _repeated(rng, job_id): 1,
        lambda: _nested(rng, job_id): 1,
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
