"""Figures of the jobs of an engine, for metrics."""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.executor.metrics import Percentiles

Outcome = Literal["finished", "failed", "cancelled", "expired", "released", "lost"]
"""How a job left this engine: it ended, went back to the queue ("released"), or went to another engine ("lost")."""


class JobMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures since the start of the engine."""

    num_open: int
    num_by_outcome: dict[Outcome, int]
    """A job that fails and is tried again counts each time."""
    job_s: Percentiles
    """From a job's arrival in the engine until it left."""
