"""Measures a second rank on one host: the same work on one rank, on two tensor parallel ranks and on two pipeline
stages, in turns.

Each rank has one compute thread. A single rank with two threads shows what the second core gives without a second rank.
Work: W1. `over_one_rank` are medians of the ratios of tokens per second of each round.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.contenders import EngineKind, EngineProcess, prepare_model, run_in_turns
from benchmarks.options import Options

NUM_ROUNDS = 5
WORKLOAD = "W1"
SIZES: dict[str, dict[str, int]] = {
    "one_rank": {},
    "one_rank_of_two_threads": {},
    "tensor_parallel_2": {"tensor_parallel_size": 2},
    "pipeline_parallel_2": {"pipeline_parallel_size": 2},
}


def measure(options: Options) -> dict[str, Any]:
    """Return all figures of this part, by arrangement of the ranks."""
    prepare_model(WORKLOAD, is_quick=options.is_quick)
    starts = {}
    for name, sizes in SIZES.items():
        threads = {"OMP_NUM_THREADS": "2" if name.endswith("two_threads") else "1"}
        kind = EngineKind(name, "millrace", {"executor": "mp", **sizes}, variables=threads)
        starts[name] = partial(EngineProcess, kind, WORKLOAD, is_quick=options.is_quick)
    return run_in_turns(starts, "one_rank", options.num_rounds, options.limit_s)
