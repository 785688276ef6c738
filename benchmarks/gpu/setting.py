"""What the parts of the measurement of a GPU get and yield."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

Figures = dict[str, Any]
Part = Iterator[tuple[str, Any]]
"""What a part yields: names and figures, as soon as they are known. A later figure replaces one of the same name."""


class Setting(NamedTuple):
    """Where and how much to measure."""

    device: str
    is_quick: bool
    """Whether to do only so much work that one sees the parts run."""
    limit_s: float = math.inf
    """Time for the part."""

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"
