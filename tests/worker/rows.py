"""Rows for tests of the sampler."""

from __future__ import annotations

import torch

from millrace.executor.wire.messages import RowSampling
from millrace.worker.sampling_rows import SamplingRows, SamplingTable

Row = tuple[RowSampling, int]
"""The settings of a row and its output position."""


def sampling_rows(rows: list[Row]) -> SamplingRows:
    table = SamplingTable(len(rows))
    for slot, (sampling, _) in enumerate(rows):
        table.set(slot, sampling)
    return table.rows(torch.arange(len(rows)), torch.tensor([position for _, position in rows]))
