"""Sampling parameters: how tokens are chosen and when a generation ends. Names and rules are those of vLLM's class."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from millrace.producer.checks import (
    MAX_COUNT,
    MAX_TOKEN_ID,
    Check,
    boolean,
    check_fields,
    integer,
    mapping,
    number,
    only_default,
    optional,
    texts,
    token_ids,
)
from millrace.producer.errors import InvalidRequest

log = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 1e-2
"""Lower temperatures that are not greedy are raised to this, because a division by them would overflow."""
MAX_CANDIDATES = 64
MAX_STOP_STRINGS = 128
MAX_STOP_CHARS = 4096
"""In all stop strings of a request together. What is not shown yet, and what a search costs, grows with them."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Checked when it is created and when a field is set. Raises InvalidRequest, a ValueError, which names the field."""

    max_tokens: int | None = 16
    """Maximum number of tokens to generate. None: as many as the context holds."""
    min_tokens: int = 0
    """Number of tokens before which end-of-sequence and stop tokens are not sampled."""
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    seed: int | None = None
    """The same seed gives the same text. None or -1: a random seed, chosen at submission and kept in the record."""
    stop: str | list[str] | None = None
    """Strings before which the text ends. A list after construction."""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    detokenize: bool = True
    """False: only token ids, no text."""
    skip_special_tokens: bool = True

    n: int = 1
    """Number of texts, the candidates. Each has random numbers of its own: it does not depend on how many there are."""

    logprobs: int | None = None
    """For each output token its log-probability, and those of this many most likely tokens. 0: only its own. -1: all
    tokens of the vocabulary. None: none. At most the engine's max_logprobs."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first. The prompt is computed even where it is cached."""

    # Known and checked, but not supported yet: any other value than the default is refused.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    spaces_between_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list; empty without stop strings."""
        return self.stop if isinstance(self.stop, list) else []

    def __post_init__(self) -> None:
        if type(self.stop) is str:
            _set(self, "stop", [self.stop])
        elif type(self.stop) is list and not self.stop:
            _set(self, "stop", None)
        if self.stop_token_ids is None:
            _set(self, "stop_token_ids", [])
        check_fields(self, _CHECKS)
        self._check_together()

    def __setattr__(self, name: str, value: Any) -> None:
        checked = msgspec.structs.replace(self, **{name: value})
        for field in self.__struct_fields__:
            _set(self, field, getattr(checked, field))

    def _check_together(self) -> None:
        if self.seed == -1:
            _set(self, "seed", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"is {self.min_tokens}, more than max_tokens, {self.max_tokens}")
        if self.n > 1 and self.is_greedy:
            raise InvalidRequest(
                "n", f"is {self.n}, but at temperature 0 all texts are the same; raise it, or set n to 1"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop", "needs the text; set detokenize to true or leave stop out")
        if GREEDY_BELOW <= self.temperature < MIN_TEMPERATURE:
            log.warning("temperature %g is raised to %g; use 0 for greedy", self.temperature, MIN_TEMPERATURE)
            _set(self, "temperature", MIN_TEMPERATURE)
        if len(self.stop_token_ids) > 1:
            _set(self, "stop_token_ids", list(dict.fromkeys(self.stop_token_ids)))


_set = msgspec.structs.force_setattr


def _stop_strings(value: Any) -> str | None:
    if type(value) is list and len(value) > MAX_STOP_STRINGS:
        return f"has {len(value)} strings, at most {MAX_STOP_STRINGS} are taken"
    if wrong := texts(value):
        return wrong
    num_chars = sum(map(len, value))
    return None if num_chars <= MAX_STOP_CHARS else f"has {num_chars} characters, at most {MAX_STOP_CHARS} are taken"


_RULES: dict[str, Check] = {
    "max_tokens": optional(integer(1, MAX_COUNT)),
    "min_tokens": integer(0, MAX_COUNT),
    "temperature": number(0.0, 2.0),
    "top_p": number(0.0, 1.0, above_low=True),
    "top_k": integer(-1, MAX_TOKEN_ID),
    "min_p": number(0.0, 1.0),
    "seed": optional(integer(-(2**63), 2**63 - 1)),
    "stop": optional(_stop_strings),
    "stop_token_ids": token_ids,
    "ignore_eos": boolean,
    "detokenize": boolean,
    "skip_special_tokens": boolean,
    "n": integer(1, MAX_CANDIDATES),
    "presence_penalty": number(-2.0, 2.0),
    "frequency_penalty": number(-2.0, 2.0),
    "repetition_penalty": number(0.0, float("inf"), above_low=True),
    "logprobs": optional(integer(-1, MAX_COUNT)),
    "prompt_logprobs": optional(integer(-1, MAX_COUNT)),
    "include_stop_str_in_output": boolean,
    "spaces_between_special_tokens": boolean,
    "logit_bias": optional(mapping),
    "allowed_token_ids": optional(token_ids),
    "bad_words": optional(texts),
    "structured_outputs": optional(mapping),
    "thinking_token_budget": optional(integer(0, MAX_COUNT)),
}

_NOT_YET = SamplingParams.__struct_fields__[SamplingParams.__struct_fields__.index("presence_penalty") :]


def _check_of(field: msgspec.structs.FieldInfo) -> Check:
    rule = _RULES[field.name]
    return only_default(rule, field.default) if field.name in _NOT_YET else rule


_CHECKS = [(field.name, field.default, _check_of(field)) for field in msgspec.structs.fields(SamplingParams)]
