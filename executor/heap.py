"""What the C library keeps of freed memory."""

from __future__ import annotations

import ctypes


def release_freed_memory() -> None:
    """Return the memory that this process has freed to the system. Does nothing with another C library than glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
