"""The buffers of a forward pass."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Owns the buffers of a forward pass. They grow to the largest step."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._device = device
        self._buffers: dict[str, Tensor] = {}
        self._rows: dict[str, Tensor] = {}
        """What was returned last. In steady decode the number of rows stays."""
        self.num_made = 0
        """Counts up when buffers are made or dropped. While it stays, so do their addresses."""

    def rows(self, name: str, num_rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer [num_rows, width] with any contents, of the model's dtype if `dtype` is None."""
        rows = self._rows.get(name)
        if rows is not None and rows.shape == (num_rows, width):
            return rows
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < num_rows or buffer.shape[1] != width:
            self.num_made += 1
            shape = -(-num_rows // 64) * 64, width
            buffer = self._buffers[name] = torch.empty(shape, dtype=dtype or self.dtype, device=self._device)
        rows = self._rows[name] = buffer[:num_rows]
        return rows

    def clear(self) -> None:
        """Drop the buffers. They come back, at other addresses, when they are asked for."""
        self._buffers.clear()
        self._rows.clear()
        self.num_made += 1
