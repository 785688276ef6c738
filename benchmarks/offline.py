"""Measures tokens per second of `LLM` without Redis, with the worker in a process of its own (`mp`) and in the same one
(`uni`), in turns. `benchmarks.workloads` describes the workloads.

`prefill_tokens` are the prompt tokens that were computed in a round, and `prefill_over_least` is their ratio to the prompts'
tokens with what they share counted once. `roofline_share` is the ratio of the tokens per second to what the machine's
measured rates allow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import roofline, workloads
from benchmarks.contenders import Contender, EngineKind, EngineProcess, Figures, prepare_model, rounds_of, run_in_turns
from benchmarks.options import Options

NUM_ROUNDS = 5
WORKLOADS = ("W1", "W2", "W3", "TINY")
MP = EngineKind("mp", "millrace", {"executor": "mp"})
UNI = EngineKind("uni", "millrace", {"executor": "uni"})


def measure(options: Options) -> dict[str, Any]:
    """Return all figures of this part, by workload and executor. W1 has `mp_random` too: W1 with random sampling."""
    figures: dict[str, Any] = {}
    for name, limit_s in rounds_of(options.workloads or WORKLOADS, options.limit_s):
        prepare_model(name, is_quick=options.is_quick)
        starts: dict[str, Callable[[], Contender]] = {
            kind.name: partial(EngineProcess, kind, name, is_quick=options.is_quick) for kind in (MP, UNI)
        }
        if name == "W1":
            starts["mp_random"] = partial(EngineProcess, MP, "W1-RANDOM", is_quick=options.is_quick)
        figures[name] = run_in_turns(starts, "mp", options.num_rounds, limit_s)
        for of_engine in figures[name].values():
            _add_bounds(of_engine, name, is_quick=options.is_quick)
    return figures


def _add_bounds(figures: Figures, name: str, *, is_quick: bool) -> None:
    workload = workloads.make(name, is_quick=is_quick)
    if "prefill_tokens" in figures:
        figures["prefill_over_least"] = round(figures["prefill_tokens"] / workload.least_prefill_tokens, 3)
    if "tokens_per_s" in figures:
        bound = workload.num_output_tokens / roofline.least_s(workload)
        figures["roofline_share"] = round(figures["tokens_per_s"] / bound, 3)
