"""Grammars that outputs have to follow: compile them, and keep for each sequence which tokens may come next.

llguidance does both. Its matcher depends on the tokens of an output alone, so a sequence that was resumed or preempted goes
on as before. Compiling and computing masks have threads of their own, which start with the first grammar
and release the GIL.

Shapes: N rows of a step with a grammar, B = ceil(V / 32) * 4 bytes of a mask for V token ids.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial

import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from millrace.executor.wire.messages import NO_TOKEN, LogitsSettings, NewSequence
from millrace.worker.cpu_threads import within_quota

MAX_COMPILED = 256
MAX_LEXER_STATES = 50_000
"""Limit for one grammar. A state takes 1 to 2 KiB of memory."""
_MIN_TOKENS_BETWEEN = 8
"""A sequence that uses up its lexer within fewer tokens fails: to compile again for it would slow down all others."""
SLOW_S = 0.02
"""If the masks of a step take longer, those of the next step are timed. The time of a core that a sequence takes beyond it,
for a token and its mask, adds up. One such token alone makes a step slow, so the sum does not depend on other sequences."""
MAX_EXCESS_S = 1.0
"""A sequence with a larger sum fails: all sequences of a step wait for its masks."""
STACK_BYTES = 32 * 1024**2
"""Stack of the threads. Twice that of the process in which the engine checks grammars: what passes there passes here."""
_MAX_THREADS = 8
_MAX_REASON_CHARS = 200
_NO_DETAILS = "<non-verbose/>"
_USED_UP = "lexer error: too many "
"""The limit of states or of expressions is reached. Each token of any sequence may add some."""
_LIMITS = ("LexerTooComplex", "ParserTooComplex")
_TOO_MUCH_WORK = "the form takes too much work here; make it simpler"


class CompiledGrammar:
    """Owns a matcher that has consumed no token. Its copies share its lexer, and with it the limit of the lexer's states."""

    def __init__(self, compiled: Future[LLMatcher], compile_again: Callable[[], LLMatcher]) -> None:
        self._compiled = compiled
        self._compile_again = compile_again

    @cached_property
    def original(self) -> LLMatcher:
        """Wait until the grammar is compiled."""
        return self._compiled.result()

    def replace(self, used_up: LLMatcher) -> None:
        """Compile the grammar again, unless that has been done for another sequence."""
        if self.original is used_up:
            self.original = self._compile_again()


