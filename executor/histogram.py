"""Histograms: counts of values by bucket, which can be added up over engines and over time."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

STEP_BOUNDS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""The bounds for what happens within a step."""


class Histogram(msgspec.Struct):
    """Owns the counts of one kind of value. One thread adds; others may copy."""

    bounds: tuple[float, ...]
    """The largest value of each bucket but the last, which has no bound."""
    counts: list[int] = []
    total: float = 0.0
    """The sum of the values."""

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
