"""Times, and the confidence interval of a median."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence


def best_s(work: Callable[[], object], measure_s: float) -> float:
    """Return the shortest time of a call, of the calls within `measure_s`."""
    best, end_s = math.inf, time.perf_counter() + measure_s
    while time.perf_counter() < end_s or best == math.inf:
        began_s = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began_s)
    return best


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return bounds of the true median for any distribution of the values: two order statistics, by the binomial
    distribution of the number of values below the median (Conover, Practical Nonparametric Statistics, section 3.2).

    With fewer than 6 values these are the smallest and the largest, and the confidence is lower than 95 %.
    """
    ordered, tail, rank = sorted(values), 0.0, 0
    while (tail := tail + math.comb(len(ordered), rank) / 2 ** len(ordered)) <= (1 - confidence) / 2:
        rank += 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[-rank]
