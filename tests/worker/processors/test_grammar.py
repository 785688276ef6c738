"""Masks of grammars: with real tokenizers, greedy and random, beside free rows, and from any token on."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event

import msgspec
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from millrace.executor.wire.messages import NO_TOKEN, NewSequence, RowSampling, SeqId
from millrace.worker.grammars import Grammars, load_tokenizer
from millrace.worker.kernels.library import find_kernels
from millrace.worker.linear.packed import RowMasks
from millrace.worker.sampler import sample
from millrace.worker.sampling_rows import SamplingRows, SamplingTable
from tests.processes import wait_until
from tests.worker.driver import Driver, start_worker
from tests.worker.models import make_model

EOS = 0
REGEX = '\\{"(é|🌍|b)[a-c"]{2,9}": [0-9]{1,5}\\}'
TEXTS = ['{"é🌍 ab": [1, 23]}', "in the town of Nîmes", '"c": null'] * 20
GRAMMAR = LLMatcher.grammar_from_regex(REGEX)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False),
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As those of sentencepiece: "▁" is a space, and characters without a token are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    ascii_texts = [text.encode("ascii", "ignore").decode() for text in TEXTS]
    tokenizer.train_from_iterator(
        ascii_texts, trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    )
    for byte in range(256):  # they are plain tokens in the vocabularies of sentencepiece
        assert tokenizer.token_to_id(f"<0x{byte:02X}>") == byte + 1
    return tokenizer


@pytest.fixture(params=[byte_level, byte_fallback], scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=request.param(), eos_token="</s>").save_pretrained(path)
    return path


class Batch:
    """Sequences that sample from random logits."""

    def __init__(self, path: Path, seed: int) -> None:
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.vocab_size = self.tokenizer.get_vocab_size() + 5  # a model's may be larger
        grammars = Grammars(lambda: load_tokenizer(str(path), self.vocab_size, [EOS, 10**6]), 1)
        self.table = SamplingTable(8, torch.device("cpu"), grammars)
        self.outputs: dict[int, list[int]] = {}
        self.seed = seed

    def add(self, slot: int, grammar: str, temperature: float, output: list[int]) -> None:
        sampling = RowSampling(temperature, 0, 1.0, 0.0, slot, 0, 0, [], grammar=grammar)
        self.outputs[slot] = list(output)
        self.table.add(slot, NewSequence(SeqId(slot), [1, 2, *output], 2, sampling))

    def step(self, slots: list[int]) -> SamplingRows:
        positions = torch.tensor([len(self.outputs[slot]) for slot in slots])
        rows = self.table.rows(torch.tensor(slots), positions)
        token_ids = sample(torch.stack([self.logits(slot) for slot in slots]), rows)
        if rows.processors is not None:
            rows.processors.record(token_ids)
        for slot, token_id in zip(slots, token_ids.tolist(), strict=True):
            self.outputs[slot].append(token_id)
        return rows

    def logits(self, slot: int) -> torch.Tensor:
        source = torch.Generator().manual_seed(1000 * self.seed + 100 * slot + len(self.outputs[slot]))
        return torch.randn(self.vocab_size, generator=source)

    def run(self, slots: list[int], num_steps: int) -> None:
        for _ in range(num_steps):
            self.step(slots)

    def text(self, slot: int) -> str:
        output = self.outputs[slot]
        return self.tokenizer.decode(output[: output.index(EOS)], skip_special_tokens=False)


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_each_output_follows_its_grammar_to_the_end(path: Path, temperature: float) -> None:
    batch = Batch(path, seed=1)
    for slot in range(6):
        batch.add(slot, GRAMMAR if slot % 3 else "", temperature, [])
    batch.run(list(range(6)), 60)
    for slot in (1, 2, 4, 5):
        assert re.fullmatch(REGEX, batch.text(slot)), batch.text(slot)
        end = batch.outputs[slot].index(EOS)
        assert set(batch.outputs[slot][end:]) == {EOS}  # the rows of steps in flight are computed, too
    for slot in (0, 3):
        assert len(set(batch.outputs[slot])) > 20  # free


def test_an_output_goes_on_from_any_token(path: Path) -> None:
    """After a preemption, and with rows that come, go and pause."""
    whole = Batch(path, seed=2)
    whole.add(0, GRAMMAR, 1.0, [])
    whole.run([0], 60)
    length = whole.outputs[0].index(EOS)
    for num_known in range(length + 1):
        resumed = Batch(path, seed=2)
        resumed.add(0, GRAMMAR, 1.0, whole.outputs[0][:num_known])
        resumed.run([0], length + 1 - num_known)
        assert resumed.outputs[0] == whole.outputs[0][: length + 1]
    mixed = Batch(path, seed=3)
    for slot in range(4):
        mixed.add(slot, GRAMMAR, 2.0, [])
    for slots in [[0, 1], [1], [0, 1, 2], [2, 0], [3], [3, 1, 0]] * 20:
        mixed.step(slots)
    for slot in range(4):
        mixed.run([slot], 60)
        assert re.fullmatch(REGEX, mixed.text(slot))


def run_rank(
    path: Path, directory: Path, *, stores: bool, free: float = 0.0
) -> tuple[list[list[int]], list[str | None], int]:
    """Run rows with a grammar and free ones. Return tokens, failures, and how many masked steps stored no logits."""
    make_model("llama", directory)
    worker = start_worker(directory, tokenizer=str(path), eos_token_ids=[EOS])
    assert worker.runner is not None
    if stores:
        worker.runner._masks_head = False
    decoder, num_masked = worker.runner.decoder, 0
    driver = Driver(worker, seed=5)
    if decoder is not None:
        argmax = decoder.argmax

        def count(hidden: torch.Tensor, masks: RowMasks | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal num_masked
            num_masked += masks is not None
            return argmax(hidden, masks)

        decoder.argmax = count  # type: ignore[method-assign]
    settings = [RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [], grammar=GRAMMAR if i % 3 else "") for i in range(6)]
    settings[0] = msgspec.structs.replace(settings[0], temperature=free)
    requests = driver.run([[i, 2, 3] for i in range(6)], 40, settings)
    return [request.output for request in requests], [request.failure for request in requests], num_masked


def test_a_greedy_batch_has_the_same_tokens_without_stored_logits(path: Path, tmp_path: Path) -> None:
    stored, *_, num_masked = run_rank(path, tmp_path, stores=True)
    assert num_masked == 0
    found, failures, num_masked = run_rank(path, tmp_path, stores=False)
    assert found == stored and failures == [None] * 6
    assert num_masked > 20 or find_kernels() is None
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    for index in (1, 2, 4, 5):
        output = found[index]
        assert EOS in output and re.fullmatch(
            REGEX, tokenizer.decode(output[: output.index(EOS)], skip_special_tokens=False)
        )


def test_rows_that_are_drawn_need_the_stored_logits_of_all(path: Path, tmp_path: Path) -> None:
    stored, *_ = run_rank(path, tmp_path, stores=True, free=1.0)
    assert run_rank(path, tmp_path, stores=False, free=1.0)[0] == stored


def test_a_row_without_an_allowed_token_fails_alone_with_the_reason(path: Path) -> None:
    batch = Batch(path, seed=4)
    batch.add(0, GRAMMAR, 1.0, [EOS])  # as after a change of the tokenizer
    batch.add(1, GRAMMAR, 1.0, [])
    rows = batch.step([0, 1])
    assert rows.processors is not None
    assert batch.outputs[0] == [EOS, NO_TOKEN]
    assert "doesn't satisfy the grammar" in (rows.processors.failure(0) or "")
    assert rows.processors.failure(1) is None
    batch.run([0, 1], 60)
    assert re.fullmatch(REGEX, batch.text(1))


def test_batches_without_a_grammar_load_no_tokenizer() -> None:
    def load() -> LLTokenizer:
        raise AssertionError("it is loaded")

    grammars = Grammars(load, 1)
    table = SamplingTable(2, torch.device("cpu"), grammars)
    table.add(0, NewSequence(SeqId(0), [1], 1, RowSampling(1.0, 0, 1.0, 0.0, 0, 0, 0, [])))
    assert table.rows(torch.tensor([0]), torch.tensor([0])).processors is None
    assert not {"_compiling", "_masking"} & vars(grammars).keys()


def test_a_grammar_is_compiled_once(path: Path) -> None:
    grammars = Grammars(lambda: load_tokenizer(str(path), 400, [EOS]), 1)
    grammars.announce(1, GRAMMAR)
    states = [grammars.begin(sequence(GRAMMAR)) for _ in range(3)]
    masks: Future[torch.Tensor] = grammars.masks([], states)
    assert masks.result().any()
    assert list(grammars._compiled) == [GRAMMAR]


def test_a_known_grammar_does_not_wait_for_one_that_is_compiled(path: Path) -> None:
    may_go_on = Event()

    class Slow(Grammars):
        def _make_matcher(self, grammar: str) -> LLMatcher:
            if grammar != GRAMMAR:
                may_go_on.wait(60)
            return super()._make_matcher(grammar)

    grammars = Slow(lambda: load_tokenizer(str(path), 400, [EOS]), 1)
    grammars.announce(3, GRAMMAR)
    wait_until(lambda: grammars.last_compiled == 3, what="the first grammar")
    grammars.announce(4, LLMatcher.grammar_from_regex("a"))
    assert grammars.masks([], [grammars.begin(sequence(GRAMMAR))]).result(60).any()
    assert grammars.last_compiled == 3
    may_go_on.set()
    wait_until(lambda: grammars.last_compiled == 4, what="the other grammar")


@pytest.mark.parametrize("regex", ["[a-z{}]{4,200}b[a-z]{3,30}", "[a-z{}]*a[a-z{}]{20}"])
@pytest.mark.parametrize("num_at_once", [1, 6])
def test_a_sequence_does_not_fail_since_others_have_used_up_the_states_of_their_lexer(
    path: Path, num_at_once: int, regex: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance's copies of a matcher share one lexer, whose number of states has a limit."""
    grammar = LLMatcher.grammar_from_regex(regex)
    monkeypatch.setattr("millrace.worker.grammars.MAX_LEXER_STATES", 500)
    batch = Batch(path, seed=6)
    slots = list(range(num_at_once))
    for batch.seed in range(24 // num_at_once):
        for slot in slots:
            batch.add(slot, grammar, 1.0, [])
        batch.run(slots, 40)
        assert not any(NO_TOKEN in batch.outputs[slot] for slot in slots), batch.seed


def test_a_sequence_that_uses_up_a_lexer_in_few_tokens_fails_with_a_clear_reason(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.worker.grammars.MAX_LEXER_STATES", 500)
    batch = Batch(path, seed=7)
    batch.add(0, LLMatcher.grammar_from_regex("(.|\\n)*a(.|\\n){200}"), 1.0, [])
    batch.add(1, GRAMMAR, 1.0, [])
    rows = batch.step([0, 1])
    while NO_TOKEN not in batch.outputs[0]:
        rows = batch.step([0, 1])
    assert rows.processors is not None and rows.processors.failure(1) is None
    assert rows.processors.failure(0) == "the form takes too much work here; make it simpler"


def test_a_grammar_with_too_many_readings_at_once_fails_with_a_readable_reason(path: Path) -> None:
    batch = Batch(path, seed=8)
    choices = " | ".join(f'"a{number}" start' for number in range(3000))
    batch.add(0, LLMatcher.grammar_from_lark(f"start: {choices}"), 1.0, [])
    rows = batch.step([0])
    while NO_TOKEN not in batch.outputs[0]:
        rows = batch.step([0])
    assert rows.processors is not None
    reason = rows.processors.failure(0) or ""
    assert "Current row has 3001 items" in reason and reason.endswith("right-recursive")


COMPILE = """
import sys, time
from llguidance import LLMatcher
from millrace.worker.grammars import Grammars, load_tokenizer
rules = "".join(f'r{i}: "x" r{i + 1}\\n' for i in range(2600))
grammars = Grammars(lambda: load_tokenizer(sys.argv[1], 600, [0]), 1)
grammars.announce(1, LLMatcher.grammar_from_lark('start: r0\\n' + rules + 'r2600: "y"\\n'))
while grammars.last_compiled < 1:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("path", [byte_level], indirect=True)
def test_a_deep_grammar_is_compiled_also_where_the_stack_of_a_process_has_no_limit(path: Path) -> None:
    """The C library then gives threads a small one, and the process that checks grammars has any."""

    def allow_any_stack() -> None:
        _, most = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (most, most))

    command = [sys.executable, "-c", COMPILE, str(path)]
    subprocess.run(command, preexec_fn=allow_any_stack, check=True, timeout=60)


def test_a_grammar_whose_masks_take_too_long_fails_and_no_other_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of its readings grows with the cube of the length. All sequences of a step wait for its masks."""
    for name, limit_s in (("SLOW_S", 0.0005), ("MAX_EXCESS_S", 0.005)):
        monkeypatch.setattr(f"millrace.worker.grammars.{name}", limit_s)
    batch = Batch(path, seed=9)
    readings = 'start: a "the end"\na: /[^!]/ | a a | a a a\n'
    batch.add(0, LLMatcher.grammar_from_lark(readings), 1.0, [])
    batch.add(1, GRAMMAR, 1.0, [])
    failed: list[tuple[int, str | None]] = []
    for _ in range(200):
        processors = batch.step([0, 1]).processors
        assert processors is not None and NO_TOKEN not in batch.outputs[0]
        failed += [(row, processors.failure(row)) for row in processors.rows_to_fail()]
        if failed:
            break
    assert failed == [(0, "the form takes too much work here; make it simpler")]
    assert processors is not None and processors.failure(1) is None


def let_each_call_take(call_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the clocks of threads. A token and its mask are two calls."""
    clock = threading.local()

    def thread_time() -> float:
        clock.now_s = getattr(clock, "now_s", 0.0) + call_s
        return float(clock.now_s)

    monkeypatch.setattr("millrace.worker.grammars.time.thread_time", thread_time)


def test_a_sequence_does_not_fail_for_the_work_of_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each token of 8 sequences takes 16 ms, and that of any later one."""
    let_each_call_take(0.008, monkeypatch)
    batch = Batch(path, seed=10)
    for slots in (range(8), range(1)):
        for slot in slots:
            batch.add(slot, GRAMMAR, 1.0, [])
        batch.run(list(slots), 60)
        for slot in slots:
            assert re.fullmatch(REGEX, batch.text(slot))


def test_a_costly_sequence_fails_after_as_many_tokens_alone_as_beside_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_each_call_take(0.04, monkeypatch)
    batch = Batch(path, seed=11)

    def num_steps(slots: list[int]) -> int:
        for slot in slots:
            batch.add(slot, LLMatcher.grammar_from_regex("[a-z]{500}"), 1.0, [])
        for number in range(500):
            processors = batch.step(slots).processors
            assert processors is not None
            if failed := processors.rows_to_fail():
                assert failed == slots
                return number
        raise AssertionError("none has failed")

    num_steps([0])  # the masks are timed from here on
    assert num_steps(list(range(8))) == num_steps([0]) > 10


def sequence(grammar: str) -> NewSequence:
    return NewSequence(SeqId(1), [1], 1, RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [], grammar=grammar))


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield
