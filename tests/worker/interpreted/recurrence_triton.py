"""The recurrence of a layer in Triton against its formulas, and against the compiled kernels' tests of the same cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from millrace.worker.input_batch import NO_SLOT
from millrace.worker.recurrent.mixer_triton import TritonMixer, decode_rows
from tests.worker.kernels.test_recurrence import (
    CASES,
    IS_NEW,
    NUM_SLOTS,
    SLOTS,
    STARTS,
    Case,
    compute,
    convolution,
    delta_rule,
    randn,
    state_space,
)

SMALL = {name: case for name, case in CASES.items() if "large" not in name and "of tokens" not in name} | {
    "delta rule, several programs": delta_rule(1, 2, 128, 40),
    "state space, one program": state_space(1, 2, 16, 16, taps=2),
    "convolution, several programs": convolution(600, 3),
}
TOLERANCES = {torch.float32: (1e-4, 1e-4), torch.float16: (2**-9, 2e-3)}


def make(case: Case, dtype: torch.dtype) -> TritonMixer:
    """A mixer whose sequences have some state."""
    mixer = TritonMixer(case.mixer, case.width, dtype)
    mixer.allocate(NUM_SLOTS)
    for index, states in enumerate(mixer.states):
        states.copy_(randn(*states.shape, seed=20 + index))
    return mixer


def states_of(mixer: TritonMixer) -> list[Tensor]:
    return [states[:NUM_SLOTS].clone() for states in mixer.states]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", SMALL)
def test_results_and_states_are_those_of_the_formulas(name: str, dtype: torch.dtype) -> None:
    case = SMALL[name]
    mixer = make(case, dtype)
    tokens = randn(STARTS[-1], case.width, seed=8).to(dtype)
    expected, after = compute(case, tokens, STARTS, states_of(mixer))
    rtol, atol = TOLERANCES[dtype]
    rows = mixer.rows(STARTS, torch.tensor(SLOTS), torch.tensor(IS_NEW))
    assert not rows.is_decode
    torch.testing.assert_close(mixer.run(tokens, rows).double(), expected, rtol=rtol, atol=atol)
    for found, wanted in zip(states_of(mixer), after, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["delta rule", "state space, groups", "convolution"])
def test_decode_rows_of_a_graph_and_padding(name: str) -> None:
    """Rows that the device knows only, two of padding among them, have the results of a step that the host lists."""
    case = SMALL[name]
    listed, in_graph = make(case, torch.float32), make(case, torch.float32)
    tokens, slots = randn(5, case.width, seed=8), torch.tensor([2, 0, 4, NO_SLOT, NO_SLOT])
    rows = listed.rows([0, 1, 2, 3], slots[:3], torch.tensor([False, True, False]))
    assert rows.is_decode
    expected = listed.run(tokens[:3], rows)
    found = in_graph.run(tokens, decode_rows(slots, torch.tensor([7, 0, 9, 0, 0])))
    assert torch.equal(found[:3], expected)
    for one, other in zip(states_of(listed), states_of(in_graph), strict=True):
        assert torch.equal(one, other)


def test_without_a_norm_and_with_more_slots() -> None:
    plain = SMALL["state space"]
    case = replace(plain, mixer=replace(plain.mixer, norm_weights=None))
    mixer = make(case, torch.float32)
    before = states_of(mixer)
    mixer.allocate(2 * NUM_SLOTS)
    tokens = randn(1, case.width, seed=8)
    expected, _ = compute(case, tokens, [0, 1], before)
    rows = mixer.rows([0, 1], torch.tensor(SLOTS[:1]), torch.tensor([False]))
    torch.testing.assert_close(mixer.run(tokens, rows).double(), expected, rtol=1e-4, atol=1e-4)
    mixer.release()
    assert mixer.num_slots == 0
