"""The random numbers of sampling: a pure function of (seed, candidate, output position, token id).

Three nested SplitMix64 generators (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014):

    nth(state, n)  = finalise(state + (n + 1) * 0x9E3779B97F4A7C15)         the n-th output, n from 0, modulo 2**64
    row key        = nth(nth(seed, candidate), output position)
    word           = nth(row key, token id)
    uniform        = (word's upper 53 bits + 0.5) / 2**53                   rounded to float32
    exponential    = -log(1 - uniform)

Tensors of int64 hold the unsigned words' bits: torch has no full uint64 arithmetic, and wrapping multiplication and
addition are the same in both. The words are identical on every device.

Shapes: R rows, V token ids.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

INCREMENT = 0x9E3779B97F4A7C15
LARGEST_UNIFORM = 1 - 2**-24
"""The float32 next below 1; a rounded 1 would give an infinite exponential."""


def exponentials(row_keys: Tensor, vocab_size: int) -> Tensor:
    """[R, V] float32 exponential variates with mean 1 for row keys [R].

    The smallest ones decide a draw, and `uniform` near 0 keeps all of its 24 significant bits as float32.
    """
    words = finalise(row_keys.unsqueeze(1) + _steps(vocab_size, row_keys.device))
    uniform = shift_right(words, 11).to(torch.float32).add_(0.5).mul_(2.0**-53)
    return uniform.clamp_(max=LARGEST_UNIFORM).neg_().log1p_().neg_()


def row_keys(seeds: list[int], candidates: list[int], output_positions: list[int], device: torch.device) -> Tensor:
    """[R] int64 keys; the seeds are unsigned 64-bit numbers."""
    state = torch.tensor([signed(seed) for seed in seeds], device=device)
    for counters in (candidates, output_positions):
        state = finalise(state + (torch.tensor(counters, device=device) + 1) * signed(INCREMENT))
    return state


def finalise(words: Tensor) -> Tensor:
    """SplitMix64's output function, in place."""
    words ^= shift_right(words, 30)
    words *= signed(0xBF58476D1CE4E5B9)
    words ^= shift_right(words, 27)
    words *= signed(0x94D049BB133111EB)
    words ^= shift_right(words, 31)
    return words


def shift_right(words: Tensor, bits: int) -> Tensor:
    """The logical shift, which torch does not have: it fills with the sign."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def signed(word: int) -> int:
    """An unsigned 64-bit number as the int64 of the same bits."""
    return word - (1 << 64) if word >= 1 << 63 else word


@cache
def _steps(vocab_size: int, device: torch.device) -> Tensor:
    """[1, V]: what `nth` adds to the state for each token id."""
    return (torch.arange(1, vocab_size + 1, device=device) * signed(INCREMENT)).unsqueeze(0)
