"""Measures a second rank on one host: the same work on one rank, on two tensor parallel ranks and on two pipeline
stages, in turns.

Each rank has one compute thread. A single rank with two threads shows what the second core gives without a second rank.
`over_one_rank` are medians of the ratios of tokens per second of each round.
"""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import EngineKind, run_workloads
from benchmarks.options import Options

NUM_ROUNDS = 5
LIMIT_S = 600.0
RANKS: dict[str, dict[str, int]] = {"one_rank": {}, "one_rank_of_two_threads": {}}
RANKS |= {f"{kind}_parallel_2": {f"{kind}_parallel_size": 2} for kind in ("tensor", "pipeline")}


def measure(options: Options) -> dict[str, Any]:
    """Return all figures of this part, by workload and arrangement of the ranks."""
    kinds = [
        EngineKind(
            name,
            "millrace",
            {"executor": "mp", **sizes},
            variables={"OMP_NUM_THREADS": "2" if name.endswith("two_threads") else "1"},
        )
        for name, sizes in RANKS.items()
    ]
    return run_workloads(options, ("W1",), lambda _: [kinds])
