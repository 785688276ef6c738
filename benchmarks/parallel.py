"""Measures a second rank on one host: the same work on one rank, on two tensor parallel ranks and on two pipeline
stages, in turns.

Work and model are those of `benchmarks.generation`. Each rank has one compute thread. A single rank with two threads
shows what the second core gives without a second rank. Ratios of tokens per second are medians over the rounds.
"""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.generation import NUM_REQUESTS, QUICK_REQUESTS, count_tokens, run_offline
from millrace import LLM

NUM_ROUNDS = 7
SIZES: dict[str, dict[str, int]] = {
    "one_rank": {},
    "one_rank_of_two_threads": {},
    "tensor_parallel_2": {"tensor_parallel_size": 2},
    "pipeline_parallel_2": {"pipeline_parallel_size": 2},
}


def measure(url: str, model: Path, num_rounds: int, *, is_quick: bool = False) -> dict[str, Any]:
    """Return all figures of this part. `url` is not used."""
    num_requests = QUICK_REQUESTS if is_quick else NUM_REQUESTS
    with ExitStack() as stack:
        llms = {name: stack.enter_context(_start(model, name)) for name in SIZES}
        for llm in llms.values():
            run_offline(llm, 1000, num_requests)
        rounds = [
            {name: run_offline(llm, seed, num_requests) for name, llm in llms.items()} for seed in range(num_rounds)
        ]
    num_tokens = count_tokens(num_requests)
    figures: dict[str, Any] = {}
    for name in SIZES:
        ratios = [seconds["one_rank"] / seconds[name] for seconds in rounds]
        figures[f"{name}_tokens_per_s"] = round(num_tokens / statistics.median(seconds[name] for seconds in rounds), 1)
        if name != "one_rank":
            figures[f"{name}_over_one_rank"] = round(statistics.median(ratios), 4)
            figures[f"{name}_ratios"] = [round(ratio, 4) for ratio in ratios]
    return figures


def _start(model: Path, name: str) -> LLM:
    """Start the ranks with the number of threads in their environment."""
    before = os.environ["OMP_NUM_THREADS"]
    os.environ["OMP_NUM_THREADS"] = "2" if name.endswith("two_threads") else "1"
    try:
        return LLM(model=model, device="cpu", executor="mp", **SIZES[name])  # type: ignore[arg-type]
    finally:
        os.environ["OMP_NUM_THREADS"] = before
