"""Measures tokens per second of `LLM` without Redis, with the worker in a process of its own (`mp`) and in the same one
(`uni`), in turns. `benchmarks.workloads` describes the workloads. `mp_random` is W1 with random sampling.

`prefill_tokens` are the prompt tokens that were computed in a round, and `prefill_over_least` is their ratio to the prompts'
tokens with what they share counted once. `roofline_share` is the ratio of the tokens per second to what the machine's
measured rates allow.
"""

from __future__ import annotations

from typing import Any

from benchmarks import roofline, workloads
from benchmarks.contenders import EngineKind, run_workloads
from benchmarks.options import Options

NUM_ROUNDS = 5
LIMIT_S = 600.0
WORKLOADS = ("W1", "W2", "W3", "TINY")
MP = EngineKind("mp", "millrace", {"executor": "mp"})
UNI = EngineKind("uni", "millrace", {"executor": "uni"})
RANDOM = EngineKind("mp_random", "millrace", {"executor": "mp", "temperature": 0.8, "top_p": 0.95})


def measure(options: Options) -> dict[str, Any]:
    """Return all figures of this part, by workload and executor."""
    figures = run_workloads(options, WORKLOADS, lambda name: [[MP, UNI, *([RANDOM] if name == "W1" else [])]])
    for name, engines in figures.items():
        workload = workloads.make(name, is_quick=options.is_quick)
        for engine in engines.values():
            if "prefill_tokens" in engine:
                engine["prefill_over_least"] = round(engine["prefill_tokens"] / workload.least_prefill_tokens, 3)
                bound = workload.num_output_tokens / roofline.least_s(workload)
                engine["roofline_share"] = round(engine["tokens_per_s"] / bound, 3)
    return figures
