"""llguidance without a model: a tokenizer with a token for each byte, and what a grammar accepts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import permutations
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from millrace.engine_service.grammar_process import Checked, check
from millrace.producer import StructuredOutputs

EOS = 256


class _Bytes:
    def __init__(self, special: list[str]) -> None:
        self.eos_token_id = EOS
        self.bos_token_id = None
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>", *(text.encode() for text in special)]
        self.special_token_ids = list(range(EOS, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def byte_tokenizer(special: list[str]) -> LLTokenizer:
    """A tokenizer with a token for each byte, the end of a text, and the special tokens, in this order."""
    wrapped = _Bytes(special)
    return LLTokenizer(TokenizerWrapper(wrapped), n_vocab=len(wrapped.tokens))


TOKENIZER = byte_tokenizer([])


def checked(schema: Any) -> Checked:
    """Return what a service says of a schema."""
    return check(StructuredOutputs(json=schema), TOKENIZER)


def matcher_for(schema: Any) -> LLMatcher:
    """Return the matcher of a service's grammar. The schema must have one."""
    answer = checked(schema)
    assert not answer.error, (schema, answer.error)
    return LLMatcher(TOKENIZER, answer.grammar, log_level=0)


def accepts(matcher: LLMatcher, text: str) -> bool:
    copied = matcher.deep_copy()
    tokens = list(text.encode())
    return copied.try_consume_tokens(tokens) == len(tokens) and copied.is_accepting()


def is_beginning(matcher: LLMatcher, text: str) -> bool:
    """Return whether the text, whose last character may be incomplete, can become one of the grammar."""
    tokens = list(text.rstrip("\ufffd").encode())
    return matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)


def accepts_value(matcher: LLMatcher, value: Any) -> bool:
    """Return whether the value is accepted in any order of its keys: that of the grammar is the one of the schema."""
    return any(accepts(matcher, text) for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    keys = permutations(value) if isinstance(value, dict) and len(value) < 5 else [value]
    for ordered in keys:
        written = {key: value[key] for key in ordered} if isinstance(value, dict) else value
        yield json.dumps(_integral(written), ensure_ascii=False, separators=(",", ":"))


def _integral(value: Any) -> Any:
    """Return the value with 1 for 1.0: they are equal, and a schema's numbers are written without a fraction."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _integral(each) for key, each in value.items()}
    return [_integral(each) for each in value] if isinstance(value, list) else value
