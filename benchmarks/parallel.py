"""What a second rank brings on one host: the same work on one rank, on two that divide each layer (tensor parallel) and on
two stages (pipeline parallel), in turns.

Work and model are those of `benchmarks.generation`. Every rank has one compute thread, but for one that has two, which is
what the second core brings without a second rank. Ratios of tokens per second are medians over the rounds.
"""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.generation import make_work, run_offline
from millrace import LLM

NUM_ROUNDS = 7
SIZES: dict[str, dict[str, int]] = {
    "one_rank": {},
    "one_rank_of_two_threads": {},
    "tensor_parallel_2": {"tensor_parallel_size": 2},
    "pipeline_parallel_2": {"pipeline_parallel_size": 2},
}


def measure(model: Path) -> dict[str, Any]:
    """All figures of this file."""
    with ExitStack() as stack:
        llms = {name: stack.enter_context(_start(model, name)) for name in SIZES}
        for llm in llms.values():
            run_offline(llm, seed=1000)
        rounds = [{name: run_offline(llm, seed) for name, llm in llms.items()} for seed in range(NUM_ROUNDS)]
    num_tokens = sum(request.sampling.max_tokens or 0 for request in make_work(0))
    figures: dict[str, Any] = {}
    for name in SIZES:
        ratios = [one["one_rank"] / one[name] for one in rounds]
        figures[f"{name}_tokens_per_s"] = round(num_tokens / statistics.median(one[name] for one in rounds), 1)
        if name != "one_rank":
            figures[f"{name}_over_one_rank"] = round(statistics.median(ratios), 4)
            figures[f"{name}_ratios"] = [round(ratio, 4) for ratio in ratios]
    return figures


def _start(model: Path, name: str) -> LLM:
    """The ranks take their number of threads from the environment of their start."""
    before = os.environ["OMP_NUM_THREADS"]
    os.environ["OMP_NUM_THREADS"] = "2" if name.endswith("two_threads") else "1"
    try:
        return LLM(model=model, device="cpu", executor="mp", **SIZES[name])  # type: ignore[arg-type]
    finally:
        os.environ["OMP_NUM_THREADS"] = before
