"""A counter-based random number generator: a pure function of (seed, candidate, output position, token id).

It nests three SplitMix64 generators (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014):

    output(state, n) = mix64(state + (n + 1) * GOLDEN_GAMMA)     the n-th output, n from 0, modulo 2**64
    row key          = output(output(seed, candidate), output position)
    bits             = output(row key, token id)
    uniform          = (upper 53 of the bits + 0.5) / 2**53      rounded to float32
    exponential      = -log(1 - uniform)

Tensors of int64 hold the unsigned 64-bit numbers: torch has no full uint64 arithmetic, and addition and multiplication
modulo 2**64 give the same bits for both. The bits are identical on every device.

Shapes: R rows, V token ids.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
LARGEST_UNIFORM = 1 - 2**-24
"""The largest float32 below 1. A uniform that is rounded to 1 would give an infinite exponential."""


def exponential_variates(row_keys: Tensor, vocab_size: int) -> Tensor:
    """Return [R, V] float32 exponential variates with mean 1 for row keys [R].

    The smallest variates decide a draw; near 0 `uniform` has all 24 significant bits of a float32.
    """
    bits = _mix64(row_keys.unsqueeze(1) + _increments(vocab_size, row_keys.device))
    uniform = _shift_right(bits, 11).to(torch.float32).add_(0.5).mul_(2.0**-53)
    return uniform.clamp_(max=LARGEST_UNIFORM).neg_().log1p_().neg_()


def candidate_stream(seed: int, candidate: int) -> Tensor:
    """Return `output(seed, candidate)` as an int64. The seed is an unsigned 64-bit number."""
    state, counter = torch.tensor([to_int64(seed), candidate], dtype=torch.int64, device="cpu").unbind()
    return next_keys(state, counter)


def next_keys(states: Tensor, counters: Tensor) -> Tensor:
    """Return `output(state, counter)` for int64 states and counters of one shape."""
    return _mix64(states + (counters + 1) * to_int64(GOLDEN_GAMMA))


def _mix64(bits: Tensor) -> Tensor:
    """Apply SplitMix64's output function in place."""
    bits ^= _shift_right(bits, 30)
    bits *= to_int64(0xBF58476D1CE4E5B9)
    bits ^= _shift_right(bits, 27)
    bits *= to_int64(0x94D049BB133111EB)
    bits ^= _shift_right(bits, 31)
    return bits


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift logically. torch's own shift of an int64 is arithmetic: it fills with the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def to_int64(number: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit number."""
    return number - (1 << 64) if number >= 1 << 63 else number


@cache
def _increments(vocab_size: int, device: torch.device) -> Tensor:
    """Return [1, V]: what `output` adds to the state for each token id."""
    return (torch.arange(1, vocab_size + 1, device=device) * to_int64(GOLDEN_GAMMA)).unsqueeze(0)
