"""Times work on a GPU: as a whole, in a graph, and by kernel, with torch's profiler."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.setting import Figures, Part, Setting

Work = Callable[[], object]

NUM_REPLAYS = 25
NUM_PROFILES = 3
"""Attempts for a profile without a gap."""
WARM_UP_S = 0.5
"""Of work, until the clocks of a GPU are up: it has none to do while kernels compile."""
MAX_KERNELS = 12
"""Kernels that are listed by name. The others are one sum."""


class Case(NamedTuple):
    """Work of one kernel, or of several that run one after the other."""

    work: Work
    operations: int
    num_bytes: int
    figures: Figures
    """Other figures of it."""


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def wall_seconds(work: Work, num_calls: int, device: str) -> float:
    """Return the mean of `num_calls` calls, after a first one that may compile."""
    work()
    synchronize(device)
    began_s = time.perf_counter()
    for _ in range(num_calls):
        work()
    synchronize(device)
    return (time.perf_counter() - began_s) / num_calls


def device_seconds(work: Work, num_calls: int, device: str) -> float:
    """Return the time that the device takes for a call: the median of some replays of a graph of `num_calls` calls, in which
    the host has no part. Without a graph, where the work cannot be captured or on a CPU, the wall time."""
    seconds = wall_seconds(work, num_calls, device)
    if device == "cpu":
        return seconds
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(num_calls):
                work()
    except RuntimeError as error:
        print(f"no graph, so the host's time counts too: {error}", flush=True)
        return seconds
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    spans_ms = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
    return statistics.median(spans_ms) / 1e3 / num_calls


class Profile(NamedTuple):
    """What one call of some work takes, by a profiler."""

    num_kernels: float
    busy_s: float
    """Seconds in which a kernel runs. Kernels may start while the one ahead of them runs, and wait for it."""
    idle_share: float
    """Of the time between the first and the last kernel of all calls: the share in which none runs."""
    kernels: dict[str, float]
    """Seconds of the device by kernel, the longest first, with such waits. On a CPU torch's operators count as kernels."""


def profile_calls(work: Work, num_calls: int, device: str) -> Profile:
    """Return the means of `num_calls` calls. It slows what is timed after it, so time first."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    spans: list[tuple[float, float]] = []
    for _ in range(NUM_PROFILES):
        with profile(activities=[activity]) as profiler:
            for _ in range(num_calls):
                work()
            synchronize(device)
        seconds: Counter[str] = Counter()
        spans.clear()
        for event in profiler.events():
            if spent_us := event.self_device_time_total if device == "cuda" else event.self_cpu_time_total:
                seconds[event.name] += spent_us * 1e-6 / num_calls
                spans.append((event.time_range.start, event.time_range.end))
        if spans and len(spans) % num_calls == 0:  # a profiler may lose kernels at its begin
            break
    busy_us = _length_of_union(spans)
    whole_us = max((end for _, end in spans), default=0.0) - min((begin for begin, _ in spans), default=0.0)
    return Profile(
        len(spans) / num_calls,
        1e-6 * busy_us / num_calls,
        round(1 - busy_us / whole_us, 4) if whole_us else 0.0,
        dict(seconds.most_common()),
    )


def _length_of_union(spans: Sequence[tuple[float, float]]) -> float:
    length, last = 0.0, -math.inf
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, last))
        last = max(last, end)
    return length


def copy_gb_per_s(setting: Setting) -> float:
    """Return the bandwidth of a copy within the device's memory, bytes read and written. Not in a graph, where a slower unit
    of the GPU does it."""
    source = torch.ones((1 << 20 if setting.is_quick else 1 << 31), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / wall_seconds(lambda: target.copy_(source), 20, setting.device) / 1e9


def warm_up(work: Work, setting: Setting) -> None:
    end_s = time.monotonic() + (0 if setting.is_quick else WARM_UP_S)
    while time.monotonic() < end_s:
        work()
        synchronize(setting.device)


def product_tflops(setting: Setting) -> float:
    """Return the speed of a large product of matrices."""
    size = 256 if setting.is_quick else 8192
    left, right = (torch.randn(size, size, device=setting.device).to(getattr(torch, setting.dtype)) for _ in range(2))
    warm_up(lambda: left @ right, setting)
    return 2 * size**3 / wall_seconds(lambda: left @ right, 10, setting.device) / 1e12


def measure_cases(cases: dict[str, Case], copy: float, setting: Setting) -> Part:
    """Yield the figures of each case, and when all are timed once more with its kernels. copy: GB/s."""
    num_calls, measured = 2 if setting.is_quick else 10, dict[str, Figures]()
    for name, case in cases.items():
        warm_up(case.work, setting)
        device_s = device_seconds(case.work, num_calls, setting.device)
        measured[name] = {
            **case.figures,
            "device_us": round(1e6 * device_s, 1),
            "wall_us": round(1e6 * wall_seconds(case.work, num_calls, setting.device), 1),
            "gb_per_s": round(case.num_bytes / device_s / 1e9, 2),
            "over_copy": round(case.num_bytes / device_s / 1e9 / copy, 4),
            "tflops": round(case.operations / device_s / 1e12, 4),
            "operations_per_byte": round(case.operations / case.num_bytes, 3),
        }
        yield name, measured[name]
    for name, case in cases.items():
        found = profile_calls(case.work, num_calls, setting.device)
        yield name, measured[name] | {"num_kernels": found.num_kernels, "kernels_us": named(found.kernels, 1e6)}


def named(kernels: dict[str, float], unit: float) -> dict[str, float]:
    """Return the longest kernels with short names, and the sum of the others."""
    items = list(kernels.items())
    short: defaultdict[str, float] = defaultdict(float)
    for name, seconds in items[:MAX_KERNELS]:
        short[re.sub(r"\(anonymous namespace\)::|^void |<.*|\(.*", "", name)[:60]] += seconds * unit
    short["others"] += unit * sum(seconds for _, seconds in items[MAX_KERNELS:])
    return {name: round(value, 3) for name, value in short.items() if value}
