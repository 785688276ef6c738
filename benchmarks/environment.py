"""Where and with what a measurement was made."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("millrace", "torch", "transformers", "redis", "rq", "msgspec", "pyzmq", "tokenizers")


def describe(server_info: dict[str, Any]) -> dict[str, Any]:
    """Commit, machine and versions, for the head of a result file."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "is_dirty": bool(_git("status", "--porcelain")),
        "machine": {"cpu": _cpu_model(), "num_cores": os.cpu_count(), "memory_gib": _memory_gib()},
        "python": platform.python_version(),
        "server": f"{server_info.get('server_name', 'redis')} {server_info.get('redis_version')}",
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
