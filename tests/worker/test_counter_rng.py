"""The counter-based random numbers, against SplitMix64 written with Python's integers."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.worker.counter_rng import GOLDEN_GAMMA, LARGEST_UNIFORM, candidate_stream, exponential_variates, next_keys

MASK = (1 << 64) - 1


def row_keys(seeds: list[int], candidates: list[int], positions: list[int]) -> torch.Tensor:
    streams = [candidate_stream(seed, candidate) for seed, candidate in zip(seeds, candidates, strict=True)]
    return next_keys(torch.stack(streams), torch.tensor(positions))


def nth(state: int, n: int) -> int:
    word = (state + (n + 1) * GOLDEN_GAMMA) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def unsigned(word: int) -> int:
    return word & MASK


def test_splitmix64_gives_its_published_first_output() -> None:
    assert nth(0, 0) == 0xE220A8397B1DCDAF


@given(st.integers(0, MASK), st.integers(0, 1000), st.integers(0, 1 << 20), st.integers(0, 299))
@settings(max_examples=60, deadline=None)
def test_the_tensor_arithmetic_is_the_documented_hash(seed: int, candidate: int, position: int, token_id: int) -> None:
    key = row_keys([seed], [candidate], [position])
    assert unsigned(key.item()) == nth(nth(seed, candidate), position)  # type: ignore[arg-type]
    word = nth(nth(nth(seed, candidate), position), token_id)
    uniform = torch.tensor((word >> 11) / 2**53 + 2**-54, dtype=torch.float64).float().item()
    expected = -math.log1p(-min(uniform, LARGEST_UNIFORM))
    assert math.isclose(exponential_variates(key, 300)[0, token_id].item(), expected, rel_tol=2e-6, abs_tol=1e-30)


def test_known_values_never_change() -> None:
    keys = row_keys([0, MASK, 42], [0, 0, 3], [0, 0, 7])
    assert [unsigned(key) for key in keys.tolist()] == [nth(nth(0, 0), 0), nth(nth(MASK, 0), 0), nth(nth(42, 3), 7)]
    assert [f"{unsigned(key):016x}" for key in keys.tolist()] == KNOWN_KEYS
    drawn = exponential_variates(keys, 3)
    torch.testing.assert_close(drawn, torch.tensor(KNOWN_EXPONENTIALS), atol=0.0, rtol=1e-5)


def test_every_variate_is_finite_and_positive() -> None:
    drawn = exponential_variates(row_keys(list(range(64)), [0] * 64, [0] * 64), 20_000)
    assert bool(drawn.isfinite().all())
    assert bool((drawn > 0).all())
    assert abs(drawn.mean().item() - 1.0) < 0.005
    assert abs(drawn.var().item() - 1.0) < 0.02


KNOWN_KEYS = ["a706dd2f4d197e6f", "5dc20aa7b2a27137", "7cb0357504762aef"]
KNOWN_EXPONENTIALS = [
    [0.1493233, 3.543985, 0.3254987],
    [4.162946, 0.3367916, 0.8372811],
    [0.2311542, 0.9214101, 0.1001213],
]
