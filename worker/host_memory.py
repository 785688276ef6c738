"""Memory of the host: how much is free, and what the C library keeps."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

import torch

from millrace.worker.cgroup import memory_limits, read_lines

KEPT_BYTES = 256 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""As in glibc's malloc.h."""
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc's maximum. Larger tensors are always mapped."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
"""As in Linux's mman.h."""


def free_host_bytes() -> int:
    """Return the memory that this process can still take: that of the machine, or less with a limit."""
    free = [torch.iinfo(torch.int64).max, *(free for _, free in memory_limits())]
    for line in read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for limit in _address_space():
        free.extend(max(limit - int(line.split()[0]) * _PAGE_BYTES, 0) for line in read_lines(Path("/proc/self/statm")))
    return min(free)


def total_host_bytes() -> int:
    """Return the memory of the machine, or the smallest limit when that is less."""
    limits = [*(limit for limit, _ in memory_limits()), *_address_space()]
    return min([os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES, *limits])


def _address_space() -> list[int]:
    """Return the limit of the address space (`ulimit -v`) in bytes, if there is one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return [] if limit == resource.RLIM_INFINITY else [limit]


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
