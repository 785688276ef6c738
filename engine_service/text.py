"""Convert text to token ids and back. The tokenizer is loaded without torch."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from pathlib import Path
from typing import Any

from millrace.engine_service.chat.output_format import THINKING_MARKS
from millrace.engine_service.chat.template import ChatTemplate, read_template
from millrace.engine_service.errors import ConfigurationError

_INCOMPLETE = "�"
"""The decoder writes this for bytes that are not a character, or not yet one."""

_NUM_CONTEXT_TOKENS = 6
"""Prompt tokens decoded in front of the output: some decoders treat the first token of a text differently."""

_MAX_PENDING_TOKENS = 8
"""Tokens without a complete character at their end that are decoded again with each new one."""

_NUM_KEPT_TOKENS = 4
"""How many of them are kept if there are more: a character has at most four bytes, so it begins in no token before these."""

_REMEDY = "name a local directory with a tokenizer.json"


class Tokenizer:
    """Wraps a fast tokenizer. Safe to use from several threads. Encoding lets other threads run."""

    def __init__(self, path: Path, template_file: str | None = None) -> None:
        """Load the tokenizer in this directory. `template_file`: a chat template in place of the tokenizer's. Raises
        `ConfigurationError` if there is no usable tokenizer or template."""
        if not os.path.isdir(path):  # unlike `Path.is_dir`, false for a name that is too long
            raise ConfigurationError(f"tokenizer: {path} is not a directory; {_REMEDY}")
        from transformers import PreTrainedTokenizerFast  # takes longer than all other imports of the service

        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises what its parsers raise, and its Rust code may panic
            if not (path / "tokenizer.json").exists():
                how = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes one for most tokenizers"
                raise ConfigurationError(f"tokenizer: {path} has no tokenizer.json; {_REMEDY}; {how}") from error
            message = f"tokenizer: {path / 'tokenizer.json'} cannot be used ({error}); {_REMEDY}"
            raise ConfigurationError(message) from error
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._texts: dict[int, str] = {}
        """What tokens add after a letter."""
        self._template = read_template(template_file) if template_file is not None else self._own_template(path)

    def _own_template(self, path: Path) -> str | dict[str, str] | None:
        """Return the chat template of the model. Those that take images may have it in a file of their processor only."""
        found: str | dict[str, str] | None = self._tokenizer.chat_template
        if not found:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                found = json.loads((path / "chat_template.json").read_bytes())["chat_template"]
        return found

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this text. None: there is none."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id if token_id in self.special_token_ids else None

    def mark_id(self, text: str) -> int | None:
        """Return the id of the token with this text that no text of a grammar matches. None: there is none.

        For llguidance these are the special tokens and all added tokens of the form <...>.
        """
        token_id: int | None = self._backend.token_to_id(text)
        is_tag = text.startswith("<") and text.endswith(">") and token_id in self.added_tokens
        return token_id if is_tag or token_id in self.special_token_ids else None

    def encode(self, text: str, *, add_special_tokens: bool = True, num_kept: int | None = None) -> list[int]:
        """Return the ids of a text, by default with the special tokens that the tokenizer adds to a plain prompt.

        `num_kept` cuts off the begin of a longer text; the special tokens stay, and count.
        """
        texts = [_without_surrogates(text)]
        # Unlike `encode`, this releases the GIL, and it computes no offsets.
        adds_now = add_special_tokens and num_kept is None
        encoding = self._backend.encode_batch_fast(texts, add_special_tokens=adds_now)[0]
        if num_kept is None:
            return list(encoding.ids)
        if add_special_tokens:
            num_special = self._backend.num_special_tokens_to_add(False)
            encoding.truncate(max(0, num_kept - num_special), direction="left")
            encoding = self._backend.post_process(encoding)
        return list(encoding.ids[-num_kept:])

    @property
    def num_tokens(self) -> int:
        """The number of tokens, with those that were added to the vocabulary."""
        return int(self._backend.get_vocab_size())

    @cached_property
    def thinking_mark_ids(self) -> tuple[int, int] | None:
        """The ids of the tokens before and after the model's thoughts. None if the vocabulary has no such tokens."""
        for marks in THINKING_MARKS.values():
            start_id, end_id = map(self._backend.token_to_id, marks)
            if start_id is not None and end_id is not None:
                return start_id, end_id
        return None

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """The tokens that were added to the model's vocabulary, such as the special ones."""
        return {token_id: token.content for token_id, token in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def byte_values(self) -> dict[int, bytes]:
        """The tokens for single bytes of characters without a token, in tokenizers with byte fallback. The bytes of ASCII
        are left out: each of them is a whole character."""
        values = {self._backend.token_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(0x80, 0x100)}
        values.pop(None, None)
        return {token_id: byte for token_id, byte in values.items() if self._decode_all([token_id]) == _INCOMPLETE}

    @property
    def of_transformers(self) -> Any:
        """The tokenizer as an object of transformers."""
        return self._tokenizer

    def as_json(self) -> str:
        """Return the content of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat templates; without any, each chat is an error."""
        found = self._template
        sources = found if isinstance(found, dict) else {"default": found} if found else {}
        return ChatTemplate(sources, self._tokenizer.special_tokens_map)

    def decode(self, token_ids: SequenceOf[int], *, skip_special_tokens: bool) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def texts_of(self, token_ids: Iterable[int], before: SequenceOf[int]) -> list[str]:
        """Return what each of these tokens adds to a text that ends with the tokens `before`. A character of several tokens
        belongs to the last one, and the others add only what they have besides. Special tokens have a text, too."""
        texts = [self._text_of(token_id) for token_id in token_ids]
        if _INCOMPLETE not in "".join(texts):
            return texts
        starts = self._incomplete_starts(before)
        return [
            self._completed_text(token_id, text, starts) if _INCOMPLETE in (text[:1], text[-1:]) else text
            for token_id, text in zip(token_ids, texts, strict=True)
        ]

    def _text_of(self, token_id: int) -> str:
        """Return what a token adds after a letter."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._decode_all([*self.letter, token_id]).removeprefix(
                self._decode_all(self.letter)
            )
        return text

    def _incomplete_starts(self, before: SequenceOf[int]) -> list[tuple[list[int], str]]:
        """Return a letter with the last 1, 2, ... tokens of `before`, and the complete characters of this text. Return
        nothing if the last character of `before` is complete: then no token completes it."""
        starts = []
        for count in range(1, len(before) + 1):
            ids = [*self.letter, *before[-count:]]
            text = self._decode_all(ids)
            if not text.endswith(_INCOMPLETE):
                return []
            starts.append((ids, text.rstrip(_INCOMPLETE)))
        return starts

    def _completed_text(self, token_id: int, alone: str, starts: list[tuple[list[int], str]]) -> str:
        """Return the complete characters that a token adds. `alone`: what it adds after a letter."""
        for ids, start in starts:
            added = self._decode_all([*ids, token_id]).removeprefix(start).rstrip(_INCOMPLETE)
            if added and not added.startswith(_INCOMPLETE):
                return added
        return alone.rstrip(_INCOMPLETE)

    def _decode_all(self, token_ids: list[int]) -> str:
        return self.decode(token_ids, skip_special_tokens=False)

    @cached_property
    def letter(self) -> list[int]:
        """One token of text. Some decoders drop the space in front of the first token of a text."""
        return self.encode("a", add_special_tokens=False)[-1:]

    def context_of(self, prompt: list[int], *, skip_special_tokens: bool) -> tuple[list[int], str]:
        """Return the tokens to decode in front of the output, and their text. It ends with a complete character."""
        context = prompt[-_NUM_CONTEXT_TOKENS:]
        text = self.decode(context, skip_special_tokens=skip_special_tokens)
        if text.endswith(_INCOMPLETE):
            context = self.letter
            text = self.decode(context, skip_special_tokens=skip_special_tokens)
        return context, text

    def decode_output(self, prompt: list[int], output: list[int], *, skip_special_tokens: bool) -> str:
        """Return what `output` adds to the text of `prompt`, as a `Detokenizer` does. It is decoded at once if all its
        characters are complete."""
        context, start = self.context_of(prompt, skip_special_tokens=skip_special_tokens)
        whole = self.decode(context + output, skip_special_tokens=skip_special_tokens)
        text = whole.removeprefix(start)
        if whole.startswith(start) and self._is_complete(text, output, skip_special_tokens=skip_special_tokens):
            return text
        detokenizer = Detokenizer(self, prompt, skip_special_tokens=skip_special_tokens)
        for token_id in output:
            detokenizer.feed(token_id)
        return detokenizer.flush()

    def _is_complete(self, text: str, output: list[int], *, skip_special_tokens: bool) -> bool:
        if _INCOMPLETE in text:
            return False
        if not skip_special_tokens or self.special_token_ids.isdisjoint(output):
            return True
        return _INCOMPLETE not in self._decode_all(output)  # a special token between the bytes of a character ends it


class Detokenizer:
    """Owns the text of one output while it grows, token by token.

    A character whose bytes are spread over several tokens appears with the last of them. Other bytes are shown as "�",
    once it is known that no character begins with them. The text depends on the tokens alone, so a resumed generation
    that feeds its old tokens again has exactly the same text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._joins_special_tokens = not skip_special_tokens and not spaces_between_special_tokens
        self._is_last_special = False
        self._context, start = tokenizer.context_of(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        """Tokens to decode in front of the pending ones. Their text ends with a complete character."""
        self._pending: list[int] = []
        """The last tokens, while they end within a character or add no text."""
        self._num_shown = len(start)
        """How many characters of context and pending tokens are the prompt's, or in `text` already."""
        self._bytes = b""
        """The begin of a character of byte tokens."""
        self.text = ""
        """All complete characters so far."""
        self.ends: list[int] = []
        """The length of `text` after each output token."""

    def feed(self, token_id: int) -> None:
        """Append the next output token."""
        if self._skip_special_tokens and token_id in self._tokenizer.special_token_ids:
            self._end_character()
        elif self._joins_special_tokens and self._is_joined(token_id):
            self._settle(self._tokenizer.added_tokens[token_id], [token_id])
        elif (byte := self._tokenizer.byte_values.get(token_id)) is not None:
            self._feed_byte(byte)
        else:
            self._feed_text(token_id)
        self.ends.append(len(self.text))

    def end_of(self, num_tokens: int) -> int:
        """Return the length of the text of the first `num_tokens` output tokens."""
        return self.ends[num_tokens - 1] if num_tokens else 0

    def flush(self) -> str:
        """Return the whole text when no more tokens come. Bytes that are no character are shown as "�"."""
        return self.text + self._pending_text() + self._shown_bytes()

    def _is_joined(self, token_id: int) -> bool:
        """Whether this token and the one before it are special."""
        was_special, self._is_last_special = self._is_last_special, token_id in self._tokenizer.added_tokens
        return was_special and self._is_last_special

    def _feed_byte(self, byte: bytes) -> None:
        """Append a byte of a character. It is decoded here, because the tokenizer decodes no byte of a run if one of them
        is invalid."""
        if self._pending or not self._num_shown:  # from now on, there is text in front of the next token
            self._settle(self._pending_text(), self._tokenizer.letter)
        self._bytes += byte
        text, num_decoded = codecs.utf_8_decode(self._bytes, "replace", False)
        self.text += text
        self._bytes = self._bytes[num_decoded:]

    def _feed_text(self, token_id: int) -> None:
        self.text += self._shown_bytes()
        self._bytes = b""
        self._pending.append(token_id)
        added = self._pending_text()
        if added and not added.endswith(_INCOMPLETE):
            self._settle(added, self._pending)
        elif added and len(self._pending) > _MAX_PENDING_TOKENS:
            self._settle_all_but_last(added)
        elif not added:  # as ids have that are not in the vocabulary
            self._pending = self._pending[-_NUM_KEPT_TOKENS:]

    def _end_character(self) -> None:
        """Settle what waits for the rest of a character: the next token does not have it."""
        added = self._pending_text() + self._shown_bytes()
        if added:
            self._bytes = b""
            self._settle(added, self._tokenizer.letter)

    def _settle(self, added: str, context: list[int]) -> None:
        self.text += added
        self._context, self._pending = context, []
        self._num_shown = len(self._decode(context))

    def _settle_all_but_last(self, added: str) -> None:
        """Settle all characters but the last one, which may be completed."""
        self.text += added[:-1]
        self._context, self._pending = self._tokenizer.letter, self._pending[-_NUM_KEPT_TOKENS:]
        self._num_shown = len(self._decode(self._context + self._pending)) - 1

    def _pending_text(self) -> str:
        return self._decode(self._context + self._pending)[self._num_shown :] if self._pending else ""

    def _shown_bytes(self) -> str:
        return self._bytes.decode(errors="replace")

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates, which a Python string can hold and UTF-8 can't."""
    return text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
