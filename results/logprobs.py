"""The log-probabilities of a token and of the likely ones in its place: as an object, and as JSON in Redis.

In JSON a token is a list of `[id, logprob, rank, text or null]`: the token itself, then the most likely ones in their order,
without the token itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""

Entry = tuple[int, float, int, str | None]
"""Token id, log-probability, rank (1 is the most likely id) and text."""

_TOKENS_AT_ONCE = 8
"""Tokens that become JSON before other threads can run; about 0.2 ms with 20 alternatives."""


class Logprob(msgspec.Struct, frozen=True):
    """The natural logarithm of a token's probability, by the model's own logits: before temperature and all filters."""

    logprob: float
    rank: int | None = None
    """1: no other token is more likely."""
    decoded_token: str | None = None
    """The text of the token. None without detokenization. Empty if the token ends within a character: the token that
    completes the character has its text."""


TokenLogprobs = dict[int, Logprob]
"""By token id: first the token itself, then the most likely ones in their order."""


class LazyJson:
    """JSON that is built when it is read first. So a thread of the writer builds it, and not the engine loop."""

    __slots__ = ("_build", "_json", "num_bytes")

    def __init__(self, build: Callable[[], bytes], num_bytes: int) -> None:
        """`num_bytes`: about how long it is."""
        self._build: Callable[[], bytes] | None = build
        self._json = b""
        self.num_bytes = num_bytes

    def read(self) -> bytes:
        """Return the JSON. For one thread."""
        if self._build is not None:
            self._json, self._build = self._build(), None
        return self._json


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[list[Entry] | None]).decode


def encode_token(entries: Sequence[Entry]) -> bytes:
    """Return the JSON of one token."""
    # To 6 decimals. `round` with a number of digits takes four times as long.
    return _encode(
        [(token_id, round(max(LOWEST, value) * 1e6) / 1e6, rank, text) for token_id, value, rank, text in entries]
    )


def encode_tokens(tokens: Iterable[Sequence[Entry]]) -> Iterator[bytes]:
    """Yield the JSON of each token."""
    for number, entries in enumerate(tokens):
        yield encode_token(entries)
        if number % _TOKENS_AT_ONCE == 0:
            time.sleep(0)  # releases the GIL: else the engine loop waits 5 ms for it, again and again


def join_lines(tokens: Iterable[bytes]) -> bytes:
    """Return the tokens as a checkpoint has them, a line each."""
    return b"".join(line + b"\n" for line in tokens)


def join_tokens(tokens: Iterable[bytes]) -> bytes:
    """Return the JSON list of tokens."""
    return b"[%b]" % b",".join(tokens)


def decode_tokens(raw: bytes) -> list[TokenLogprobs]:
    """Return the tokens of a JSON list."""
    return [as_logprobs(entries or ()) for entries in _decode(raw)]


def decode_prompt(raw: bytes) -> list[TokenLogprobs | None]:
    """Return the tokens of a prompt; None for the first one."""
    return [None if entries is None else as_logprobs(entries) for entries in _decode(raw)]


def as_logprobs(entries: Iterable[Entry]) -> TokenLogprobs:
    return {token_id: Logprob(value, rank, text) for token_id, value, rank, text in entries}


def cumulative(tokens: Iterable[TokenLogprobs]) -> float:
    """Return the log-probability of a whole text."""
    return sum(next(iter(token.values())).logprob for token in tokens)
