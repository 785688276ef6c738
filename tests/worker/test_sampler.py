"""Draws: their distribution, the filters, and that a draw depends only on its own row."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from millrace.executor.wire.messages import NO_TOKEN, RowSampling
from millrace.worker.sampler import sample
from tests.worker.rows import Row, sampling_rows

LARGEST_SEED = 2**64 - 1


def row(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    *,
    seed: int = 0,
    candidate: int = 0,
    position: int = 0,
    min_tokens: int = 0,
    end_token_ids: list[int] | None = None,
) -> Row:
    sampling = RowSampling(temperature, top_k, top_p, min_p, seed, candidate, min_tokens, end_token_ids or [])
    return sampling, position


def draw(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    token_ids: list[int] = sample(logits.clone(), sampling_rows(rows)).tolist()
    assert NO_TOKEN not in token_ids
    return token_ids


def drawn_ids(logits: list[float], count: int = 3000, **settings: float) -> set[int]:
    many = torch.tensor(logits).expand(count, -1)
    return set(draw(many, [row(**settings, seed=seed) for seed in range(count)]))  # type: ignore[arg-type]


def log_probabilities(*values: float) -> list[float]:
    return [math.log(value) for value in values]


GREEDY = row(0.0)


def test_greedy_takes_the_largest_and_of_equals_the_first() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, -1.0, 5.0], [1.0, 1.0, 1.0]])
    assert draw(logits, [GREEDY] * 3) == [1, 0, 0]


def test_low_precision_logits_are_sampled_in_float32() -> None:
    assert draw(torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16), [GREEDY]) == [1]


@pytest.mark.parametrize(
    "sampling",
    [
        *({"temperature": temperature} for temperature in (0.5, 1.0, 2.0)),
        {"top_k": 8},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 1.6, "min_p": 0.05, "top_k": 12, "top_p": 0.9},
    ],
    ids=str,
)
def test_draws_have_the_exact_distribution(sampling: dict[str, Any]) -> None:
    """Chi-square, with fixed seeds. The distribution is that of transformers' processors in vLLM's order."""
    logits, count = torch.randn(20, generator=torch.Generator().manual_seed(7)) * 2, 20_000
    ids = draw(logits.expand(count, -1), [row(**sampling, seed=seed) for seed in range(count)])
    warpers: list[Any] = [
        TemperatureLogitsWarper(sampling.get("temperature", 1.0)),
        MinPLogitsWarper(sampling.get("min_p", 0.0)),
        TopKLogitsWarper(sampling.get("top_k", 20)),
        TopPLogitsWarper(sampling.get("top_p", 1.0)),
    ]
    left = logits.unsqueeze(0)
    for warper in warpers:
        left = warper(None, left)
    expected = left[0].softmax(-1) * count
    observed = torch.bincount(torch.tensor(ids), minlength=20)
    assert not observed[expected == 0].any()
    is_frequent = expected > 5
    chi_square = float(((observed - expected) ** 2 / expected)[is_frequent].sum())
    freedom = int(is_frequent.sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3  # by Wilson and Hilferty
    assert chi_square < limit, "passed once in a thousand seeds"


def test_output_positions_and_candidates_draw_independently() -> None:
    logits = torch.zeros(4000, 2)
    by_position = draw(logits, [row(seed=1, position=position) for position in range(4000)])
    by_candidate = draw(logits, [row(seed=1, candidate=candidate) for candidate in range(4000)])
    for ids in (by_position, by_candidate):
        assert abs(sum(ids) - 2000) < 150
        pairs = sum(a == b for a, b in itertools.pairwise(ids))
        assert abs(pairs - 2000) < 150
    assert abs(sum(a == b for a, b in zip(by_position, by_candidate, strict=True)) - 2000) < 150


@given(st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_a_draw_depends_on_its_own_row_alone(source: random.Random) -> None:
    generator = torch.Generator().manual_seed(source.randrange(1 << 30))
    logits = (torch.randn(12, 300, generator=generator) * 3).round(decimals=1)  # with ties
    rows = [
        row(
            source.choice([0.0, 0.3, 1.0, 1.7]),
            source.choice([0, 1, 5, 40, 300]),
            source.choice([1.0, 0.9, 0.3]),
            source.choice([0.0, 0.1]),
            seed=source.choice([0, LARGEST_SEED, source.getrandbits(64)]),
            candidate=source.randrange(4),
            position=source.randrange(100),
            min_tokens=source.choice([0, 50]),
            end_token_ids=[3, 7],
        )
        for _ in range(12)
    ]
    alone = [draw(logits[i : i + 1], [rows[i]])[0] for i in range(12)]
    order = source.sample(range(12), source.randint(1, 12))
    assert draw(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]


def test_the_same_row_always_draws_the_same_and_other_seeds_draw_otherwise() -> None:
    logits = torch.zeros(1, 1000)
    seeds = (0, 1, LARGEST_SEED)
    first = [draw(logits, [row(seed=seed)]) for seed in seeds]
    assert first == [draw(logits, [row(seed=seed)]) for seed in seeds]
    assert len({ids[0] for ids in first}) == 3


def test_top_k_leaves_the_k_most_likely_ids() -> None:
    logits = [0.0, 0.3, 0.1, 0.2, -0.1]
    assert drawn_ids(logits, top_k=2) == {1, 3}
    assert drawn_ids(logits, top_k=1) == {1}
    assert drawn_ids(logits, top_k=5) == drawn_ids(logits, top_k=99) == {0, 1, 2, 3, 4}


def test_ids_that_tie_with_the_kth_stay() -> None:
    assert drawn_ids([1.0, 0.5, 0.5, 0.0], top_k=2) == {0, 1, 2}


def test_top_p_leaves_the_fewest_ids_that_reach_it() -> None:
    logits = log_probabilities(0.1, 0.4, 0.2, 0.3)
    assert drawn_ids(logits, top_p=0.65) == {1, 3}
    assert drawn_ids(logits, top_p=0.75) == {1, 2, 3}
    assert drawn_ids(logits, top_p=0.95) == {0, 1, 2, 3}
    assert drawn_ids(logits, top_p=1e-6) == {1}


def test_min_p_leaves_ids_in_proportion_to_the_most_likely() -> None:
    logits = log_probabilities(0.5, 0.26, 0.2, 0.04)
    assert drawn_ids(logits, min_p=0.5) == {0, 1}
    assert drawn_ids(logits, min_p=0.3) == {0, 1, 2}
    assert drawn_ids(logits, min_p=1.0) == {0}


def test_temperature_comes_before_the_filters() -> None:
    logits = log_probabilities(0.6, 0.3, 0.1)
    assert drawn_ids(logits, min_p=0.4) == {0, 1}
    assert drawn_ids(logits, min_p=0.4, temperature=0.5) == {0}
    assert drawn_ids(logits, top_p=0.8) == {0, 1}
    assert drawn_ids(logits, top_p=0.8, temperature=4.0) == {0, 1, 2}


def test_top_p_counts_only_what_min_p_and_top_k_leave() -> None:
    logits = log_probabilities(0.4, 0.3, 0.2, 0.1)
    assert drawn_ids(logits, top_p=0.55) == {0, 1}
    assert drawn_ids(logits, top_p=0.55, top_k=2) == {0}
    assert drawn_ids(logits, top_p=0.55, min_p=0.7) == {0}


def test_a_nucleus_wider_than_usual_is_found_by_sorting() -> None:
    logits = torch.linspace(0.0, -0.5, 3000)
    probabilities = logits.softmax(-1).double()
    size = int((probabilities.cumsum(-1) < 0.9).sum()) + 1
    ids = draw(logits.expand(2000, -1), [row(top_p=0.9, seed=seed) for seed in range(2000)])
    assert size > 1024
    assert 0.98 * size < max(ids) < size + 2


def test_a_tiny_temperature_is_greedy_and_not_a_failure() -> None:
    logits = torch.tensor([[-1e4, 3.0, 2.9999]])
    for temperature in (1e-6, 1e-30, 1e-45):
        assert draw(logits, [row(temperature, seed=9)]) == [1]


def test_end_tokens_wait_for_min_tokens_also_when_greedy() -> None:
    logits = torch.tensor([[9.0, 1.0, 8.0]])
    for temperature in (0.0, 0.01):
        held = row(temperature, min_tokens=3, end_token_ids=[0, 2], position=2)
        free = row(temperature, min_tokens=3, end_token_ids=[0, 2], position=3)
        assert draw(logits, [held]) == [1]
        assert draw(logits, [free]) == [0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_peak_fail_alone(temperature: float) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, nan, 1.0], [0.0, 5.0, 0.0], [-inf, -inf, -inf], [inf, 0.0, 0.0], [-inf, 0.0, -inf]])
    setting = row(temperature, top_k=2, top_p=0.9, seed=1)
    assert sample(logits, sampling_rows([setting] * 5)).tolist() == [NO_TOKEN, 1, NO_TOKEN, NO_TOKEN, 1]
