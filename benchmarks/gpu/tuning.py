"""Times Triton's kernels with other tiles, warps and stages: for a kind of GPU that has not been measured yet.

Several processes compile all choices first; this one finds them in Triton's cache. On a CPU it needs the interpreter
(TRITON_INTERPRET=1).
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

from benchmarks.gpu.measuring import Work, device_seconds
from benchmarks.gpu.setting import Part, Setting

HEADS = 16, 8
"""Query heads and key heads of Qwen3-0.6B."""
NUM_CALLS = 10
MOST_PROCESSES = 12

Plan = Sequence[tuple[str, int]]
"""Cases, and the numbers of their choices."""


class Case(NamedTuple):
    """A kernel's work, and values of the constant that decides how it is done."""

    make_work: Callable[[str, bool], Work]
    """Takes the device, and whether to do little work."""
    module: str
    constant: str
    choices: list[Any]


def tuning(setting: Setting) -> Part:
    """Yield for each case the choices with their microseconds for one call, the fastest first, or the errors of those that
    do not fit."""
    device, is_quick = setting.device, setting.is_quick
    cases = _cases(is_quick=is_quick)
    errors = _compile_all(
        [(name, number) for name, case in cases.items() for number in range(len(case.choices))], setting
    )
    for name, case in cases.items():
        timed, failed = [], {}
        for number, choice in enumerate(case.choices):
            if error := errors[name, number]:
                failed[str(choice)] = error
                continue
            work = _chosen(case, choice, device, is_quick)
            seconds = device_seconds(work, 1 if is_quick else NUM_CALLS, device)
            timed.append((round(1e6 * seconds, 2), str(choice)))
        constant = getattr(importlib.import_module(case.module), case.constant)
        print(name, f"now {constant}", *sorted(timed)[:4], sep="\n    ", flush=True)
        yield name, {"now": str(constant), "fastest": sorted(timed), "refused": failed}


def _compile_all(plan: Plan, setting: Setting) -> dict[tuple[str, int], str]:
    """Return the error of each choice, or "". A compiler that crashes ends all processes: then the rest gets new ones."""
    errors: dict[tuple[str, int], str] = {}
    num_processes = 1 if setting.is_quick else min(MOST_PROCESSES, os.cpu_count() or 1)
    while left := [each for each in plan if each not in errors]:
        with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
            futures = {each: pool.submit(_compile, setting.device, setting.is_quick, each) for each in left}
            for each, future in futures.items():
                try:
                    errors[each] = future.result()
                except BrokenProcessPool:
                    errors[each] = "the compiler has crashed, with this choice or one beside it"
                    break
    return errors


def _chosen(case: Case, choice: Any, device: str, is_quick: bool) -> Work:
    """Return the work, done with another value of the constant."""
    work, module = case.make_work(device, is_quick), importlib.import_module(case.module)

    def run() -> None:
        before = getattr(module, case.constant)
        setattr(module, case.constant, choice)
        try:
            work()
        finally:
            setattr(module, case.constant, before)

    return run


def _compile(device: str, is_quick: bool, planned: tuple[str, int]) -> str:
    """Run a case once. Return the error if it does not fit, such as into shared memory."""
    name, number = planned
    case = _cases(is_quick=is_quick)[name]
    try:
        _chosen(case, case.choices[number], device, is_quick)()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def _cases(*, is_quick: bool) -> dict[str, Case]:
    from millrace.worker.attention.triton import DECODE, PREFILL, Tiles

    attention = "millrace.worker.attention.triton"
    decodes = [Tiles(*each) for each in itertools.product((32, 64, 128), (1, 2, 4, 8), (2, 3, 4), (16,), (None, 128))]
    prefills = [Tiles(*each) for each in itertools.product((32, 64, 128), (4, 8), (2, 3, 4), (64, 128))]
    tiles = list(itertools.product((32, 64, 128), (32, 64, 128), (64, 128)))
    if is_quick:
        decodes, prefills, tiles = [DECODE], [PREFILL], [(32, 64, 32)]
    decode, prefill = ([1024] * 64, 1), ([2048], 2048)
    return {
        "decode": Case(partial(_attend, *decode, 128, False), attention, "DECODE", decodes),
        "decode, head size 64": Case(partial(_attend, *decode, 64, False), attention, "DECODE_NARROW", decodes),
        "decode, fp8": Case(partial(_attend, *decode, 128, True), attention, "DECODE_FP8", decodes),
        "prefill": Case(partial(_attend, *prefill, 128, False), attention, "PREFILL", prefills),
        "batch-invariant layer": Case(
            *(_multiply, "millrace.worker.linear.linear_triton", "TILES"), [{2: each, 4: each} for each in tiles]
        ),
        "temperature": Case(
            partial(_sample, 0, 1.0), "millrace.worker.sampling_triton", "NUM_WARPS", [8] if is_quick else [2, 4, 8, 16]
        ),
        "top-k and top-p": Case(
            partial(_sample, 20, 0.95),
            "millrace.worker.floors_triton",
            "NUM_WARPS",
            [16] if is_quick else [4, 8, 16],
        ),
    }


def _attend(lengths: list[int], num_fed: int, head_size: int, is_fp8: bool, device: str, is_quick: bool) -> Work:
    import torch

    from benchmarks.batches import attention_inputs
    from millrace.worker.attention.triton import TritonAttention
    from millrace.worker.kv_pool import FP8

    heads = (*HEADS, head_size)
    if is_quick:
        lengths, num_fed, heads = [20], min(num_fed, 4), (2, 1, 16)
    dtype, pool_dtype = torch.float32 if device == "cpu" else torch.bfloat16, FP8 if is_fp8 and not is_quick else None
    query, *_, layer, batch = attention_inputs(lengths, num_fed, heads, dtype, torch.device(device), pool_dtype)
    batch.derived.clear()
    return partial(TritonAttention().attend, query, layer, heads[2] ** -0.5, None, None, batch)


def _multiply(device: str, is_quick: bool) -> Work:
    import torch

    from millrace.worker.linear.linear_triton import TritonLinear

    num_rows, num_inputs, num_outputs = (8, 32, 64) if is_quick else (128, 1024, 6144)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    weights, inputs, outputs = (
        torch.randn(shape, device=device).to(dtype)
        for shape in ((num_outputs, num_inputs), (num_rows, num_inputs), (num_rows, num_outputs))
    )
    return partial(TritonLinear(weights, None).into, inputs, outputs)


def _sample(top_k: int, top_p: float, device: str, is_quick: bool) -> Work:
    import torch

    from benchmarks.batches import sampling_rows, settings
    from benchmarks.gpu.kernels import draw_with_triton

    num_rows, vocab_size = (1, 500) if is_quick else (256, 151_936)
    logits = (4 * torch.randn(num_rows, vocab_size, device=device)).to(
        torch.bfloat16 if device == "cuda" else torch.float32
    )
    rows = sampling_rows(num_rows, torch.device(device), settings(0.6, top_k, top_p), [1])
    return draw_with_triton(logits, rows)