class GrammarState:
    """Owns the place of one sequence in its grammar. Used by one thread of the masks at a time, except `reason`."""

    def __init__(self, compiled: CompiledGrammar, new: NewSequence) -> None:
        self._compiled = compiled
        self._output = new.token_ids[new.num_prompt_tokens :]
        """All tokens that the matcher has consumed, or will consume when it is made."""
        self._may_renew_at = 0
        """The grammar is compiled again for a used-up lexer only if the output has at least this number of tokens."""
        settings = new.sampling.processors or LogitsSettings()
        self._allowed_bits = None if settings.allowed_token_ids is None else _bits(settings.allowed_token_ids)
        self._bad_bits = _bits([word[-1] for word in settings.bad_words]) if settings.bad_words else None
        self._has_failed = False
        self.consumed_s = 0.0
        """Time of a core for the last token."""
        self._excess_s = 0.0
        """The sum of what tokens have taken beyond `SLOW_S`."""
        self.takes_too_much = False
        """Whether the sequence fails because its masks take too long. Not all ranks may find this, so all of them draw its
        token, and the rank that returns the tokens leaves it out."""
        self.reason: str | None = None
        """Why the mask of the step allows no token, if it allows none."""

    def consume(self, token_id: int) -> None:
        """Consume a sampled token. The next step reports one that is not allowed. After `NO_TOKEN` there is no next step."""
        if token_id != NO_TOKEN:
            began_s = time.thread_time()
            self._matcher.consume_token(token_id)
            self._output.append(token_id)
            self.consumed_s = time.thread_time() - began_s

    def matcher(self) -> LLMatcher | None:
        """Wait until the grammar is compiled. None after an error."""
        while not self._has_failed and self._matcher.is_error():
            error = self._error()
            is_used_up = _USED_UP in error
            if is_used_up and len(self._output) >= self._may_renew_at:
                self._may_renew_at = len(self._output) + _MIN_TOKENS_BETWEEN
                self._compiled.replace(self._original)
                del self._matcher
            else:
                is_limit = is_used_up or self._matcher.stop_reason() in _LIMITS
                self._has_failed, self.reason = True, _TOO_MUCH_WORK if is_limit else _one_line(error)
        return None if self._has_failed else self._matcher

    def fill_and_count(self, matcher: LLMatcher, mask: Tensor) -> None:
        """Fill in the mask [B], and count the time of the token and the mask."""
        began_s = time.thread_time()
        matcher.unsafe_compute_mask_ptr(mask.data_ptr(), len(mask))
        self._excess_s += max(0.0, self.consumed_s + time.thread_time() - began_s - SLOW_S)
        if self._excess_s > MAX_EXCESS_S:
            self.takes_too_much = True

    @property
    def failure(self) -> str | None:
        """Why the row has no token, if it has none."""
        return _TOO_MUCH_WORK if self.takes_too_much else self.reason

    def _error(self) -> str:
        # When a token uses up the lexer, the first error is that the token does not fit. A new copy gives the reason.
        again = self._original.deep_copy()
        again.consume_tokens(self._output)
        return again.get_error() or self._matcher.get_error()

    @cached_property
    def _matcher(self) -> LLMatcher:
        self._original = self._compiled.original
        matcher = self._original.deep_copy()
        matcher.consume_tokens(self._output)
        return matcher

    @property
    def is_limited(self) -> bool:
        """Whether the request has other fields that exclude tokens."""
        return self._allowed_bits is not None or self._bad_bits is not None

    def explain(self, mask: Tensor) -> None:
        """Set `reason` if this mask [B] allows no token, or other fields of the request exclude all that it allows."""
        if not mask.any():
            self.reason = self.reason or "no text of the form continues the output"
            return
        self.reason, left = None, mask.clone()
        if (allowed := self._allowed_bits) is not None:
            left = left[: len(allowed)] & allowed
            if not left.any():
                self.reason = "allowed_token_ids excludes every token that continues the form"
                return
        if (bad := self._bad_bits) is not None:
            left[: len(bad)] &= ~bad[: len(left)]
            if not left.any():
                self.reason = "bad_words excludes every token that continues the form"


