"""Grammars for structured outputs, checked in a process of their own before a job runs."""

from __future__ import annotations

import hashlib
import threading

import msgspec

from millrace.engine_service import grammar_process
from millrace.engine_service.child_process import ChildProcess
from millrace.engine_service.grammar_process import LIMIT_S, MAX_MEMORY_BYTES, Checked, Vocabulary
from millrace.engine_service.text import Tokenizer
from millrace.producer import InvalidRequest, StructuredOutputs

_MAX_KEPT = 256
_ANSWER_S = 60.0
"""How long the process may take for its start and an answer, on a busy machine."""

_decode = msgspec.json.Decoder(Checked).decode


class Grammars:
    """Owns the process that checks grammars, and the answers to the last ones. Safe to use from several threads.

    The first structured output starts the process. One that takes too much is replaced.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        """`eos_token_ids`: an output ends with one of them."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None
        self._checked: dict[bytes, Checked] = {}
        """By digest, the oldest first."""

    def is_known(self, wanted: StructuredOutputs) -> bool:
        """Whether `grammar` returns at once."""
        return _digest(wanted) in self._checked

    def grammar(self, wanted: StructuredOutputs) -> str:
        """Return llguidance's grammar. Raises `InvalidRequest` if there is none."""
        digest = _digest(wanted)
        checked = self._checked.get(digest)  # without the lock: another thread may check for seconds
        if checked is None:
            with self._lock:
                checked = self._checked.get(digest) or self._check(wanted)
                self._checked[digest] = checked
                if len(self._checked) > _MAX_KEPT:
                    del self._checked[next(iter(self._checked))]
        if checked.error:
            message = checked.error.removeprefix(f"{wanted.form}: ") if wanted.given_as else checked.error
            raise InvalidRequest(wanted.field, message)
        return checked.grammar

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end_process()

    def _check(self, wanted: StructuredOutputs) -> Checked:
        if self._process is None or not self._process.is_alive:
            self._end_process()
            vocabulary = Vocabulary(self._tokenizer.as_json(), self._vocab_size, self._eos_token_ids)
            self._process = ChildProcess(grammar_process.__name__, vocabulary, _ANSWER_S)
        try:
            answer = self._process.ask(wanted, _ANSWER_S)
        except BaseException:
            self._end_process()
            raise
        if answer is not None:
            return _decode(answer)
        self._end_process()
        limits = f"{LIMIT_S:g} s or {MAX_MEMORY_BYTES // 2**20} MiB of memory"
        return Checked(error=f"{wanted.form}: takes more than {limits} to compile; make it simpler")

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def _digest(wanted: StructuredOutputs) -> bytes:
    form = wanted.form, getattr(wanted, wanted.form)
    return hashlib.blake2b(msgspec.msgpack.encode(form), digest_size=16).digest()
