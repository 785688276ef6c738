"""Sampling parameters: how tokens are chosen and when a generation ends. Names and rules are those of vLLM's class."""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any

import msgspec

from millrace.producer.checks import (
    MAX_COUNT,
    MAX_TOKEN_ID,
    NamesUnknown,
    boolean,
    check_fields,
    field_checks,
    integer,
    mapping,
    number,
    optional,
    texts,
    token_ids,
)
from millrace.producer.errors import InvalidRequest
from millrace.producer.structured import StructuredOutputs, structured_outputs
from millrace.results.errors import shown

logger = logging.getLogger("millrace.client")

MIN_TEMPERATURE = 1e-2
"""Lower temperatures than this are raised to it, but not 0: a division by them would overflow."""
MAX_CANDIDATES = 64
MAX_STRINGS = 128
MAX_CHARS = 4096
"""Limits of the number of stop strings, or bad words, of a request, and of their total length. The cost of a step grows
with them."""
MAX_IDS = 1024
"""Largest number of entries in logit_bias and in allowed_token_ids."""
MAX_BIAS = 1e8
"""Far above any logit, and far below the logit of a token that the thinking budget forces."""


class SamplingParams(msgspec.Struct, metaclass=NamesUnknown, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """Checked when it is created and when a field is set. Raises InvalidRequest, a ValueError, which names the field."""

    max_tokens: Annotated[int | None, optional(integer(1, MAX_COUNT))] = 16
    """Maximum number of tokens to generate. None: up to the length of the context."""
    min_tokens: Annotated[int, integer(0, MAX_COUNT)] = 0
    """Minimum number of tokens to generate: until then no end-of-sequence or stop token is sampled."""
    temperature: Annotated[float, number(0.0, 2.0)] = 1.0
    """Divides the logits. 0: greedy sampling."""
    top_p: Annotated[float, number(0.0, 1.0, above_low=True)] = 1.0
    """Sample from the smallest set of likeliest tokens whose probabilities reach this sum, after min_p and top_k. 1: off."""
    top_k: Annotated[int, integer(-1, MAX_TOKEN_ID)] = 0
    """Sample from this number of most likely tokens. 0 or -1: off."""
    min_p: Annotated[float, number(0.0, 1.0)] = 0.0
    """Exclude tokens whose probability is below this share of the highest probability, after temperature. 0: off."""
    seed: Annotated[int | None, optional(integer(-(2**63), 2**63 - 1))] = None
    """The same seed gives the same text. None or -1: a random seed, chosen at submission and kept in the record."""
    stop: Annotated[str | list[str] | None, optional(_stop)] = None
    """Strings that end the text; the text stops before them. A list after construction."""
    stop_token_ids: Annotated[list[int], token_ids] = []
    """Token ids that end the text, in addition to the model's own end tokens."""
    ignore_eos: Annotated[bool, boolean] = False
    """Continue after an end-of-sequence token."""
    detokenize: Annotated[bool, boolean] = True
    """False: only token ids, no text."""
    skip_special_tokens: Annotated[bool, boolean] = True
    """False: the text contains special tokens."""
    spaces_between_special_tokens: Annotated[bool, boolean] = True
    """False: no space between adjacent special tokens. Has an effect only if skip_special_tokens is false."""
    include_stop_str_in_output: Annotated[bool, boolean] = False
    """True: the text keeps the stop string, or the text of the stop token, that ends it."""
    truncate_prompt_tokens: Annotated[int | None, optional(_truncation)] = None
    """Keep at most this number of the last prompt tokens. -1: as many as fit into the context. The limits
    for the size of a request count the whole prompt."""

    presence_penalty: Annotated[float, number(-2.0, 2.0)] = 0.0
    """Subtracted from the logit of each token that occurs in the output."""
    frequency_penalty: Annotated[float, number(-2.0, 2.0)] = 0.0
    """Subtracted from the logit of a token once for each time that it occurs in the output."""
    repetition_penalty: Annotated[float, number(1e-9, 1e9)] = 1.0
    """For each token that occurs in the prompt or the output: divides a positive logit, multiplies a negative one."""
    logit_bias: Annotated[dict[Any, float] | None, optional(_logit_bias)] = None
    """Numbers to add to the logits, by token id. The keys are strings after construction."""
    allowed_token_ids: Annotated[list[int] | None, optional(_few_ids)] = None
    """Only these tokens are generated."""
    bad_words: Annotated[list[str] | None, optional(_bad_words)] = None
    """Words that are not generated: the last token of a word is excluded after the other tokens of the word; with tokenizers
    that put a space in front of a text, as SentencePiece does, only at the beginning of a text and behind a space. For
    languages without spaces use `logit_bias`."""
    thinking_token_budget: Annotated[int | None, optional(integer(-1, MAX_COUNT))] = None
    """Maximum number of tokens between the model's thinking markers, such as <think> and </think>. None or -1: no limit."""

    n: Annotated[int, integer(1, MAX_CANDIDATES)] = 1
    """Number of texts, the candidates. Each has its own random numbers, so it does not depend on n."""

    logprobs: Annotated[int | None, optional(integer(-1, MAX_COUNT))] = None
    """Return for each output token its log-probability, and those of this number of most likely tokens. 0: only its own.
    -1: those of the whole vocabulary. None: none. At most the engine's max_logprobs."""
    prompt_logprobs: Annotated[int | None, optional(integer(-1, MAX_COUNT))] = None
    """The same for each prompt token except the first one. The prompt is then computed even if it is cached."""

    structured_outputs: StructuredOutputs | None = None
    """The form of the output, such as a JSON schema. In `submit` a dict with one of its fields works too."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list; empty without stop strings."""
        return self.stop if isinstance(self.stop, list) else []

    def __post_init__(self) -> None:
        if type(self.stop) is str:
            _set(self, "stop", [self.stop])
        elif type(self.stop) is list and not self.stop:
            _set(self, "stop", None)
        if self.structured_outputs is not None:
            _set(self, "structured_outputs", structured_outputs(self.structured_outputs))
        for name, kind in (("logit_bias", dict), ("bad_words", list)):
            if type(value := getattr(self, name)) is kind and not value:
                _set(self, name, None)
        check_fields(self, _CHECKS)
        self._check_together()

    def __setattr__(self, name: str, value: Any) -> None:
        checked = msgspec.structs.replace(self, **{name: value})
        for field in self.__struct_fields__:
            _set(self, field, getattr(checked, field))

    def _check_together(self) -> None:
        for name in ("seed", "thinking_token_budget"):
            if getattr(self, name) == -1:
                _set(self, name, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"is {self.min_tokens}, more than max_tokens, {self.max_tokens}")
        if self.n > 1 and self.is_greedy:
            raise InvalidRequest(
                "n", f"is {self.n}, but at temperature 0 all texts are the same; raise the temperature, or set n to 1"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop", "needs the text; set detokenize to true or leave stop out")
        if 0 < self.temperature < MIN_TEMPERATURE:
            logger.warning("temperature %g is raised to %g; use 0 for greedy", self.temperature, MIN_TEMPERATURE)
            _set(self, "temperature", MIN_TEMPERATURE)
        for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
            if (given := getattr(self, name)) and len(given) > 1:
                _set(self, name, list(dict.fromkeys(given)))
        if self.logit_bias is not None:
            _set(self, "logit_bias", {str(token_id): float(bias) for token_id, bias in self.logit_bias.items()})


_set = msgspec.structs.force_setattr


def _stop(value: Any) -> str | None:
    """A string has become a list by now."""
    return _few_strings(value) if type(value) is list else f"must be a string or a list of strings, got {shown(value)}"


def _few_strings(value: Any) -> str | None:
    if type(value) is list and len(value) > MAX_STRINGS:
        return f"has {len(value)} strings, at most {MAX_STRINGS} are taken"
    if wrong := texts(value):
        return wrong
    num_chars = sum(map(len, value))
    return None if num_chars <= MAX_CHARS else f"has {num_chars} characters, at most {MAX_CHARS} are taken"


def _bad_words(value: Any) -> str | None:
    if wrong := _few_strings(value):
        return wrong
    blank = next((i for i, word in enumerate(value) if not word.strip()), None)
    return None if blank is None else f"item {blank} is blank, got {shown(value[blank])}"


def _few_ids(value: Any) -> str | None:
    if type(value) is list and not 0 < len(value) <= MAX_IDS:
        return f"has {len(value)} token ids, give 1 to {MAX_IDS}"
    return token_ids(value)


def _logit_bias(value: Any) -> str | None:
    if wrong := mapping(value):
        return wrong
    if len(value) > MAX_IDS:
        return f"has {len(value)} token ids, at most {MAX_IDS} are taken"
    for key, bias in value.items():
        if not _is_token_id(key):
            return f"must have token ids from 0 to {MAX_TOKEN_ID} as keys, has {shown(key)}"
        if wrong := _BIAS(bias):
            return f"of token id {key} {wrong}"
    return None if len(set(map(str, value))) == len(value) else "has a token id twice, as a number and as a string"


def _is_token_id(key: Any) -> bool:
    if type(key) is str:
        return re.fullmatch("0|[1-9][0-9]{0,9}", key) is not None and int(key) <= MAX_TOKEN_ID
    return type(key) is int and 0 <= key <= MAX_TOKEN_ID


_BIAS = number(-MAX_BIAS, MAX_BIAS)


def _truncation(value: Any) -> str | None:
    if type(value) is int and (value == -1 or 1 <= value <= MAX_COUNT):
        return None
    return f"must be -1 or an integer from 1 to {MAX_COUNT}, got {shown(value)}"


_CHECKS = field_checks(SamplingParams)
