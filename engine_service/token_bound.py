"""A lower bound for the number of tokens of a text, without tokenizing it: no token covers more than N characters.

Such an N exists for byte-level BPE, and for BPE with byte fallback, behind the normalizers and pre-tokenizers named below.
Other tokenizers have no bound: WordPiece, WordLevel and Unigram can make one unknown token of a text of any length, and some
normalizers and pre-tokenizers remove text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

_COMPOSING = {"NFC", "NFKC"}
_MAX_COMPOSED = 4
"""Most code points that compose to one."""
_KEEPING = {
    "ByteLevel",
    "Digits",
    "Lowercase",
    "Metaspace",
    "NFD",
    "NFKD",
    "Prepend",
    "Punctuation",
    "Split",
    "UnicodeScripts",
}


class TokenBound:
    """Bounds the number of tokens of texts for one tokenizer. Immutable."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        steps = [*_steps(tokenizer.normalizer), *_steps(tokenizer.pre_tokenizer)]
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        is_complete = _knows_every_byte(tokenizer, steps, vocabulary)
        has_bound = is_complete and all(map(_keeps_text, steps)) and not _swallows_text(tokenizer)
        self._max_chars_per_token = max(map(len, vocabulary)) if has_bound else None
        self._max_composed = _MAX_COMPOSED ** sum(step["type"] in _COMPOSING for step in steps)

    def min_num_tokens(self, text: str) -> int:
        """Return a number that the text's tokens are not below; 0 if the tokenizer has no bound."""
        if self._max_chars_per_token is None:
            return 0
        max_chars = self._max_chars_per_token * (1 if text.isascii() else self._max_composed)
        return -(-len(text) // max_chars)


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a normalizer or pre-tokenizer, as tokenizer.json writes them."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += step.get("normalizers") or step.get("pretokenizers") or []
        else:
            yield step


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether the step removes no text. Composition of characters is counted apart."""
    if step["type"] == "Replace":
        return len(step["content"]) >= len(step["pattern"].get("String", step["content"] + "?"))  # else it is a regex
    return step["type"] in _KEEPING | _COMPOSING and step.get("behavior") != "Removed"


def _knows_every_byte(tokenizer: Tokenizer, steps: list[dict[str, Any]], vocabulary: dict[str, int]) -> bool:
    """Whether the model has known tokens for every text. Otherwise it can drop text, or make one unknown token of it."""
    if not isinstance(tokenizer.model, BPE):
        return False
    if any(step["type"] == "ByteLevel" for step in steps):
        return all(char in vocabulary for char in ByteLevel.alphabet())
    return tokenizer.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _swallows_text(tokenizer: Tokenizer) -> bool:
    """Whether an added token takes the spaces beside it, or matches text that was longer before its normalization."""
    added = tokenizer.get_added_tokens_decoder().values()
    return any(token.lstrip or token.rstrip or (token.normalized and tokenizer.normalizer) for token in added)
