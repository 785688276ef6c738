"""Which device and number format a rank uses, and how much memory is free there."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch

from millrace.worker.errors import ConfigError, DeviceError

logger = logging.getLogger("millrace.worker")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

KEPT_BYTES = 256 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""As in malloc.h."""
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""More is refused: larger tensors come from the kernel in any case."""

_CGROUP = Path("/sys/fs/cgroup")
"""The container's own, of version 2."""


def choose_device(name: str, rank: int = 0) -> torch.device:
    """The device for "auto", "cpu", "cuda" or "cuda:N", made current when it is a GPU.

    Without a number, the ranks take the visible GPUs one after the other, on each host from the first one on.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda" and not (name.startswith("cuda:") and name[5:].isdecimal()):
        raise ConfigError(f'unknown device "{name}": use "auto", "cpu", "cuda" or "cuda:N"')
    if not torch.cuda.is_available():
        raise DeviceError(
            f'device "{name}" was asked for, but torch sees no GPU: check the driver, or use device "cpu"'
        )
    device = torch.device(name if ":" in name else f"cuda:{rank % torch.cuda.device_count()}")
    if device.index >= torch.cuda.device_count():
        raise DeviceError(f'device "{name}" does not exist: torch sees {torch.cuda.device_count()} GPUs')
    torch.cuda.set_device(device)
    return device


def choose_dtype(name: str, checkpoint_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The number format of weights and activations; "auto" follows the checkpoint where the device computes in it."""
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError(f'unknown dtype "{name}": use "auto", {", ".join(map(repr, DTYPES))}'.replace("'", '"'))
        return DTYPES[name]
    if device.type == "cpu" and checkpoint_dtype == torch.float16:
        logger.info("the checkpoint is float16, which a CPU computes slowly: running in float32")
        return torch.float32
    return checkpoint_dtype


def free_host_bytes() -> int:
    """Memory that this process could still take: the machine's, or its container's when that is less."""
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
    """What the container's use counts of files that were read, such as the weights', and that the kernel gives back when
    memory is wanted."""
    return sum(int(line.split()[1]) for line in _lines(_CGROUP / "memory.stat") if line.startswith("inactive_file "))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def keep_freed_memory() -> None:
    """Have glibc keep what a step on the CPU has freed for the next one, up to KEPT_BYTES. Left to itself it gives large
    tensors back to the kernel at once and takes them anew a moment later, which is a page fault every 4 KiB: hundreds a
    step. Other C libraries don't know the call."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
