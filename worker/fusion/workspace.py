"""The buffers of a forward pass."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Owns the buffers of a forward pass. They grow to the largest step."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._device = device
        self._buffers: dict[tuple[str, int], Tensor] = {}
        """By name and width, which may differ between layers."""
        self._rows: dict[tuple[str, int], Tensor] = {}
        """What was returned last. In steady decode the number of rows stays."""
        self.num_made = 0
        """Counts up when buffers are made or dropped. While it stays, so do their addresses."""

    def rows(self, name: str, num_rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer [num_rows, width] with any contents, of the model's dtype if `dtype` is None."""
        rows = self._rows.get((name, width))
        if rows is not None and len(rows) == num_rows:
            return rows
        buffer = self._buffers.get((name, width))
        if buffer is None or len(buffer) < num_rows:
            self.num_made += 1
            shape = -(-num_rows // 64) * 64, width
            buffer = torch.empty(shape, dtype=dtype or self.dtype, device=self._device)
            self._buffers[name, width] = buffer
        rows = self._rows[name, width] = buffer[:num_rows]
        return rows

    def clear(self) -> None:
        """Drop the buffers. They come back, at other addresses, when they are asked for."""
        self._buffers.clear()
        self._rows.clear()
        self.num_made += 1
