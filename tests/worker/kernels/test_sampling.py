"""Compiled argmax and draws against torch's, on every instruction set of this machine."""

from __future__ import annotations

import random

import pytest
import torch

from millrace.executor.wire.messages import NO_TOKEN, RowSampling
from millrace.worker import sampler
from millrace.worker.kernels.library import Kernels
from millrace.worker.kernels.sampling import argmax
from millrace.worker.sampler import sample
from tests.worker.kernels.masks import masked, random_masks
from tests.worker.rows import Row, sampling_rows

VOCABULARIES = [1, 3, 8, 15, 16, 17, 255, 1000, 32_000]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_argmax_takes_the_first_of_the_largest(kernels: Kernels, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(9, vocab_size, generator=generator).mul(2).round()  # ties
    logits[7], logits[8] = float("-inf"), -3.0
    peaks, ids = argmax(kernels, logits)
    expected_peaks = logits.amax(dim=1)
    assert torch.equal(peaks, expected_peaks)
    assert ids.tolist() == [row.tolist().index(peak) for row, peak in zip(logits, expected_peaks.tolist(), strict=True)]


@pytest.mark.parametrize("shares", [(-1.0,), (0.0, 0.5, -1.0), (0.001, 0.1, 0.95)])
@pytest.mark.parametrize("vocab_size", [5, 33, 1000, 32_003])
def test_argmax_takes_masks(kernels: Kernels, vocab_size: int, shares: tuple[float, ...]) -> None:
    """It also writes -inf for what they exclude, so that it is not drawn. NaN is excluded like other logits."""
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    masks = random_masks(8, vocab_size, shares)
    expected = masked(logits.clone(), masks)
    logits[(expected == -torch.inf).nonzero()[:1].unbind(1)] = torch.nan
    peaks, ids = argmax(kernels, logits, masks)
    assert torch.equal(logits, expected)
    assert torch.equal(peaks, expected.amax(dim=1))
    assert torch.equal(ids, expected.argmax(dim=1))


@pytest.mark.parametrize("position", [0, 5, 20, 36])
def test_a_nan_anywhere_makes_the_peak_nan(kernels: Kernels, position: int) -> None:
    logits = torch.arange(37.0).expand(3, -1).clone()
    logits[1, position] = float("nan")
    assert argmax(kernels, logits)[0].isnan().tolist() == [False, True, False]


def both(kernels: Kernels, logits: torch.Tensor, rows: list[Row]) -> tuple[list[int], list[int]]:
    """What the kernels draw, and what torch draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "find_kernels", lambda: kernels)
        compiled = sample(logits.clone(), sampling_rows(rows)).tolist()
        patch.setattr(sampler, "find_kernels", lambda: None)
        return compiled, sample(logits.clone(), sampling_rows(rows)).tolist()


def random_rows(count: int, source: random.Random, vocab_size: int) -> list[Row]:
    def setting() -> RowSampling:
        return RowSampling(
            temperature=source.choice([0.0, 0.3, 0.8, 1.0, 2.0, 1e-30]),
            top_k=source.choice([0, 0, 1, 5, 50, vocab_size, vocab_size + 1]),
            top_p=source.choice([1.0, 1.0, 0.95, 0.5, 1e-6, 1 - 1e-9]),
            min_p=source.choice([0.0, 0.0, 0.05, 1.0]),
            seed=source.getrandbits(64),
            candidate=source.randrange(3),
            min_tokens=source.choice([0, 5]),
            end_token_ids=[0],
        )

    return [(setting(), source.randrange(10)) for _ in range(count)]


@pytest.mark.parametrize("vocab_size", [2, *VOCABULARIES[1:]])
def test_seeded_draws_equal_torchs(kernels: Kernels, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    source = random.Random(vocab_size)
    count = 64 if vocab_size > 5000 else 256
    logits = torch.randn(count, vocab_size, generator=generator) * 2.5
    compiled, expected = both(kernels, logits, random_rows(count, source, vocab_size))
    assert compiled == expected


@pytest.mark.parametrize("vocab_size", [3, 17, 1000])
def test_bfloat16_logits_are_drawn_as_if_widened(kernels: Kernels, vocab_size: int) -> None:
    logits = torch.randn(256, vocab_size, generator=torch.Generator().manual_seed(1)).mul(2.5).to(torch.bfloat16)
    rows = random_rows(256, random.Random(3), vocab_size)
    compiled, expected = both(kernels, logits, rows)
    assert compiled == expected == both(kernels, logits.float(), rows)[0]


def test_seeded_draws_equal_torchs_when_many_logits_tie(kernels: Kernels) -> None:
    source = random.Random(1)
    logits = torch.randn(256, 500, generator=torch.Generator().manual_seed(1)).mul(2).round()
    compiled, expected = both(kernels, logits, random_rows(256, source, 500))
    assert compiled == expected


@pytest.mark.parametrize("kind", ["equal", "far", "masked"])
def test_seeded_draws_equal_torchs_for_odd_distributions(kernels: Kernels, kind: str) -> None:
    logits = torch.zeros(64, 3000)
    if kind == "far":
        logits = torch.linspace(0.0, -500.0, 3000).expand(64, -1).clone()
    elif kind == "masked":
        logits[:, 7:] = float("-inf")
    rows = random_rows(64, random.Random(2), 3000)
    compiled, expected = both(kernels, logits, rows)
    assert compiled == expected


def test_rows_without_a_finite_peak_fail_alone(kernels: Kernels) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, nan, 1.0], [0.0, 5.0, 0.0], [-inf, -inf, -inf], [inf, 0.0, 0.0], [-inf, 0.0, -inf]])
    rows = [(RowSampling(1.0, 2, 0.9, 0.0, 1, 0, 0, []), 0)] * 5
    compiled, expected = both(kernels, logits, rows)
    assert compiled == expected == [NO_TOKEN, 1, NO_TOKEN, NO_TOKEN, 1]