class Grammars:
    """Owns the tokenizer of the grammars, the compiled ones, and the threads."""

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer], num_threads: int | None = None) -> None:
        """`num_threads` compute a mask; None: as many as this machine has cores and a CPU quota allows, up to 8."""
        self._load_tokenizer = load_tokenizer
        self._num_threads = num_threads or within_quota(min(_MAX_THREADS, os.cpu_count() or 1))
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        """By grammar, the one used last at the end."""
        self._are_slow = False
        """Whether the last masks took long."""
        self.last_compiled = 0
        """The number of the grammar that was announced and compiled last."""

    def announce(self, number: int, grammar: str) -> None:
        """Begin to compile a grammar. Sets `last_compiled` when that is done, or has failed. Grammar "": nothing to do."""
        if grammar:
            self._compile(grammar)
        self._compiling.submit(self._set_compiled, number)

    def begin(self, new: NewSequence) -> GrammarState:
        """Return the state behind the output of a sequence with a grammar. Does not wait for it."""
        return GrammarState(self._compile(new.sampling.grammar), new)

    def masks(
        self, sampled: list[tuple[list[GrammarState], Callable[[], list[int]]]], states: list[GrammarState]
    ) -> Future[Tensor]:
        """Take the tokens that earlier steps have sampled, then compute the masks of the states: [N, B] uint8, with a bit
        for each token id, set if it is allowed. A function of `sampled` returns a token for each of its states."""
        return self._masking.submit(self._masks, sampled, states)

    def _compile(self, grammar: str) -> CompiledGrammar:
        compiled = self._compiled.get(grammar)
        if compiled is None:
            make = partial(self._make_matcher, grammar)
            compiled = self._compiled[grammar] = CompiledGrammar(self._compiling.submit(make), make)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled

    def _make_matcher(self, grammar: str) -> LLMatcher:
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar, limits=limits, log_level=0)
        matcher.compute_bitmask()  # copies have it then
        return matcher

    def _set_compiled(self, number: int) -> None:
        self.last_compiled = number

    def _masks(
        self, sampled: list[tuple[list[GrammarState], Callable[[], list[int]]]], states: list[GrammarState]
    ) -> Tensor:
        for recorded, token_ids in sampled:
            for state, token_id in zip(recorded, token_ids(), strict=True):
                state.consume(token_id)
        matchers = [(matcher, row) for row, state in enumerate(states) if (matcher := state.matcher()) is not None]
        num_bytes = -(-self._tokenizer.vocab_size // 32) * 4
        masks = torch.zeros(
            len(states), num_bytes, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_initialized()
        )
        while matchers:
            began_s = time.monotonic()
            if self._are_slow:
                self._fill_and_count(matchers, states, masks)
            else:
                self._executor.unsafe_compute_mask_ptr(matchers, masks.data_ptr(), masks.shape[1], len(masks))
            took_s = time.monotonic() - began_s + sum(state.consumed_s for state in states)
            self._are_slow = took_s > SLOW_S
            failed = [
                row for matcher, row in matchers if matcher.is_error()
            ]  # a limit was exceeded while the mask was computed
            masks[failed] = 0
            matchers = [(matcher, row) for row in failed if (matcher := states[row].matcher()) is not None]
        is_empty = (masks.amax(dim=1) == 0).tolist()
        for row, state in enumerate(states):
            if is_empty[row] or state.is_limited:
                state.explain(masks[row])
        return masks

    def _fill_and_count(self, matchers: list[tuple[LLMatcher, int]], states: list[GrammarState], masks: Tensor) -> None:
        def fill_some(first: int) -> None:
            for matcher, row in matchers[first :: self._num_threads]:
                states[row].fill_and_count(matcher, masks[row])

        list(self._timing.map(fill_some, range(self._num_threads)))

    @cached_property
    def _compiling(self) -> ThreadPoolExecutor:
        return _threads("grammars", 1)

    @cached_property
    def _masking(self) -> ThreadPoolExecutor:
        return _threads("masks", 1)

    @cached_property
    def _timing(self) -> ThreadPoolExecutor:
        return _threads("timed masks", self._num_threads)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._load_tokenizer()

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(self._num_threads)


def _threads(name: str, num_threads: int) -> ThreadPoolExecutor:
    before = threading.stack_size(STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(num_threads, name)
        all_wait = threading.Barrier(num_threads)
        for _ in range(num_threads):
            pool.submit(all_wait.wait)  # starts a thread, since the others wait
    finally:
        threading.stack_size(before)
    return pool


def load_tokenizer(path: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Return the tokenizer in this directory, for grammars. An output ends with one of `eos_token_ids`."""
    from transformers import PreTrainedTokenizerFast

    backend = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True).backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    ends = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
    return LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=ends)


def _bits(token_ids: list[int]) -> Tensor:
    """Return the first bytes of a mask [B] that allows these ids."""
    bits = bytearray(max(token_ids) // 8 + 1)
    for token_id in token_ids:
        bits[token_id // 8] |= 1 << token_id % 8
    return torch.frombuffer(bits, dtype=torch.uint8)


def _one_line(error: str) -> str:
    return " ".join(error.removesuffix(_NO_DETAILS).split())[:_MAX_REASON_CHARS]
