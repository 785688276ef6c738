"""Grammars that outputs have to follow: compile them, and keep for each sequence which tokens may come next.

llguidance does both. Its matcher depends on the tokens of an output alone, so a sequence that was resumed or preempted goes
on as before. Compiling and computing masks have threads of their own, which start with the first grammar.

Shapes: N rows of a step with a grammar, B = ceil(V / 32) * 4 bytes of a mask for V token ids.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from millrace.executor.wire.messages import NO_TOKEN

MAX_COMPILED = 256
MAX_LEXER_STATES = 50_000
"""Of one grammar, with 1 to 2 KiB of memory each."""
_MAX_THREADS = 8
_MAX_REASON_CHARS = 200


class GrammarState:
    """Owns the place of one sequence in its grammar. Used by the thread of the masks alone, except `failure`."""

    def __init__(self, matcher: Future[LLMatcher], allowed_token_ids: list[int] | None = None) -> None:
        self._matcher = matcher
        self._allowed_bits = None if allowed_token_ids is None else _bits(allowed_token_ids)
        self.failure: str | None = None
        """Why no token is allowed. Set with the mask of the step."""

    def consume(self, token_id: int) -> None:
        """Take a sampled token. One that is not allowed is an error of the next step; `NO_TOKEN` has no next step."""
        if token_id != NO_TOKEN:
            self._matcher.result().consume_token(token_id)

    def matcher(self) -> LLMatcher | None:
        """Wait until the grammar is compiled. None after an error."""
        matcher = self._matcher.result()
        if matcher.is_error() and self.failure is None:
            self.failure = _one_line(matcher.get_error())
        return matcher if self.failure is None else None

    @property
    def is_limited(self) -> bool:
        """Whether the request allows only some tokens."""
        return self._allowed_bits is not None

    def fail_without_token(self, mask: Tensor) -> None:
        """Set `failure` if this mask [B] allows no token, or none that the request allows."""
        if not mask.any():
            self.failure = self.failure or "no text goes on from here"
        elif self._allowed_bits is not None and not (mask[: len(self._allowed_bits)] & self._allowed_bits).any():
            self.failure = "the form goes on with none of allowed_token_ids"


class Grammars:
    """Owns the tokenizer of the grammars, the compiled ones, and the threads."""

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer], num_threads: int | None = None) -> None:
        """`num_threads` compute a mask; None: as many as this machine has cores, up to 8."""
        self._load_tokenizer = load_tokenizer
        self._num_threads = num_threads or min(_MAX_THREADS, os.cpu_count() or 1)
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._masking = ThreadPoolExecutor(1, "masks")
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        """By grammar, the one used last at the end."""

    def begin(self, grammar: str, output: list[int], allowed_token_ids: list[int] | None = None) -> GrammarState:
        """Return the state behind these tokens of the output. Does not wait for it. `allowed_token_ids`: None for all."""
        return GrammarState(self._compiling.submit(self._begin, grammar, output), allowed_token_ids)

    def masks(
        self, sampled: list[tuple[list[GrammarState], Callable[[], list[int]]]], states: list[GrammarState]
    ) -> Future[Tensor]:
        """Take the tokens that earlier steps have sampled, then compute the masks of the states: [N, B] uint8, with a bit
        for each token id, set if it is allowed. A function of `sampled` returns a token for each of its states."""
        return self._masking.submit(self._masks, sampled, states)

    def _begin(self, grammar: str, output: list[int]) -> LLMatcher:
        compiled = self._compiled.get(grammar)
        if compiled is None:
            limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
            compiled = self._compiled[grammar] = LLMatcher(self._tokenizer, grammar, limits=limits, log_level=0)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        matcher = compiled.deep_copy()
        matcher.consume_tokens(output)
        return matcher

    def _masks(
        self, sampled: list[tuple[list[GrammarState], Callable[[], list[int]]]], states: list[GrammarState]
    ) -> Tensor:
        for recorded, token_ids in sampled:
            for state, token_id in zip(recorded, token_ids(), strict=True):
                state.consume(token_id)
        matchers = [(matcher, row) for row, state in enumerate(states) if (matcher := state.matcher()) is not None]
        num_bytes = -(-self._tokenizer.vocab_size // 32) * 4
        masks = torch.zeros(len(states), num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, masks.data_ptr(), masks.shape[1], len(masks))
        for row in [row for _, row in matchers if states[row].matcher() is None]:  # the mask was too much work
            masks[row] = 0
        is_empty = (masks.amax(dim=1) == 0).tolist()
        for row, state in enumerate(states):
            if is_empty[row] or state.is_limited:
                state.fail_without_token(masks[row])
        return masks

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._load_tokenizer()

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(self._num_threads)


def load_tokenizer(path: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Return the tokenizer in this directory, for grammars. An output ends with one of `eos_token_ids`."""
    from transformers import PreTrainedTokenizerFast

    backend = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True).backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    ends = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
    return LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=ends)


def _bits(token_ids: list[int]) -> Tensor:
    """Return the begin of a mask [B] that allows these ids."""
    bits = bytearray(max(token_ids) // 8 + 1)
    for token_id in token_ids:
        bits[token_id // 8] |= 1 << token_id % 8
    return torch.frombuffer(bits, dtype=torch.uint8)


def _one_line(error: str) -> str:
    return " ".join(error.split())[:_MAX_REASON_CHARS]
