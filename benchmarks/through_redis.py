"""Measures a service against `LLM`, both with the worker in a process of its own: the same workloads in turns, through Redis
and offline. `over_offline` is the ratio of tokens per second.

Also the service's time from its start to the first token of a waiting job, and the CPU time that it takes when it is idle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.contenders import EngineKind, run_workloads
from benchmarks.offline import MP
from benchmarks.options import Options

NUM_ROUNDS = 5
LIMIT_S = 600.0
WORKLOADS = ("W1", "W2", "W3")


def measure(options: Options) -> dict[str, Any]:
    """Return all figures of this part, by workload."""
    idle = {"idle_s": 1.0} if options.is_quick else {}
    pair = [replace(MP, name="offline"), EngineKind("redis", "millrace", {"url": options.url, **idle})]
    return run_workloads(options, WORKLOADS, lambda _: [pair])
