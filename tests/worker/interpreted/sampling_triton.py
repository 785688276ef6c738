"""Draws of the Triton kernels against the CPU's."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace.executor.wire.messages import NO_TOKEN, RowSampling
from millrace.worker import floors_triton, sampler, sampling_triton
from millrace.worker.counter_rng import GOLDEN_GAMMA, to_int64
from millrace.worker.sampling_rows import SamplingRows
from tests.worker.kernels.test_sampling import random_rows
from tests.worker.rows import Row, sampling_rows

PART = 256
NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # bounds of improbable ids are infinite


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_triton, "PART", PART)
    monkeypatch.setattr(floors_triton, "BLOCK", 16)
    monkeypatch.setattr(floors_triton, "AT_ONCE", 64)
    monkeypatch.setattr(floors_triton, "KEPT", 32)


def drawn(logits: Tensor, rows: list[Row]) -> list[int]:
    """What the kernels draw. Asserts that it is what the CPU draws."""
    settings_of_rows = replace(sampling_rows(rows), processors=None)
    token_ids: list[int] = sampling_triton.sample(logits, settings_of_rows).tolist()
    assert token_ids == sampler.sample(logits.clone(), settings_of_rows).tolist()
    return token_ids


def row(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 1) -> Row:
    return RowSampling(temperature, top_k, top_p, min_p, seed, 0, 0, []), 0


@st.composite
def settings_of_a_row(draw: st.DrawFn) -> Row:
    sampling = RowSampling(
        temperature=draw(st.sampled_from([0.0, 1e-30]) | st.floats(2**-7, 5, width=32)),
        top_k=draw(st.sampled_from([0, 1]) | st.integers(0, 600)),
        top_p=draw(st.just(1.0) | st.integers(0, 999_999).map(lambda part: (part + 0.377) / 1e6)),  # no sum is that
        min_p=draw(st.sampled_from([0.0, 1.0]) | st.floats(0, 1, width=32)),
        seed=draw(st.integers(0, 2**64 - 1)),
        candidate=draw(st.integers(0, 63)),
        min_tokens=0,
        end_token_ids=[],
    )
    return sampling, draw(st.integers(0, 2**20))


@st.composite
def rows_of_logits(draw: st.DrawFn) -> Tensor:
    """Random numbers of any scale, with ties, ids that are not allowed, and sometimes a row that fails."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = 2, draw(st.sampled_from([1, PART, PART + 1]) | st.integers(1, 2 * PART + 3))
    logits = torch.randn(shape, generator=generator) * draw(st.sampled_from([1e-3, 2.5, 30.0, 1e30]))
    if draw(st.booleans()):
        logits = logits.round()
    if draw(st.booleans()):
        logits[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.1, 0.99]))] = -INF
    if draw(st.integers(0, 9)) == 0:
        logits[1, draw(st.integers(0, shape[1] - 1))] = draw(st.sampled_from([NAN, INF]))
    return logits.to(draw(st.sampled_from([torch.float32, torch.float16])))


@settings(
    max_examples=50,
    derandomize=True,
    phases=[Phase.generate],  # shrinking takes minutes in the interpreter
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rows_of_logits(), st.lists(settings_of_a_row(), min_size=2, max_size=2))
def test_any_draw_equals_the_cpus(logits: Tensor, rows: list[Row]) -> None:
    drawn(logits, rows)


