"""What the parts of a benchmark get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import models
from benchmarks.workloads import LLAMA, TINY_MODEL


@dataclass(frozen=True)
class Options:
    """The options of the command line, and the server of this run."""

    url: str
    """Of a private Redis."""
    num_rounds: int
    is_quick: bool = False
    """Whether to do only so much work that one sees the part run, with the tiny model."""
    limit_s: float = 600.0
    """Time for a part that runs engines in turns."""
    workloads: Sequence[str] = ()
    """Empty: the part's own."""
    engines: Sequence[str] = ()
    """Of the part `peers`. Empty: all that are installed."""

    @property
    def model(self) -> Path:
        """The model of parts that need just one; it is made if it is missing."""
        return models.find(TINY_MODEL if self.is_quick else LLAMA)
