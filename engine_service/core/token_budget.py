"""The number of tokens that a step may have: fewer after the device ran out of memory, then slowly more again."""

from __future__ import annotations

FLOOR_TOKENS = 16
GROW_EVERY_STEPS = 256
"""Successful steps in a row after which the budget grows by a quarter."""


class TokenBudget:
    """Owns the present limit of tokens in one step. It never exceeds the configured limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_good_steps = 0
        self.tokens = limit

    def shrink(self, num_tokens: int) -> bool:
        """Halve the budget after a step of `num_tokens` ran out of memory. Return False when it can't get smaller."""
        self._num_good_steps = 0
        halved = max(FLOOR_TOKENS, min(self.tokens, num_tokens) // 2)
        has_shrunk = halved < self.tokens
        self.tokens = min(self.tokens, halved)
        return has_shrunk

    def count_good_step(self) -> None:
        """Count a successful step, and grow the budget when it is time."""
        if self.tokens == self._limit:
            return
        self._num_good_steps += 1
        if self._num_good_steps >= GROW_EVERY_STEPS:
            self._num_good_steps = 0
            self.tokens = min(self._limit, self.tokens + max(1, self.tokens // 4))
