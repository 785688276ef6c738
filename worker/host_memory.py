"""Memory of the host: how much is free, and what the C library keeps."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

KEPT_BYTES = 256 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""As in glibc's malloc.h."""
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc's maximum. Larger tensors are always mapped."""

_CGROUP = Path("/sys/fs/cgroup")
"""The container's own cgroup, version 2."""


def free_host_bytes() -> int:
    """Return the memory that this process can still take: that of the machine, or of the container when that is
    less."""
    free = [torch.iinfo(torch.int64).max]
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    files = (_lines(_CGROUP / "memory.max"), _lines(_CGROUP / "memory.current"))
    for limit, used in zip(*files, strict=False):
        if limit.isdecimal():
            free.append(max(int(limit) - int(used) + _page_cache_bytes(), 0))
    return min(free)


def _page_cache_bytes() -> int:
    """Return the bytes of files, such as the weights', that the container's usage includes and the kernel can
    reclaim."""
    return sum(int(line.split()[1]) for line in _lines(_CGROUP / "memory.stat") if line.startswith("inactive_file "))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def keep_freed_memory() -> None:
    """Make glibc keep up to KEPT_BYTES of freed memory. Does nothing with another C library.

    By default glibc unmaps large tensors at once, and each step maps them again: one page fault per 4 KiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
