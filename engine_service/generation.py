"""One generation as a reader sees it: a sequence, its text, and the stop strings that end it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf

import msgspec

from millrace.engine_service.core.sequence import Sequence, StopReason
from millrace.engine_service.logprob_records import MAX_BEFORE, read_record
from millrace.engine_service.stop_strings import Found, find_stop
from millrace.engine_service.text import Detokenizer, Tokenizer
from millrace.executor.wire.messages import record_bytes
from millrace.results.logprobs import Entry, encode_tokens


class TextRules(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens become text."""

    stop: tuple[str, ...] = ()
    is_text_wanted: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the text by the request alone: no end tokens of the model."""
    include_stop: bool = False
    """Whether the text has the stop string or token that ends it."""


class Generation:
    """Owns the text of one sequence. Decodes token by token for stop strings and readers, otherwise once at the end."""

    def __init__(
        self,
        sequence: Sequence,
        rules: TextRules,
        tokenizer: Tokenizer | None,
        logprobs: SequenceOf[bytes] = (),
    ) -> None:
        """`logprobs`: the JSON of each output token of an earlier attempt, see `results.logprobs`, if it is wanted."""
        assert tokenizer is not None or not rules.is_text_wanted
        self.sequence = sequence
        self._rules = rules
        self._tokenizer = tokenizer
        self._logprobs = list(logprobs)
        """Log-probabilities of the first output tokens."""
        self._detokenizer: Detokenizer | None = None
        self._stop: Found | None = None
        """The stop string that has ended the generation."""
        self._final_text: str | None = None
        self.finish_reason: StopReason | None = sequence.finish_reason()
        self.scheduled_s: float | None = None
        """When the first step with it was made, in seconds since the epoch."""
        if rules.stop:
            sequence.is_followed = True
            self._start_decoding()

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.output_token_ids

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or stop token that has ended the generation, None if none has."""
        if self._stop is not None:
            return self._stop.string
        if self.finish_reason == "stop" and self.token_ids and self.token_ids[-1] in self._rules.stop_token_ids:
            return self.token_ids[-1]
        return None

    def advance(self, reason: StopReason | None) -> StopReason | None:
        """Process the new tokens of the sequence. `reason` is why they are the last, None if they are not.

        Returns the final reason: a stop string that the tokens complete has precedence over the limit that they reach.
        """
        self.finish_reason = reason
        if self._detokenizer is not None:
            self._decode_new(self._detokenizer)
        return self.finish_reason

    def num_settled(self) -> int:
        """Return how many tokens have final text: no stop string that is left out can begin in it any more."""
        if not self._rules.is_text_wanted:
            return len(self.token_ids)
        detokenizer = self._start_decoding()
        held_back = max(map(len, self._rules.stop)) - 1 if self._rules.stop and not self._rules.include_stop else 0
        return bisect_right(detokenizer.ends, len(detokenizer.text) - held_back)

    def text_between(self, start: int, end: int) -> str:
        """Return what the settled output tokens [start, end) add to the text."""
        if not self._rules.is_text_wanted or end == 0:
            return ""
        detokenizer = self._start_decoding()
        return detokenizer.text[detokenizer.end_of(start) : detokenizer.end_of(end)]

    def final_text_after(self, start: int) -> str:
        """Return the text of the finished generation from output token `start` on."""
        if start == 0:
            return self.final_text()
        return self.final_text()[self._start_decoding().end_of(start) :] if self._rules.is_text_wanted else ""

    def final_text(self) -> str:
        """Return the text of the finished generation, up to the stop string or token that ended it."""
        if self._final_text is None:
            self._final_text = self._decode_whole() if self._rules.is_text_wanted else ""
        return self._final_text

    def marked_text_between(self, start: int, end: int, marks: Mapping[int, str]) -> str:
        """Return what `text_between` does, with the texts of these special tokens, also where the text leaves them out."""
        if not self._leaves_out_any(marks, start, end):
            return self.text_between(start, end)
        return self._marked(self._start_decoding().text, start, end, marks)

    def marked_final_text_after(self, start: int, marks: Mapping[int, str]) -> str:
        """Return what `final_text_after` does, with the texts of these special tokens, also where it leaves them out."""
        num_shown = len(self.token_ids) - self._leaves_out_last()
        if not self._leaves_out_any(marks, start, num_shown):
            return self.final_text_after(start)
        text = self.final_text()
        if start == 0 and self._detokenizer is None:
            assert self._tokenizer is not None
            hidden = self._tokenizer.special_token_ids - marks.keys()
            shown = [each for each in self.token_ids[:num_shown] if each not in hidden]
            marked = self._tokenizer.decode_output(self.sequence.prompt_token_ids, shown, skip_special_tokens=False)
            # Not so if the decoder puts spaces around marks, or a hidden token is between the bytes of a character.
            if _without(marked, marks.values()) == text:
                return marked
        return self._marked(text, start, num_shown, marks)

    def _leaves_out_any(self, marks: Mapping[int, str], start: int, end: int) -> bool:
        is_hidden = self._rules.is_text_wanted and self._rules.skip_special_tokens
        return is_hidden and not marks.keys().isdisjoint(self.token_ids[start:end])

    def _marked(self, text: str, start: int, end: int, marks: Mapping[int, str]) -> str:
        """Return the part of `text` that belongs to the output tokens [start, end), with the marks among them."""
        detokenizer = self._start_decoding()
        ends = detokenizer.ends
        pieces, at = [], detokenizer.end_of(start)
        for index in range(start, min(end, len(ends))):
            mark = marks.get(self.token_ids[index])
            if mark is not None and ends[index] <= len(text):  # not behind the stop string that has ended the text
                pieces += [text[at : ends[index]], mark]
                at = ends[index]
        pieces.append(text[at:] if end >= len(ends) else text[at : ends[end - 1]])
        return "".join(pieces)

    # --- log-probabilities ---

    def logprobs_between(self, start: int, end: int) -> list[bytes]:
        """Return the JSON of each of the output tokens [start, end), if wanted. For one thread, not the engine loop."""
        self._logprobs += encode_tokens(map(self.entries, range(len(self._logprobs), end)))
        return self._logprobs[start:end]

    def entries(self, index: int) -> list[Entry]:
        """Return the log-probabilities of an output token that was sampled here."""
        sequence = self.sequence
        assert sequence.logprobs is not None
        before = self.token_ids[max(0, index - MAX_BEFORE) : index]
        if index < MAX_BEFORE:
            before = (sequence.prompt_token_ids[-MAX_BEFORE:] + before)[-MAX_BEFORE:]
        record = sequence.logprobs[index - sequence.num_resumed]
        return read_record(record, before, self.token_ids[index], self._tokenizer_of_entries)

    @property
    def has_prompt_entries(self) -> bool:
        """Whether the log-probabilities of the prompt are wanted, and computed by now."""
        return self.sequence.prompt_logprobs is not None and not self.sequence.must_score_prompt

    def prompt_entries(self) -> Iterator[list[Entry]]:
        """Return the log-probabilities of the prompt's tokens but the first, if `has_prompt_entries`."""
        sequence = self.sequence
        assert sequence.prompt_logprobs is not None
        size = record_bytes(sequence.sampling.prompt_logprobs or 0)
        prompt, records = sequence.prompt_token_ids, bytes(sequence.prompt_logprobs)
        return (
            read_record(
                records[(at - 1) * size : at * size],
                prompt[max(0, at - MAX_BEFORE) : at],
                prompt[at],
                self._tokenizer_of_entries,
            )
            for at in range(1, len(prompt))
        )

    @property
    def _tokenizer_of_entries(self) -> Tokenizer | None:
        return self._tokenizer if self._rules.is_text_wanted else None

    def _decode_whole(self) -> str:
        if self._stop is not None:
            assert self._detokenizer is not None
            end = self._stop.begin + (len(self._stop.string) if self._rules.include_stop else 0)
            return self._detokenizer.text[:end]
        output = self.token_ids
        if self._leaves_out_last():
            output = output[:-1]
        if not self._rules.spaces_between_special_tokens:
            self._start_decoding()  # only token by token is it known where they follow one another
        if self._detokenizer is not None and len(self._detokenizer.ends) == len(output):
            return self._detokenizer.flush()
        assert self._tokenizer is not None
        prompt, skip = self.sequence.prompt_token_ids, self._rules.skip_special_tokens
        return self._tokenizer.decode_output(prompt, output, skip_special_tokens=skip)

    def _leaves_out_last(self) -> bool:
        """Whether the text is without that of the last token, a stop token."""
        return self.finish_reason == "stop" and self._stop is None and not self._rules.include_stop

    def _start_decoding(self) -> Detokenizer:
        """Decode all tokens so far, unless that has been done, and from now on each new token."""
        if self._detokenizer is None:
            assert self._tokenizer is not None
            self._detokenizer = Detokenizer(
                self._tokenizer,
                self.sequence.prompt_token_ids,
                skip_special_tokens=self._rules.skip_special_tokens,
                spaces_between_special_tokens=self._rules.spaces_between_special_tokens,
            )
            self._decode_new(self._detokenizer)
        return self._detokenizer

    def _decode_new(self, detokenizer: Detokenizer) -> None:
        output = self.token_ids
        while len(detokenizer.ends) < len(output):
            if len(detokenizer.ends) == len(output) - 1 and self._leaves_out_last():
                return  # the token that ends a sequence has no text
            self._feed(detokenizer, output[len(detokenizer.ends)])
            if self._stop is not None:
                del output[len(detokenizer.ends) :]
                return

    def _feed(self, detokenizer: Detokenizer, token_id: int) -> None:
        start = len(detokenizer.text)
        detokenizer.feed(token_id)
        found = find_stop(self._rules.stop, detokenizer.text, start)
        # A stop string counts if it ends behind the first `min_tokens` tokens, also if it begins in them, as with vLLM.
        if found is not None and len(detokenizer.ends) > self.sequence.stop_rules.min_tokens:
            self._stop, self.finish_reason = found, "stop"


def _without(text: str, marks: Iterable[str]) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text
