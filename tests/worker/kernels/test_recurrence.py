"""The recurrence of a layer against the formulas of kernels.h in torch, on every instruction set of this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.worker.kernels.library import Kernels
from millrace.worker.recurrent.compiled import MOST_TAPS, CompiledMixer, CompiledRows
from millrace.worker.recurrent.mixer import CONVOLUTION, DELTA_RULE, STATE_SPACE, Mixer

NUM_SLOTS = 5
TOLERANCES = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (2**-7, 1e-2)}
NO_MODULE: Any = None
STARTS = [0, 1, 20, 21, 22]
"""A row that goes on, a chunk, a row that goes on, and a new row, of one token each but for the chunk."""
SLOTS = [3, 0, 4, 2]
IS_NEW = [False, False, False, True]


@dataclass(frozen=True)
class Case:
    mixer: Mixer
    width: int


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def delta_rule(num_key_heads: int, num_heads: int, key_dim: int, value_dim: int, taps: int = 4) -> Case:
    keys, values = num_key_heads * key_dim, num_heads * value_dim
    channels = 2 * keys + values
    offsets = {"gate_at": channels, "gain_at": channels + values, "step_at": channels + values + num_heads}
    mixer = Mixer(
        rule=DELTA_RULE,
        projections={},
        rows=None,
        output=NO_MODULE,
        conv_weights=randn(taps, channels, seed=1),
        conv_bias=None,
        offsets={**offsets, "key_at": keys, "value_at": 2 * keys},
        num_key_heads=num_key_heads,
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        rates=-randn(num_heads, seed=2).exp(),
        step_bias=randn(num_heads, seed=3),
        norm_weights=1 + 0.1 * randn(values, seed=4),
        norm_size=value_dim,
        epsilon=1e-5,
        gain=1.5,
    )
    return Case(mixer, channels + values + 2 * num_heads)


def state_space(groups: int, num_heads: int, key_dim: int, value_dim: int, taps: int = 4) -> Case:
    keys, values = groups * key_dim, num_heads * value_dim
    channels = 2 * keys + values
    mixer = Mixer(
        rule=STATE_SPACE,
        projections={},
        rows=None,
        output=NO_MODULE,
        conv_weights=randn(taps, channels, seed=1),
        conv_bias=randn(channels, seed=5),
        offsets={"conv_at": values, "step_at": values + channels, "key_at": values, "query_at": values + keys},
        num_key_heads=groups,
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        rates=-randn(num_heads, seed=2).exp(),
        step_bias=randn(num_heads, seed=3),
        skips=randn(num_heads, seed=6),
        norm_weights=1 + 0.1 * randn(values, seed=4),
        norm_size=values // groups,
        epsilon=1e-5,
        gates_first=True,
    )
    return Case(mixer, values + channels + num_heads)


def convolution(channels: int, taps: int) -> Case:
    offsets = {"gate_at": channels, "conv_at": 2 * channels}
    bias = randn(channels, seed=5) if taps % 2 else None
    mixer = Mixer(CONVOLUTION, {}, None, NO_MODULE, randn(taps, channels, seed=1), bias, offsets)
    return Case(mixer, 3 * channels)


CASES = {
    "delta rule": delta_rule(2, 4, 16, 32),
    "delta rule, large heads": delta_rule(1, 2, 128, 192),
    "delta rule, other sizes": delta_rule(2, 2, 9, 21, taps=3),
    "delta rule, many channels": delta_rule(3, 6, 40, 72, taps=MOST_TAPS),
    "state space": state_space(1, 8, 16, 16),
    "state space, groups": state_space(2, 4, 24, 70),
    "state space, large": state_space(1, 3, 128, 64, taps=2),
    "delta rule, groups of tokens": delta_rule(1, 2, 96, 128),
    "state space, groups of tokens": state_space(2, 4, 64, 64),
    "convolution": convolution(64, 3),
    "convolution, other sizes": convolution(277, 4),
}


def compute(case: Case, inputs: Tensor, starts: list[int], before: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the results [T, ...] of rows, in float64, and the states after them: of each slot the last inputs of the
    convolution [taps - 1, C], and the states [Hv, D, Dv]."""
    mixer, results = case.mixer, []
    taps, channels = mixer.conv_weights.shape
    tails, states = (each.double().clone() for each in before)
    at = dict.fromkeys(("conv_at", "factor_at", "gate_at", "query_at", "value_at"), 0) | mixer.offsets
    for (begin, end), slot, is_new in zip(pairwise(starts), SLOTS, IS_NEW, strict=False):
        if is_new:
            tails[slot] = states[slot] = 0
        tokens = inputs[begin:end].double()
        entries = tokens[:, at["conv_at"] : at["conv_at"] + channels]
        if mixer.rule == CONVOLUTION:
            entries = entries * tokens[:, :channels]
        window = torch.cat([tails[slot], entries])
        tails[slot] = window[len(window) - taps + 1 :]
        mixed = sum(mixer.conv_weights[i].double() * window[i : i + len(entries)] for i in range(taps))
        assert isinstance(mixed, Tensor)
        mixed = mixed if mixer.conv_bias is None else mixed + mixer.conv_bias.double()
        if mixer.rule == CONVOLUTION:
            results.append(mixed * tokens[:, at["gate_at"] : at["gate_at"] + channels])
            continue
        mixed = F.silu(mixed)
        results += [_step(mixer, at, token, one, states[slot]) for token, one in zip(tokens, mixed, strict=True)]
    return torch.cat(results) if mixer.rule == CONVOLUTION else torch.stack(results), [tails, states]


