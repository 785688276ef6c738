"""Measures the CPU's kernels as the worker calls them: for each instruction set of this machine and for torch alone, with
one thread and with all. Each combination runs in a process of its own, in turns; the shortest time of all rounds counts.

Figures of a kernel: the time, the rate in GFLOP/s (arithmetic) or GB/s (memory), and `over_torch`, torch's time divided by
the kernel's. Small operands are in the CPU's cache.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.environment import run_module
from benchmarks.options import Options

NUM_ROUNDS = 3
Cases = dict[str, dict[str, Any]]
"""As `benchmarks.kernel_cases` prints them."""


def measure(options: Options) -> dict[str, Any]:
    """Return the figures by instruction set, number of threads and kernel."""
    sets, threads = _instruction_sets(), sorted({1, len(os.sched_getaffinity(0))})
    if options.is_quick:
        sets, threads = sets[:1], [1]
    arguments = ["--quick"] if options.is_quick else []
    best: dict[tuple[str, int], Cases] = {}
    for _ in range(options.num_rounds):
        for key in ((one, number) for number in threads for one in (*sets, "none")):
            variables = {"MILLRACE_KERNELS": key[0], "OMP_NUM_THREADS": str(key[1])}
            cases: Cases = run_module("benchmarks.kernel_cases", *arguments, **variables)
            for name, case in cases.items():
                known = best.setdefault(key, {}).setdefault(name, case)
                known["us"] = min(known["us"], case["us"])
    return {f"{one}_{number}_threads": _rates(best[one, number], best["none", number]) for one, number in best}


def _rates(cases: Cases, of_torch: Cases) -> Cases:
    return {
        name: {
            "us": round(one["us"], 1),
            one["unit"]: round(one["amount"] / one["us"] / 1e3, 2),
            "over_torch": round(
                of_torch[name.removesuffix("_int8").removesuffix("_gptq")]["us"] / one["us"], 3
            ),  # torch has the exact weights
        }
        for name, one in cases.items()
    }


def _instruction_sets() -> list[str]:
    """Return what the library has for this machine; nothing if there is no library."""
    from millrace.worker.kernels import library

    try:
        return library.supported_instruction_sets(library.load_library(Path(library.__file__).parent))
    except (OSError, AttributeError) as error:
        print(f"measuring torch alone: {error}", file=sys.stderr)
        return []
