"""The processors of a batch change each row as a plain reference in vLLM's order does, and as transformers does."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from millrace.executor.wire.messages import NO_TOKEN, LogitsSettings, NewSequence, RowSampling, SeqId, ThinkingLimit
from millrace.worker.sampler import sample
from millrace.worker.sampling_rows import SamplingTable
from tests.worker.processors.reference import processed

VOCAB_SIZE = 12
START, END = 3, 4


class Batch:
    """Sequences with slots of their own, whose processors get tokens that the test chooses."""

    def __init__(self) -> None:
        self.table = SamplingTable(4, torch.device("cpu"))
        self.prompts: dict[int, list[int]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.samplings: dict[int, RowSampling] = {}

    def add(self, slot: int, sampling: RowSampling, prompt: list[int], output: list[int]) -> None:
        self.prompts[slot], self.outputs[slot], self.samplings[slot] = prompt, list(output), sampling
        self.table.add(slot, NewSequence(SeqId(slot), prompt + output, len(prompt), sampling))

    def remove(self, slot: int) -> None:
        self.table.remove(slot)
        for each in (self.prompts, self.outputs, self.samplings):
            del each[slot]

    def step(self, slots: list[int], logits: Tensor, token_ids: list[int]) -> Tensor:
        """Return the changed logits of these slots' rows, and let the rows have these tokens."""
        positions = torch.tensor([len(self.outputs[slot]) for slot in slots])
        processors = self.table.rows(torch.tensor(slots), positions).processors
        if processors is not None:
            logits = processors.apply(logits)
            processors.record(torch.tensor(token_ids))
        for slot, token_id in zip(slots, token_ids, strict=True):
            self.outputs[slot].append(token_id)
        return logits

    def expected(self, slots: list[int], logits: Tensor) -> Tensor:
        rows = [
            processed(row.float().numpy(), self.samplings[slot], self.prompts[slot], self.outputs[slot])
            for slot, row in zip(slots, logits, strict=True)
        ]
        return torch.from_numpy(np.stack(rows))


def some_ids(source: random.Random, low: int, high: int) -> list[int]:
    return [source.randrange(VOCAB_SIZE) for _ in range(source.randint(low, high))]