def _step(mixer: Mixer, at: dict[str, int], token: Tensor, mixed: Tensor, state: Tensor) -> Tensor:
    """Change the state, and return the results of one token."""
    heads, values = mixer.num_heads, mixer.num_heads * mixer.value_dim
    assert mixer.rates is not None and mixer.step_bias is not None
    query, key = (
        mixed[at[name] : at[name] + mixer.num_key_heads * mixer.key_dim]
        .view(mixer.num_key_heads, -1)
        .repeat_interleave(heads // mixer.num_key_heads, 0)
        for name in ("query_at", "key_at")
    )
    value = mixed[at["value_at"] :][:values].view(heads, -1)
    step = F.softplus(token[at["step_at"] :][:heads] + mixer.step_bias.double())
    state *= (mixer.rates.double() * step).exp().view(-1, 1, 1)
    if mixer.rule == DELTA_RULE:
        query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
        query = query / mixer.key_dim**0.5
        gain = mixer.gain * token[at["gain_at"] :][:heads].sigmoid()
        added = (value - torch.einsum("hd,hdv->hv", key, state)) * gain.unsqueeze(1)
    else:
        added = value * step.unsqueeze(1)
    state += torch.einsum("hd,hv->hdv", key, added)
    results = torch.einsum("hd,hdv->hv", query, state)
    if mixer.skips is not None:
        results = results + mixer.skips.double().unsqueeze(1) * value
    gates = F.silu(token[at["gate_at"] :][:values])
    flat = results.flatten() * (gates if mixer.gates_first else 1)
    if mixer.norm_weights is None:
        return flat
    normed = F.rms_norm(flat.view(-1, mixer.norm_size), (mixer.norm_size,), eps=mixer.epsilon).flatten()
    return normed * mixer.norm_weights.double() * (1 if mixer.gates_first else gates)


def rows_of(starts: list[int]) -> CompiledRows:
    count = len(starts) - 1
    return CompiledRows(starts, torch.tensor(SLOTS[:count]), torch.tensor(IS_NEW[:count]))


def make(kernels: Kernels, case: Case, dtype: torch.dtype) -> CompiledMixer:
    """A mixer whose sequences have been through some tokens."""
    mixer = CompiledMixer(kernels, case.mixer, case.width, dtype)
    mixer.allocate(NUM_SLOTS)
    tokens = randn(3 * NUM_SLOTS, case.width, seed=7).to(dtype)
    starts = list(range(0, 3 * NUM_SLOTS + 1, 3))
    mixer.run(tokens, CompiledRows(starts, torch.arange(NUM_SLOTS), torch.ones(NUM_SLOTS, dtype=torch.bool)))
    return mixer


def states_of(mixer: CompiledMixer, kernels: Kernels, case: Case) -> list[Tensor]:
    """The states as `compute` has them. Of a head, the kernels keep some columns after the others."""
    if len(mixer.states) == 1:
        return [mixer.states[0], torch.zeros(NUM_SLOTS, 1)]
    shape = case.mixer
    lanes = {"generic": 4, "avx2": 8}.get(kernels.instruction_set, 16)
    columns = -(-shape.value_dim // lanes) * lanes
    flat = mixer.states[1].flatten(2)[:, :, : columns * shape.key_dim]
    wide = columns // (4 * lanes) * 4 * lanes
    sizes = [4 * lanes] * (wide // (4 * lanes)) + [lanes] * ((columns - wide) // lanes)
    parts = flat.split([size * shape.key_dim for size in sizes], dim=2)
    whole = torch.cat([part.unflatten(2, (shape.key_dim, -1)) for part in parts], dim=3)
    return [mixer.states[0], whole[..., : shape.value_dim]]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_results_and_states_are_those_of_the_formulas(kernels: Kernels, name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    mixer = make(kernels, case, dtype)
    tokens = randn(STARTS[-1], case.width, seed=8).to(dtype)
    expected, after = compute(case, tokens, STARTS, states_of(mixer, kernels, case))
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(mixer.run(tokens, rows_of(STARTS)).double(), expected, rtol=rtol, atol=atol)
    for found, wanted in zip(states_of(mixer, kernels, case), after, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["delta rule, groups of tokens", "state space, groups of tokens"])
def test_long_rows_in_bfloat16(all_kernels: Kernels, name: str) -> None:
    """With AMX, groups of 32 tokens are products of matrices: rows of one group, of several, and of some tokens more."""
    case, dtype, starts = CASES[name], torch.bfloat16, [0, 32, 135, 172, 172 + 300]
    mixer = make(all_kernels, case, dtype)
    tokens = randn(starts[-1], case.width, seed=8).to(dtype)
    expected, after = compute(case, tokens, starts, states_of(mixer, all_kernels, case))
    found = mixer.run(tokens, rows_of(starts)).double()
    assert (found - expected).norm() <= 0.01 * expected.norm()
    assert (found - expected).abs().max() <= 0.05 * expected.abs().max()
    for states, wanted in zip(states_of(mixer, all_kernels, case), after, strict=True):
        assert (states - wanted).norm() <= 0.01 * wanted.norm()
    exact = CompiledMixer(all_kernels, case.mixer, case.width, dtype, rounds=False)
    parts = CompiledMixer(all_kernels, case.mixer, case.width, dtype, rounds=False)
    for each in (exact, parts):
        each.allocate(NUM_SLOTS)
    row = tokens[:100]
    new, more = (CompiledRows([0, 50], torch.tensor([1]), torch.tensor([is_new])) for is_new in (True, False))
    whole = exact.run(row, CompiledRows([0, 100], torch.tensor([1]), torch.tensor([True])))
    assert torch.equal(whole, torch.cat([parts.run(row[:50], new), parts.run(row[50:], more)]))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["delta rule", "state space, groups", "convolution"])
def test_results_do_not_depend_on_other_rows_chunks_or_threads(kernels: Kernels, name: str) -> None:
    """The steps have more tokens than pass a layer at a time."""
    case = CASES[name]
    tokens = randn(700, case.width, seed=9)
    whole = make(kernels, case, torch.float32)
    expected = whole.run(tokens, rows_of([0, 700]))
    torch.set_num_threads(2)
    try:
        parts = make(kernels, case, torch.float32)
        found = torch.cat([parts.run(each, rows_of([0, len(each)])) for each in tokens.split([1, 256, 300, 143])])
    finally:
        torch.set_num_threads(1)
    assert torch.equal(found, expected)
    beside = make(kernels, case, torch.float32)
    others = torch.cat([tokens, randn(90, case.width, seed=10)])
    assert torch.equal(beside.run(others, rows_of([0, 700, 790]))[:700], expected)
    for one, two, three in zip(*(states_of(each, kernels, case) for each in (whole, parts, beside)), strict=True):
        assert torch.equal(one[SLOTS[0]], two[SLOTS[0]]) and torch.equal(one[SLOTS[0]], three[SLOTS[0]])


@torch.inference_mode()
@pytest.mark.parametrize("name", ["delta rule", "state space", "convolution"])
def test_a_nan_stays_in_its_row_and_a_new_sequence_has_none(kernels: Kernels, name: str) -> None:
    case = CASES[name]
    mixer = make(kernels, case, torch.float32)
    tokens = randn(STARTS[-1], case.width, seed=8)
    expected = mixer.run(tokens, rows_of(STARTS))
    mixer = make(kernels, case, torch.float32)
    tokens[19] = float("nan")
    found = mixer.run(tokens, rows_of(STARTS))
    others = [*range(19), 20, 21]
    assert found[19].isnan().all() and torch.equal(found[others], expected[others])
    slot = SLOTS[1]
    new = CompiledRows([0, 1], torch.tensor([slot]), torch.tensor([True]))
    assert mixer.run(tokens[:1], new).isfinite().all()
    assert all(states[slot].isfinite().all() for states in states_of(mixer, kernels, case))


@torch.inference_mode()
def test_without_a_norm_and_without_a_step(kernels: Kernels) -> None:
    """A token whose step is 0 changes no state, and a large step forgets the one before."""
    plain = CASES["state space"]
    case = replace(plain, mixer=replace(plain.mixer, norm_weights=None))
    mixer = make(kernels, case, torch.float32)
    before = states_of(mixer, kernels, case)[1].clone()
    tokens = randn(1, case.width, seed=8)
    for step in (-200.0, 200.0):
        tokens[:, -8:] = step
        expected, _ = compute(case, tokens, [0, 1], states_of(mixer, kernels, case))
        torch.testing.assert_close(mixer.run(tokens, rows_of([0, 1])).double(), expected, rtol=1e-4, atol=1e-4)
        if step < 0:
            torch.testing.assert_close(states_of(mixer, kernels, case)[1], before)
