"""The rates of a GPU, and its kernels of attention and sampling."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import batches
from benchmarks.gpu.measuring import Case, Work, copy_gb_per_s, measure_cases, product_tflops
from benchmarks.gpu.setting import Part, Setting
from millrace.worker.sampling_rows import SamplingRows

NUM_HEADS, NUM_KV_HEADS = 16, 8
"""Heads of Qwen3-0.6B."""
KINDS = {
    "greedy": (0.0, 0, 1.0),
    "temperature": (0.6, 0, 1.0),
    "top-k": (0.6, 50, 1.0),
    "top-p": (0.6, 0, 0.9),
    "top-k and top-p": (0.6, 20, 0.95),
}
"""Temperature, top_k and top_p."""


def rates(setting: Setting) -> Part:
    """Measure the two lines of the roofline."""
    yield "tflops", round(product_tflops(setting), 3)
    yield "copy_gb_per_s", round(copy_gb_per_s(setting), 1)


def attention(setting: Setting) -> Part:
    """Measure one layer's attention: 64 rows that decode at a context of 1,024, the same with a long one among them, and
    the chunk of a prompt."""
    from millrace.worker.attention.reference import ReferenceAttention
    from millrace.worker.attention.select import choose_attention

    device, dtype = torch.device(setting.device), getattr(torch, setting.dtype)
    num_rows, context, longest, chunk = (3, 40, 300, 24) if setting.is_quick else (64, 1024, 32_768, 2048)
    implementation, copy = choose_attention("auto", device), copy_gb_per_s(setting)
    yield "implementation", implementation.name
    yield "copy_gb_per_s", round(copy, 1)
    kinds = [(f"decode of {num_rows}, head size {size}", size, [context] * num_rows, 1) for size in (64, 128)]
    kinds += [(f"prefill of {chunk}, head size {size}", size, [chunk], chunk) for size in (64, 128)]
    kinds += [(f"decode of {num_rows}, one of {longest}", 128, [longest, *[context] * (num_rows - 1)], 1)]
    cases = {}
    for name, head_size, lengths, fed in kinds:
        heads = NUM_HEADS, NUM_KV_HEADS, head_size
        *tensors, layer, batch = batches.attention_inputs(lengths, fed, heads, dtype, device)
        query = tensors[0]
        arguments: tuple[Any, ...] = (*tensors, layer, head_size**-0.5, None, None, batch)
        output = implementation.forward(*arguments).float()
        error = (output - ReferenceAttention().forward(*arguments).float()).abs().max().item()
        attended = sum(sum(range(length - fed + 1, length + 1)) for length in lengths)
        num_elements = 2 * sum(lengths) * NUM_KV_HEADS * head_size + 2 * query.numel()
        # Triton's attention alone; a fused decoder writes the keys and values in another kernel.
        attend = getattr(implementation, "attend", None)
        work = partial(attend, query, *arguments[3:]) if attend else partial(implementation.forward, *arguments)
        operations = 4 * NUM_HEADS * head_size * attended
        cases[name] = Case(work, operations, num_elements * dtype.itemsize, {"max_error": round(error, 5)})
    yield from measure_cases(cases, copy, setting)


def sampling(setting: Setting) -> Part:
    """Measure the draw from 256 rows of 151,936 logits, and compare the first rows with the CPU's draws."""
    from millrace.worker.sampler import sample

    num_rows, vocab_size = (8, 1000) if setting.is_quick else (256, 151_936)
    device, copy = torch.device(setting.device), copy_gb_per_s(setting)
    yield "copy_gb_per_s", round(copy, 1)
    logits = (4 * torch.randn(num_rows, vocab_size, device=device)).to(getattr(torch, setting.dtype))
    cases = {}
    for name, settings in KINDS.items():
        kind = batches.settings(*settings)
        rows = batches.sampling_rows(num_rows, device, kind, [1])
        few = batches.sampling_rows(8, torch.device("cpu"), kind, [1])
        same = sample(logits[:8].float().cpu(), few) == sample(logits.clone(), rows)[:8].cpu()
        figures = {"as_on_cpu": f"{int(same.sum())} of 8"}
        work = draw_with_triton(logits, rows) if device.type == "cuda" else partial(sample, logits, rows)
        cases[name] = Case(work, logits.numel(), logits.nbytes, figures)
    yield from measure_cases(cases, copy, setting)


def draw_with_triton(logits: Tensor, rows: SamplingRows) -> Work:
    """Return a draw as a graph has it, with its settings on the device."""
    from millrace.worker.sampling_triton import draw, pack_settings

    on_host = torch.empty(5, rows.num_rows, dtype=torch.int64)
    pack_settings(rows, on_host)
    given, has_limits = on_host.to(logits.device), rows.has_limits
    settings = given.clone() if bool(rows.temperatures.any()) else None

    def work() -> Tensor:
        if settings is not None:
            settings.copy_(given)  # a draw raises the floors in it
        return draw(logits, settings, has_limits=has_limits)

    return work
