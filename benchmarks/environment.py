"""Describes the machine and the versions of a measurement."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("millrace", "torch", "transformers", "triton", "redis", "rq", "msgspec", "pyzmq", "tokenizers")
INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "bf16")
"""As Linux names them. The benchmarks report which of these a CPU has."""


def describe(server_info: dict[str, Any]) -> dict[str, Any]:
    """Return commit, machine and versions for a result file. Unknown values are None."""
    status = _output("git", "status", "--porcelain")
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "rev-parse", "HEAD"),
        "is_dirty": None if status is None else bool(status),
        "machine": {
            "cpu": _cpu_model(),
            "num_cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "instruction_sets": _instruction_sets(),
            "memory_gib": _memory_gib(),
            "gpus": (gpus := _gpus()),
            "cuda": importlib.import_module("torch").version.cuda if gpus else None,
        },
        "python": platform.python_version(),
        "server": f"{server_info.get('server_name', 'redis')} {server_info.get('redis_version')}",
        "packages": {name: version_of(name) for name in PACKAGES},
    }


def python_path() -> str:
    """Return PYTHONPATH for programs of this checkout: with what this process has there, such as packages of wheels."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def run_module(name: str, *arguments: str, **variables: str) -> Any:
    """Run a module of this checkout as a program. Return the JSON that it prints."""
    command = [sys.executable, "-P", "-m", name, *arguments]
    environment = {**os.environ, "PYTHONPATH": python_path(), **variables}
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def _output(*command: str) -> str | None:
    """Return the output of a command. None if it does not exist or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _gpus() -> list[dict[str, str]]:
    """Return name, driver and memory of each GPU."""
    listed = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    fields = ("name", "driver", "memory")
    return [dict(zip(fields, line.split(", "), strict=False)) for line in (listed or "").splitlines()]


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.processor()


def _instruction_sets() -> list[str]:
    """Return those of INSTRUCTION_SETS that the CPU has."""
    flags = (_cpu_info("flags") or _cpu_info("Features") or "").split()
    return [name for name in INSTRUCTION_SETS if name in flags]


def _cpu_info(field: str) -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return None


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
