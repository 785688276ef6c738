"""The limits of this process's control groups, version 1 or 2: of its own group and of those around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
"""Where /proc and /sys are."""

_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of version 2 and of version 1: limit, usage, and in memory.stat the files, such as the weights', that the usage includes
and the kernel can reclaim."""


def cpu_quota() -> float | None:
    """Return how many CPUs this process may use at once, on average over a period. None without a limit."""
    quotas = []
    for group in _groups("cpu"):
        names = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # the first has both numbers, in version 2
        words = [word for name in names for line in read_lines(group / name) for word in line.split()]
        if len(words) == 2 and all(map(str.isdecimal, words)):  # else the quota is "max" or -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limits() -> list[tuple[int, int]]:
    """Return each limit in bytes, and how many bytes are free below it."""
    limits = []
    for group in _groups("memory"):
        for limit_file, usage_file, cache in _MEMORY_FILES:
            for limit, used in zip(read_lines(group / limit_file), read_lines(group / usage_file), strict=False):
                if limit.isdecimal():  # else "max"
                    free = int(limit) - int(used) + _number_in(group / "memory.stat", cache)
                    limits.append((int(limit), max(free, 0)))
    return limits


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file, none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number_in(path: Path, name: str) -> int:
    return sum(int(line.split()[1]) for line in read_lines(path) if line.startswith(f"{name} "))


def _groups(controller: str) -> Iterator[Path]:
    """Yield the directories of the groups that may limit "cpu" or "memory", the process's own first. In a container the
    path may be that of the host, and only the last directory, the root of the mount, exists."""
    for line in read_lines(ROOT / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)  # "4:cpu,cpuacct:/a/b", in version 2 "0::/a/b"
        if controllers and controller not in controllers.split(","):
            continue
        names = path.strip("/").split("/")
        for mount in ("unified", "") if not controllers else (controller,):
            top = ROOT / "sys/fs/cgroup" / mount
            yield from (top.joinpath(*names[:depth]) for depth in range(len(names), -1, -1))
