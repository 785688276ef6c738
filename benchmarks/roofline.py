"""The machine's measured rates, and the least time that they allow for a workload or a decode step.

Run as a program it measures the rates and prints them as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from benchmarks import models
from benchmarks.environment import run_module
from benchmarks.timing import best_s
from benchmarks.workloads import Workload

MEASURE_S = 0.5
"""For each rate."""
READ_BYTES = 512 * 2**20
"""Much more than a CPU's caches."""
PRODUCTS = ((256, 1024, 3072), (2048, 2048, 2048))
"""Rows, inputs and outputs of the measured matrix products. The best one counts."""


@dataclass(frozen=True)
class Shape:
    """What a model computes and reads."""

    layer_weights: int
    """Elements of all layers' matrices."""
    head_weights: int
    num_layers: int
    attention_width: int
    """Query heads x head size."""
    kv_elements: int
    """Per token, of all layers."""


def shape_of(model: str) -> Shape:
    """Return the shape of a Llama-like model."""
    config = models.read_config(model)
    hidden, layers, dim = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    width, kv_width = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    per_layer = hidden * (2 * width + 2 * kv_width) + 3 * hidden * config["intermediate_size"]
    return Shape(layers * per_layer, hidden * config["vocab_size"], layers, width, 2 * layers * kv_width)


def least_s(workload: Workload) -> float:
    """Return the least time for a round: each token through the layers once and each output token through the head,
    against all weights read once per step, and each sequence's keys and values once per token.

    A shared prefix is computed once, and read once per step.
    """
    shape, shared = shape_of(workload.model), workload.num_shared
    num_steps = max(request.num_output for request in workload.requests)
    products = shape.layer_weights * (workload.least_prefill_tokens + workload.num_output_tokens)
    products += shape.head_weights * workload.num_output_tokens
    attended, read = shared * (shared + 1) // 2, shared * num_steps
    for request in workload.requests:
        prompt, end = len(request.prompt), len(request.prompt) + request.num_output
        attended += _sum_between(shared, end)
        read += _sum_between(prompt, end) - shared * request.num_output
    num_bytes = num_steps * (shape.layer_weights + shape.head_weights) + read * shape.kv_elements
    return _bound_s(workload.dtype, 2 * products + 4 * shape.num_layers * shape.attention_width * attended, num_bytes)


def least_step_s(model: str, dtype: str, num_sequences: int, context: int) -> float:
    """Return the least time for a decode step."""
    return _bound_s(dtype, *step_work(model, num_sequences, context))


def step_work(model: str, num_sequences: int, context: int) -> tuple[int, int]:
    """Return the operations of a decode step, and the elements that it reads."""
    shape, kv_tokens = shape_of(model), num_sequences * context
    weights = shape.layer_weights + shape.head_weights
    operations = 2 * weights * num_sequences + 4 * shape.num_layers * shape.attention_width * kv_tokens
    return operations, weights + kv_tokens * shape.kv_elements


def _bound_s(dtype: str, operations: int, num_elements: int) -> float:
    """Return the time for the arithmetic, or for reading the elements, whichever is longer."""
    rates, itemsize = machine_rates(), {"float32": 4, "bfloat16": 2}[dtype]
    return max(operations / rates[f"{dtype}_gflops"], num_elements * itemsize / rates["read_gb_per_s"]) / 1e9


def _sum_between(begin: int, end: int) -> int:
    """Return the sum of begin + 1 ... end."""
    return (end * (end + 1) - begin * (begin + 1)) // 2


@cache
def machine_rates() -> dict[str, float]:
    """Return the rates of this machine, measured in a process of its own."""
    rates: dict[str, float] = run_module("benchmarks.roofline")
    return rates


def _measure() -> dict[str, Any]:
    import torch
    from torch.nn import functional as F

    figures: dict[str, Any] = {"threads": torch.get_num_threads()}
    values = torch.ones(READ_BYTES // 4)
    figures["read_gb_per_s"] = round(READ_BYTES / best_s(values.sum, MEASURE_S) / 1e9, 1)
    for dtype in (torch.float32, torch.bfloat16):
        best = 0.0
        for rows, inputs, outputs in PRODUCTS:
            left, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
            work: list[Callable[[], object]] = [partial(F.linear, left, weight)]
            has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            if has_onednn and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()):
                packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
                work.append(partial(torch.ops.mkldnn._linear_pointwise, left, packed, None, "none", [], ""))
            with torch.inference_mode():
                best = max(best, *(2 * rows * inputs * outputs / best_s(one, MEASURE_S) / 1e9 for one in work))
        figures[f"{str(dtype).removeprefix('torch.')}_gflops"] = round(best, 1)
    # Weights in bfloat16 can be multiplied in float32.
    figures["bfloat16_gflops"] = max(figures["bfloat16_gflops"], figures["float32_gflops"])
    return figures


if __name__ == "__main__":
    print(json.dumps(_measure()))
