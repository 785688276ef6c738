"""Measures tokens per second of `LLM` without Redis, with the worker in a process of its own (`mp`) and in the same one
(`uni`), in turns. `benchmarks.workloads` describes the workloads. `mp_int8` is W2 with weights in 8 bits, `mp_gptq` with
those of W6, `mp_random` is W1 with random sampling. `mp_quarter_pool` and `mp_quarter_pool_swap` have a quarter of the KV
blocks that W1 needs, so sequences are preempted. The first one computes their keys and values again, the second one swaps
them. W1-SCHEMAS, on request, compares free outputs with those that follow one JSON schema (`mp_schema`) and each one of 64
(`mp_64_schemas`), greedy and random.

`prefill_tokens` are the prompt tokens that were computed in a round, and `prefill_over_least` is their ratio to the prompts'
tokens with what they share counted once. `roofline_share` is the ratio of the tokens per second to what the machine's
measured rates allow.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks import roofline, workloads
from benchmarks.contenders import EngineKind, run_workloads
from benchmarks.options import Options

NUM_ROUNDS = 5
LIMIT_S = 600.0
BLOCK_SIZE = 16
WORKLOADS = ("W1", "W2", "W3", "TINY")
MP = EngineKind("mp", "millrace", {"executor": "mp"})
UNI = EngineKind("uni", "millrace", {"executor": "uni"})
INT8 = EngineKind("mp_int8", "millrace", {"executor": "mp", "quantization": "int8"})
GPTQ = EngineKind("mp_gptq", "millrace", {"executor": "mp", "other_model": workloads.QWEN_GPTQ})
RANDOM = EngineKind("mp_random", "millrace", {"executor": "mp", "temperature": 0.8, "top_p": 0.95})

SCHEMAS = [
    EngineKind(f"{base.name}_{suffix}", "millrace", {**base.options, "num_schemas": count})
    for base in (MP, RANDOM)
    for count, suffix in ((1, "schema"), (64, "64_schemas"))
]


def measure(options: Options) -> dict[str, Any]:
    """Return all figures of this part, by workload and executor."""
    figures = run_workloads(options, WORKLOADS, partial(_groups, is_quick=options.is_quick))
    for name, engines in figures.items():
        workload = workloads.make(name, is_quick=options.is_quick)
        for engine in engines.values():
            if "prefill_tokens" in engine:
                engine["prefill_over_least"] = round(engine["prefill_tokens"] / workload.least_prefill_tokens, 3)
                bound = workload.num_output_tokens / roofline.least_s(workload)
                engine["roofline_share"] = round(engine["tokens_per_s"] / bound, 3)
    return figures


def _groups(name: str, *, is_quick: bool) -> list[list[EngineKind]]:
    if name == "W1-SCHEMAS":
        return [[MP, RANDOM, *SCHEMAS]]
    if name != "W1":
        return [[MP, UNI, INT8, GPTQ] if name == "W2" else [MP, UNI]]
    workload = workloads.make(name, is_quick=is_quick)
    num_needed = sum(-(-(len(one.prompt) + one.num_output) // BLOCK_SIZE) for one in workload.requests)
    small = {"executor": "mp", "num_blocks": 1 + max(num_needed, 4 * workload.max_model_len // BLOCK_SIZE) // 4}
    recompute = EngineKind("mp_quarter_pool", "millrace", small)
    swap = EngineKind(
        "mp_quarter_pool_swap", "millrace", {**small, "swap_space_gib": 1}, variables={"MILLRACE_FORCE_SWAP": "1"}
    )
    return [[MP, UNI, RANDOM], [MP, recompute, swap]]