def some_sampling(source: random.Random) -> RowSampling:
    def maybe(value: Any, default: Any) -> Any:
        return value if source.random() < 0.4 else default

    settings = LogitsSettings(
        presence_penalty=maybe(source.choice([0.5, -2.0]), 0.0),
        frequency_penalty=maybe(source.choice([0.3, -1.5]), 0.0),
        repetition_penalty=maybe(source.choice([1.3, 0.7]), 1.0),
        logit_bias=maybe({token_id: source.uniform(-100, 100) for token_id in some_ids(source, 1, 4)}, {}),
        allowed_token_ids=maybe(sorted(set(some_ids(source, 1, 6))), None),
        bad_words=maybe([some_ids(source, 1, 3) for _ in range(source.randint(1, 6))], []),
        thinking=maybe(ThinkingLimit(source.randint(0, 4), START, END), None),
    )
    min_tokens = maybe(2, 0)
    return RowSampling(0.0, 0, 1.0, 0.0, 0, 0, min_tokens, [0, 5] if min_tokens else [], maybe(None, settings))


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_every_row_is_changed_as_alone_and_in_vllms_order(seed: int) -> None:
    """Sequences come, go, pause and come again with their tokens, in slots that others had before them."""
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, dtype = Batch(), source.choice([torch.float32, torch.bfloat16])
    for _ in range(source.randint(1, 20)):
        for slot in range(4):
            if slot not in batch.prompts:
                batch.add(slot, some_sampling(source), some_ids(source, 1, 6), some_ids(source, 0, 4))
            elif source.random() < 0.1:
                again = batch.samplings[slot], batch.prompts[slot], batch.outputs[slot]
                batch.remove(slot)
                if slot == 0 or source.random() < 0.5:
                    batch.add(slot, *again)
        slots = source.sample(sorted(batch.prompts), source.randint(1, len(batch.prompts)))
        logits = (torch.randn(len(slots), VOCAB_SIZE, generator=generator) * 4).to(dtype)
        expected = batch.expected(slots, logits)
        changed = batch.step(slots, logits.clone(), some_ids(source, len(slots), len(slots))).float()
        torch.testing.assert_close(changed, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("repetition_penalty", [1.0, 1.3])
def test_penalties_of_long_and_short_sequences_are_those_of_their_tokens(repetition_penalty: float) -> None:
    """With more distinct ids than the table has space for at first, after the longest has gone, and bit by bit the same for
    a sequence that begins again with its tokens."""
    source, generator, vocab_size = random.Random(1), torch.Generator().manual_seed(1), 500
    settings = LogitsSettings(presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=repetition_penalty)
    sampling = RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [], settings)
    prompts = [[source.randrange(vocab_size) for _ in range(length)] for length in (300, 1, 63, 64)]
    batch = Batch()
    batch.add(3, RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, []), [1], [])
    for slot in range(3):
        batch.add(slot, sampling, prompts[slot], [])
    for step in range(150):
        if step == 100:
            batch.remove(0)
            batch.add(0, sampling, prompts[3], [])
        slots = [slot for slot in range(4) if step % 3 == 0 or slot != step % 4]
        logits = torch.randn(len(slots), vocab_size, generator=generator) * 4
        expected, again = batch.expected(slots, logits), Batch()
        for slot in slots:
            again.add(slot, batch.samplings[slot], batch.prompts[slot], batch.outputs[slot])
        tokens = [source.randrange(vocab_size) for _ in slots]
        rebuilt = again.step(slots, logits.clone(), tokens)
        changed = batch.step(slots, logits, tokens)
        torch.testing.assert_close(changed, expected, rtol=0, atol=1e-5)
        assert torch.equal(rebuilt, changed)


def test_a_batch_that_uses_no_processor_pays_nothing() -> None:
    batch = Batch()
    batch.add(0, RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, []), [1], [])
    batch.add(1, RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 2, [5]), [1], [])
    slots = torch.tensor([0, 1])
    assert batch.table.rows(slots, torch.tensor([0, 2])).is_plain_greedy
    assert not batch.table.rows(slots, torch.tensor([0, 1])).is_plain_greedy
    assert batch.table.rows(slots[:1], torch.tensor([0])).is_plain_greedy


def test_the_other_rows_of_a_batch_draw_the_same_tokens() -> None:
    """In bfloat16 too, although penalties are computed in float32."""
    plain = RowSampling(0.8, 0, 0.9, 0.0, 11, 0, 0, [])
    batch = Batch()
    for slot in range(3):
        batch.add(slot, plain, [1], [])
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    slots, positions = torch.arange(3), torch.arange(3)
    expected = sample(logits.clone(), batch.table.rows(slots, positions))
    batch.remove(1)
    batch.add(1, RowSampling(0.8, 0, 0.9, 0.0, 11, 0, 0, [], LogitsSettings(frequency_penalty=1.0)), [1], [2])
    drawn = sample(logits.clone(), batch.table.rows(slots, positions))
    assert drawn[[0, 2]].tolist() == expected[[0, 2]].tolist()


def test_a_failed_row_changes_no_other_row() -> None:
    batch = Batch()
    limit = ThinkingLimit(2, START, END)
    every = LogitsSettings(frequency_penalty=1.0, bad_words=[[1, 2]], thinking=limit, logit_bias={1: 1.0})
    for slot in range(2):
        batch.add(slot, RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [], every), [1], [])
    for token_id in (1, 3, 1):
        logits = torch.randn(2, VOCAB_SIZE)
        logits[0] = float("nan")
        expected = batch.expected([1], logits[1:])
        rows = batch.table.rows(torch.tensor([0, 1]), torch.tensor([0, 0]))
        assert rows.processors is not None
        changed = rows.processors.apply(logits)
        torch.testing.assert_close(changed[1:], expected)
        assert bool(changed[0].isnan().any())
        rows.processors.record(torch.tensor([NO_TOKEN, token_id]))
        batch.outputs[1].append(token_id)


