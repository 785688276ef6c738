"""Memory of the host: how much is free, and what the C library keeps."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

KEPT_BYTES = 256 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""As in glibc's malloc.h."""
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc's maximum. Larger tensors are always mapped."""

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
"""As in Linux's mman.h."""

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


def total_host_bytes() -> int:
    """Return the memory of the machine, or of the container when that is less."""
    limits = [int(line) for line in _lines(_CGROUP / "memory.max") if line.isdecimal()]
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *limits])


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


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask Linux to back a tensor on the host with pages of 2 MiB: reads of scattered KV blocks are about 1.3 times as fast.
    Does nothing where it cannot. As before, a page takes memory only after the first write to it."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    begin = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if madvise is not None and begin < end:
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