@pytest.mark.parametrize("vocab_size", [1, 3, PART, PART + 1, 2000])
def test_seeded_draws_equal_the_cpus(vocab_size: int) -> None:
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2.5
    drawn(logits, random_rows(8, random.Random(vocab_size), vocab_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_draws_equal_the_cpus_when_many_logits_tie(dtype: torch.dtype) -> None:
    logits = torch.randn(8, 500, generator=torch.Generator().manual_seed(1)).mul(2).round().to(dtype)
    drawn(logits, random_rows(8, random.Random(1), 500))


@pytest.mark.parametrize("kind", ["equal", "far", "masked", "forced"])
def test_odd_distributions_are_drawn_as_on_the_cpu(kind: str) -> None:
    logits = torch.zeros(4, 600)
    if kind == "far":
        logits = torch.linspace(3e38, -3e38, 600).expand(4, -1)
    elif kind == "masked":
        logits[:, 7:] = -INF
    elif kind == "forced":
        logits = torch.linspace(0.0, -9.0, 600).repeat(4, 1)
        logits[:, 99] = 1e9
    drawn(logits, [row(0.8, 50, 0.9), row(1.0, 20), row(2.0, 0, 0.7), row(0.0)])


def key_with(bits: int) -> int:
    """Return the row key for which the token id 0 has these random bits."""
    bits ^= bits >> 31 ^ bits >> 62
    bits = bits * pow(0x94D049BB133111EB, -1, 1 << 64) % (1 << 64)
    bits ^= bits >> 27 ^ bits >> 54
    bits = bits * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) % (1 << 64)
    bits ^= bits >> 30 ^ bits >> 60
    return to_int64((bits - GOLDEN_GAMMA) % (1 << 64))


@triton.jit
def bounds_and_scores(x, keys, peak, temperature, floor, bounds, scores):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    own, ids = tl.program_id(0), tl.arange(0, 1)
    key, its_x = tl.load(keys + own).to(tl.uint64, bitcast=True), tl.load(x + own)
    rate, farthest = sampling_triton._range_of(temperature, floor)
    tl.store(bounds + own + ids, sampling_triton._bounds(its_x, peak, rate, farthest, key, ids))
    tl.store(scores + own + ids, sampling_triton._scores(its_x, peak, temperature, floor, key, ids))


@pytest.mark.parametrize(("temperature", "floor"), [(1.0, -INF), (0.01, -INF), (30.0, -1.0), (0.7, 0.0)])
def test_bounds_are_below_the_scores_and_close(temperature: float, floor: float) -> None:
    generator = random.Random(1)
    bits = [0, 1, 2**31 - 1, 2**33 - 1, 2**33, 2**53, 2**63, 2**64 - 2**40, 2**64 - 1]
    bits += [generator.getrandbits(64) >> generator.randrange(40) for _ in range(200)]
    x = torch.tensor([generator.choice([2.0, 1.9, -3.0, -28.0 * temperature, -INF]) for _ in bits])
    bounds, scores = torch.empty(len(bits)), torch.empty(len(bits))
    keys = torch.tensor([key_with(each) for each in bits])
    kernel = bounds_and_scores[(len(bits),)]
    kernel(x, keys, 2.0, temperature, floor, bounds, scores)
    exact = (-scores.double()).exp()
    assert ((bounds <= exact) | (exact > 1e30)).all()  # those lose against the peak, whose variate is below 40
    is_close = torch.tensor([2**40 < each < 2**63 for each in bits]) & (scores > -INF) & (x > -30 * temperature)
    assert is_close.any() and (bounds >= 0.87 * exact)[is_close].all()


def test_one_id_that_is_left_is_drawn() -> None:
    logits = torch.full((3, 300), -INF)
    logits[:, 299] = -5.0
    assert drawn(logits, [row(0.0), row(1.0), row(1.5, 3, 0.9, 0.1)]) == [299] * 3


def test_rows_without_a_finite_peak_fail_alone() -> None:
    logits = torch.zeros(5, 300)
    logits[0, 270], logits[1, 280], logits[2], logits[3, 5] = NAN, 9.0, -INF, INF
    logits[4, :299] = -INF
    for setting in (row(0.0), row(1.0, 2, 0.9)):
        assert drawn(logits, [setting] * 5) == [NO_TOKEN, 280, NO_TOKEN, NO_TOKEN, 299]


def test_a_row_does_not_depend_on_its_neighbours_or_its_stride() -> None:
    wide = torch.randn(6, 900, generator=torch.Generator().manual_seed(3)) * 2
    rows = random_rows(6, random.Random(4), 700)
    together = drawn(wide[:, :700], rows)
    assert [drawn(wide[i : i + 1, :700], [rows[i]])[0] for i in (5, 2)] == [together[5], together[2]]


def test_no_rows_yield_no_ids() -> None:
    assert drawn(torch.empty(0, 10), []) == []


class MaskedRows:
    """Processors of a step in which some rows have a grammar that allows one id."""

    def __init__(self, row_indices: list[int], drawn: list[int]) -> None:
        self.grammar_rows = SimpleNamespace(row_indices=row_indices)
        self.drawn_before: list[int] | None = None
        self._drawn = drawn

    def apply(self, logits: Tensor, *, but_grammars: bool = False) -> Tensor:
        assert but_grammars
        return logits

    def apply_masks(self, logits: Tensor) -> None:
        self.drawn_before = list(self._drawn)
        logits[self.grammar_rows.row_indices, 8:] = -INF
        logits[self.grammar_rows.row_indices, :7] = -INF


@pytest.mark.parametrize("masked", [[2, 0], [0, 1, 2, 3]])
def test_rows_without_a_grammar_are_drawn_before_the_masks_are_waited_for(
    masked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, draw, drawn = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)), sampling_triton.sample, []

    def count(logits: Tensor, rows: SamplingRows) -> Tensor:
        drawn.append(rows.num_rows)
        return draw(logits, rows)

    monkeypatch.setattr(sampling_triton, "sample", count)
    rows = sampling_rows([row(0.0), row(0.9), row(0.9, top_k=5), row(0.9, top_p=0.5)])
    free = sampler.sample(logits.clone(), rows).tolist()
    processors = MaskedRows(masked, drawn)
    token_ids = sampler.sample_with_triton(logits, replace(rows, processors=processors)).tolist()  # type: ignore[arg-type]
    assert token_ids == [7 if index in masked else free[index] for index in range(4)]
    assert processors.drawn_before == ([2] if len(masked) == 2 else [])
