"""Measures the kernels that the environment chooses, on this process's threads. Prints their times as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from typing import Any

import torch

from benchmarks import batches
from benchmarks.models import GPTQ_GROUP
from benchmarks.timing import best_s
from millrace.executor.wire.messages import LogitsSettings
from millrace.worker import import_modules
from millrace.worker.kv_pool import KVPool, LayerSpec
from millrace.worker.linear.choice import pack_linear, round_inputs
from millrace.worker.linear.codes import CodedWeight, Codes
from millrace.worker.linear.packed import CompiledLinear
from millrace.worker.sampler import sample

MEASURE_S, QUICK_S = 0.3, 0.01
"""For each kernel."""
CPU = torch.device("cpu")
ATTENTION = {"mha": (6, 6, 64, "float32"), "gqa": (16, 8, 128, "bfloat16")}
"""Query heads, key heads, head size and dtype."""
ROWS = {"decode": (32, 512, 1), "chunk": (2, 512, 512)}
"""Rows, their lengths, and the tokens that each feeds."""
MATRICES = ((288, 1536, "float32"), (1024, 3072, "float32"), (1024, 3072, "bfloat16"))
MATRIX_ROWS = (1, 32, 256)
HEAD = (32, 288)
"""Rows and inputs of the head, whose largest outputs are computed."""
SAMPLED_ROWS, QUICK_SAMPLED_ROWS, VOCAB_SIZE = 256, 8, 32_000
NUM_TOKENS = 300
"""Of each sequence with penalties, half of them in the prompt."""


Case = tuple[str, str, float, Callable[[], object]]
"""Name, unit, operations or bytes of one call, and the call."""


def _attention_cases() -> Iterator[Case]:
    from millrace.worker.attention.select import choose_attention  # behind `import_modules`

    attention = choose_attention("auto", CPU)
    for kind, (heads, kv_heads, dim, dtype_name) in ATTENTION.items():
        dtype = getattr(torch, dtype_name)
        for rows, (num_rows, length, num_fed) in ROWS.items():
            batch, num_blocks = batches.batch([length] * num_rows, num_fed, CPU)
            spec = LayerSpec(0, kv_heads, dim, dim, None)
            layer = KVPool([spec], num_blocks, batches.BLOCK_SIZE, dtype, CPU).layers[0]
            layer.keys.normal_()
            layer.values.normal_()
            num_tokens = num_rows * num_fed
            query = torch.randn(heads, num_tokens, dim).to(dtype)
            key, value = (torch.randn(kv_heads, num_tokens, dim).to(dtype) for _ in range(2))
            run = partial(_attend, attention, batch, (query, key, value), layer, dim**-0.5)
            name = f"attention_{rows}_{kind}_{dtype_name}"
            if num_fed == 1:
                yield name, "gb_per_s", 2.0 * num_rows * length * kv_heads * dim * dtype.itemsize, run
            else:
                attended = num_rows * (num_fed * length - num_fed * (num_fed - 1) // 2)
                yield name, "gflops", 4.0 * attended * heads * dim, run


def _attend(attention: Any, batch: Any, tokens: Any, layer: Any, scaling: float) -> object:
    batch.derived.clear()
    return attention.forward(*tokens, layer, scaling, None, None, batch)


def _linear_cases() -> Iterator[Case]:
    for inputs, outputs, dtype_name in MATRICES:
        dtype = getattr(torch, dtype_name)
        layer = pack_linear([torch.randn(outputs, inputs).to(dtype)])
        quantized = pack_linear([torch.randn(outputs, inputs).to(dtype)])
        layers = [(layer, dtype_name)]
        if isinstance(quantized, CompiledLinear):
            quantized.quantize()
            layers.append((quantized, f"{dtype_name}_int8"))
            coded = pack_linear([CodedWeight(_gptq_codes(outputs, inputs), dtype)])
            round_inputs([coded])
            layers.append((coded, f"{dtype_name}_gptq"))
        for num_rows, (layer, kind) in product(MATRIX_ROWS, layers):
            rows = torch.randn(num_rows, inputs).to(dtype)
            name = f"linear_{num_rows}x{inputs}x{outputs}_{kind}"
            if num_rows == 1:
                yield name, "gb_per_s", layer.weights.nbytes, partial(layer.forward, rows)
            else:
                yield name, "gflops", 2.0 * num_rows * inputs * outputs, partial(layer.forward, rows)
    num_rows, inputs = HEAD
    head, rows = pack_linear([torch.randn(VOCAB_SIZE, inputs)]), torch.randn(num_rows, inputs)
    run = partial(head.argmax, rows) if isinstance(head, CompiledLinear) else lambda: head.forward(rows).max(dim=-1)
    yield f"head_argmax_{num_rows}x{inputs}x{VOCAB_SIZE}_float32", "gflops", 2.0 * num_rows * inputs * VOCAB_SIZE, run


def _gptq_codes(outputs: int, inputs: int) -> Codes:
    """Codes of 4 bits in groups of GPTQ_GROUP, or in one."""
    size = GPTQ_GROUP if inputs % GPTQ_GROUP == 0 else inputs
    codes = torch.randint(256, (outputs, inputs // 2)).to(torch.uint8)
    scales = torch.rand(outputs, inputs // size)
    return Codes(codes, torch.arange(-8.0, 8.0), scales, None, (torch.arange(inputs) // size).int())


def _sampling_cases(num_rows: int) -> Iterator[Case]:
    logits = 2 * torch.randn(num_rows, VOCAB_SIZE)
    token_ids = torch.randint(VOCAB_SIZE, (NUM_TOKENS,)).tolist()
    penalties = LogitsSettings(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1)
    for name, temperature, processors in (("argmax", 0.0, None), ("draw", 0.8, None), ("penalties", 0.0, penalties)):
        kind = batches.settings(temperature, top_p=0.95, processors=processors)
        rows = batches.sampling_rows(num_rows, CPU, kind, token_ids, NUM_TOKENS // 2)
        yield f"{name}_{num_rows}x{VOCAB_SIZE}", "gb_per_s", logits.nbytes, partial(sample, logits, rows)


def main() -> None:
    """Measure all cases."""
    import_modules()  # as in a rank, which takes half the time
    measure_s, num_sampled = (QUICK_S, QUICK_SAMPLED_ROWS) if "--quick" in sys.argv else (MEASURE_S, SAMPLED_ROWS)
    times = {}
    with torch.inference_mode():
        for name, unit, amount, run in chain(_attention_cases(), _linear_cases(), _sampling_cases(num_sampled)):
            times[name] = {"us": best_s(run, measure_s) * 1e6, "unit": unit, "amount": amount}
    print(json.dumps(times))


if __name__ == "__main__":
    main()
