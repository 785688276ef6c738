"""From text to token ids and back. The tokenizer is loaded without torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from millrace.engine_service.errors import ConfigurationError, EngineError

logger = logging.getLogger("millrace.engine")

_INCOMPLETE = "�"
"""What a decoder shows for bytes that are not a character, or not yet."""

_NUM_CONTEXT_TOKENS = 6
"""Prompt tokens decoded in front of the output: some decoders treat the first token of a text differently."""


class TextError(EngineError):
    """Raised when a chat can't be turned into tokens; the message is for the one who sent it."""


class Tokenizer:
    """Wraps a fast tokenizer. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigurationError` when there is none in the directory that works."""
        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # the library raises what its parsers raise
            message = f"tokenizer: {path} has no usable tokenizer.json ({error}); name a directory with --tokenizer"
            raise ConfigurationError(message) from error
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer adds of itself."""
        ids: list[int] = self._backend.encode(_without_surrogates(text)).ids
        return ids

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a conversation through the model's chat template, ready for the assistant's turn."""
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program of the model's author: anything can come out of it
            raise TextError(f"the model's chat template can't render these messages: {error}") from error
        ids: list[int] = self._backend.encode(_without_surrogates(str(text)), add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: SequenceOf[int], *, skip_special_tokens: bool) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_output(self, prompt: list[int], output: list[int], *, skip_special_tokens: bool) -> str:
        """What `output` adds to the text of `prompt`, decoded at once."""
        context = prompt[-_NUM_CONTEXT_TOKENS:]
        start = self.decode(context, skip_special_tokens=skip_special_tokens)
        whole = self.decode(context + output, skip_special_tokens=skip_special_tokens)
        if whole.startswith(start):
            return whole[len(start) :]
        return self.decode(output, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """Owns the text of one output while it grows, token by token.

    A character whose bytes are spread over several tokens appears with the last of them. The text is a function of the
    tokens alone, so a resumed generation that feeds its old tokens again stands exactly where it stood.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = prompt_token_ids[-_NUM_CONTEXT_TOKENS:]
        self._window_start = 0
        self._num_settled = len(self._ids)
        self._settled_text = self._decode(self._ids)
        self.text = ""
        """All complete characters so far."""
        self.ends: list[int] = []
        """For each output token the length of `text` after it."""

    def feed(self, token_id: int) -> None:
        """Take in the next output token."""
        if self._skip_special_tokens and token_id in self._tokenizer.special_token_ids:
            self.ends.append(len(self.text))  # it adds nothing, and a row of them must not make the window grow
            return
        self._ids.append(token_id)
        window_text = self._decode(self._ids[self._window_start :])
        if len(window_text) > len(self._settled_text) and not window_text.endswith(_INCOMPLETE):
            self.text += window_text[len(self._settled_text) :]
            self._window_start = self._num_settled
            self._num_settled = len(self._ids)
            self._settled_text = self._decode(self._ids[self._window_start :])
        self.ends.append(len(self.text))

    def end_of(self, num_tokens: int) -> int:
        """Characters that the first `num_tokens` output tokens have made."""
        return self.ends[num_tokens - 1] if num_tokens else 0

    def flush(self) -> str:
        """The whole text when no more tokens come: bytes that never became a character are shown as such."""
        window_text = self._decode(self._ids[self._window_start :])
        return self.text + window_text[len(self._settled_text) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _without_surrogates(text: str) -> str:
    """Lone surrogates, which JSON can carry and UTF-8 can't, become replacement characters."""
    return text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