def test_the_frequencies_of_draws_are_those_of_the_changed_logits() -> None:
    """Chi-square, with a fixed seed."""
    count = 20_000
    settings = LogitsSettings(
        repetition_penalty=1.4,
        frequency_penalty=0.4,
        presence_penalty=-0.3,
        logit_bias={1: 1.5, 7: -1.0},
        bad_words=[[2], [9, 3]],
    )
    prompt, output = [4, 5], [6, 6, 8, 9]
    table = SamplingTable(count, torch.device("cpu"))
    for seed in range(count):
        sampling = RowSampling(0.7, 0, 1.0, 0.0, seed, 0, 6, [0], settings)
        table.add(seed, NewSequence(SeqId(seed), prompt + output, len(prompt), sampling))
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    rows = table.rows(torch.arange(count), torch.full((count,), len(output)))
    drawn = sample(logits.repeat(count, 1), rows)
    sampling = RowSampling(0.7, 0, 1.0, 0.0, 0, 0, 6, [0], settings)
    exact = torch.from_numpy(processed(logits.numpy(), sampling, prompt, output)).div(0.7).softmax(-1) * count
    observed = torch.bincount(drawn, minlength=VOCAB_SIZE)
    is_possible = exact > 0
    assert observed[~is_possible].tolist() == [0, 0, 0]
    chi_square = float(((observed - exact) ** 2 / exact)[is_possible].sum())
    assert chi_square < 26.1, "8 degrees of freedom: passed once in a thousand seeds"


# --- the same meaning in transformers -------------------------------------------------------------------------------


def as_transformers(sampling: RowSampling, num_prompt_tokens: int) -> LogitsProcessorList:
    settings = sampling.processors or LogitsSettings()
    found: list[LogitsProcessor] = []
    if settings.bad_words:
        found.append(NoBadWordsLogitsProcessor(settings.bad_words, eos_token_id=None))
    if sampling.min_tokens:
        device = "cpu"
        found.append(
            MinNewTokensLengthLogitsProcessor(
                num_prompt_tokens, sampling.min_tokens, sampling.end_token_ids, device=device
            )
        )
    if settings.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[key], value] for key, value in settings.logit_bias.items()]))
    if settings.allowed_token_ids is not None:
        others = [token_id for token_id in range(VOCAB_SIZE) if token_id not in settings.allowed_token_ids]
        found.append(SuppressTokensLogitsProcessor(others, device="cpu"))
    if settings.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    return LogitsProcessorList(found)


@pytest.mark.parametrize(
    "settings",
    [
        LogitsSettings(repetition_penalty=1.7),
        LogitsSettings(repetition_penalty=0.6),
        LogitsSettings(logit_bias={1: 2.5, 11: -100.0}),
        LogitsSettings(allowed_token_ids=[1, 5, 9]),
        LogitsSettings(bad_words=[[7], [2, 3], [8, 2, 3], [1, 1]]),
        LogitsSettings(repetition_penalty=1.2, logit_bias={3: 4.0}, bad_words=[[2, 3]]),
    ],
)
def test_what_transformers_has_too_means_the_same(settings: LogitsSettings) -> None:
    sampling = RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 4, [0, 6], settings)
    prompt = [5, 9, 9]
    batch = Batch()
    batch.add(2, sampling, prompt, [])
    theirs: Any = as_transformers(sampling, len(prompt))
    generator = torch.Generator().manual_seed(5)
    for token_id in (8, 2, 1, 2, 1, 1, 3, 8, 2):
        logits = torch.randn(1, VOCAB_SIZE, generator=generator) * 3
        expected = theirs(torch.tensor([prompt + batch.outputs[2]]), logits.clone())
        torch.testing.assert_close(batch.step([2], logits, [token_id]), expected)
