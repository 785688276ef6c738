"""Steps of a rank without an engine: loading, prompts, and decode steps by kernel."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import models, roofline
from benchmarks.batches import BLOCK_SIZE, sequences
from benchmarks.gpu.measuring import copy_gb_per_s, named, product_tflops, profile_calls
from benchmarks.gpu.setting import Figures, Part, Setting
from benchmarks.workloads import QWEN, TINY_MODEL
from millrace.executor.wire.messages import SeqId, StepId, StepPlan, WorkerConfig
from millrace.worker.rank import Rank

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROFILED = (1, 4, 16, 64, 256)
"""Batches whose kernels are measured one by one."""
SLOW_S = 0.1
"""Of a step, from which on few are measured: too many kernels for the profiler."""


def steps(setting: Setting) -> Part:
    """Measure loading, prompts, and decode steps of 1 to 256 rows. Each decode step is launched before the one before it is
    collected, as an engine does."""
    copy, peak = copy_gb_per_s(setting), product_tflops(setting)
    began_s = time.perf_counter()
    bench = _StepBench(setting)
    yield "load_s", round(time.perf_counter() - began_s, 2)
    yield "how", bench.describe()
    first_ms, *prompts_ms = [bench.begin(1, bench.context) for _ in range(4)]
    yield "first_prompt_ms", round(first_ms, 1)  # Triton compiles
    yield "prompt_ms", round(statistics.median(prompts_ms), 2)
    timed: dict[str, Figures] = {}
    for num_rows in BATCHES:
        timed[f"{num_rows} rows"] = bench.time(num_rows, copy, peak)
        yield f"{num_rows} rows", timed[f"{num_rows} rows"]
    yield "graphs", bench.num_graphs
    if setting.device == "cuda":
        for num_rows in (1, 4, 64):
            with bench.without_dependent_launches():
                yield f"{num_rows} rows, no dependent launches", bench.time(num_rows, copy, peak)
        for num_rows in (1, 4):
            with bench.with_products_of_torch():
                yield f"{num_rows} rows, products of torch", bench.time(num_rows, copy, peak)
    for num_rows in PROFILED:
        yield f"{num_rows} rows", timed[f"{num_rows} rows"] | bench.profile(num_rows)
    bench.rank.shutdown()


class _StepBench:
    """Owns a rank, and plans its steps."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._model = setting, TINY_MODEL if setting.is_quick else QWEN
        self.context, self._num_calls = (20, 2) if setting.is_quick else (1024, 20)
        self._columns = -(-(self.context + 4 * self._num_calls) // BLOCK_SIZE)
        sizes: dict[str, Any] = {
            "max_model_len": self._columns * BLOCK_SIZE,
            "num_blocks": 1 + max(BATCHES) * self._columns,
        }
        path = str(models.path_of(self._model))
        self.rank = Rank(0, 1, 1, WorkerConfig(model=path, device=setting.device, block_size=BLOCK_SIZE, **sizes))
        self.rank.start(lambda _: None)
        self.rank.initialize_cache(*self.rank.determine_num_available_blocks())
        assert self.rank.runner is not None
        self._runner = self.rank.runner
        for layer in self._runner._pool.layers.values():  # a KV pool is not initialized, and NaN would end the rows
            layer.keys.normal_()
            layer.values.normal_()
        self._number = self._num_begun = 0
        if setting.device == "cuda":
            from millrace.worker import graphs

            graphs.CAPTURE_PAUSE_STEPS = 0  # or each number of rows would run in the graph of the largest one at first

    def describe(self) -> Figures:
        """Return what computes the steps: a GPU without Triton's kernels or graphs is much slower."""
        return {
            "attention": self.rank._model.attention.name,
            "is_fused": self._runner.decoder is not None,
            "has_graphs": self._runner._graphs is not None,
        }

    @property
    def num_graphs(self) -> int:
        return len(self._runner._graphs.kinds) if self._runner._graphs is not None else 0

    def begin(self, num_rows: int, num_fed: int) -> float:
        """Replace all sequences by new ones, and return the milliseconds of the step that feeds their last tokens."""
        starts = range(1, 1 + num_rows * self._columns, self._columns)
        new, rows = sequences([(self.context, list(range(start, start + self._columns))) for start in starts], num_fed)
        finished, self._num_begun = [SeqId(index) for index in range(self._num_begun)], num_rows
        began_s = time.perf_counter()
        self._step(num_rows * num_fed, num_rows, rows, new, finished)
        return 1e3 * (time.perf_counter() - began_s)

    def time(self, num_rows: int, copy: float, peak: float) -> Figures:
        """Return the figures of a decode step. copy: GB/s, peak: TFLOP/s."""
        num_calls = self._begin_decoding(num_rows)
        self._run_ahead(num_rows)
        began_s = time.perf_counter()  # while a step runs, as at the end, so no step waits for its launch
        device_s = statistics.mean(self._run_ahead(num_rows) for _ in range(num_calls))
        wall_s = (time.perf_counter() - began_s) / num_calls
        self.rank.collect()
        operations, num_elements = roofline.step_work(self._model, num_rows, self.context)
        num_bytes = num_elements * (2 if self._setting.dtype == "bfloat16" else 4)
        least_s = max(num_bytes / copy / 1e9, operations / peak / 1e12)
        return {
            "step_ms": round(1e3 * wall_s, 3),
            "idle_share": round(1 - device_s / wall_s, 4),
            "tokens_per_s": round(num_rows / wall_s, 1),
            "roofline_share": round(least_s / wall_s, 4),
            "tflops": round(operations / wall_s / 1e12, 4),
            "operations_per_byte": round(operations / num_bytes, 3),
        }

    def profile(self, num_rows: int) -> Figures:
        """Return the kernels of a decode step. The profiler slows the host, so the idle share is an upper bound."""
        found = profile_calls(lambda: self._run_ahead(num_rows), self._begin_decoding(num_rows), self._setting.device)
        self.rank.collect()
        return {
            "device_ms": round(1e3 * found.busy_s, 3),
            "num_kernels": found.num_kernels,
            "idle_share_profiled": found.idle_share,
            "kernels_ms": named(found.kernels, 1e3),
        }

    def _begin_decoding(self, num_rows: int) -> int:
        """Begin sequences and launch a step of them. Return how many steps to measure."""
        self.begin(num_rows, 1)
        for _ in range(2):  # the first one may capture the largest graph, the second one its own
            self._step(num_rows, num_rows)
        began_s = time.perf_counter()
        self._step(num_rows, num_rows)
        num_calls = 2 if time.perf_counter() - began_s > SLOW_S else self._num_calls
        self._launch(1, num_rows, num_rows)
        return num_calls

    def _run_ahead(self, num_rows: int) -> float:
        """Launch a decode step behind one that runs, and return the device's seconds of that one."""
        self._launch(2, num_rows, num_rows)
        return self.rank.collect().device_s

    def _step(self, num_tokens: int, num_sampled: int, *differences: Any) -> None:
        self._launch(1, num_tokens, num_sampled, *differences)
        self.rank.collect()

    def _launch(self, depth: int, num_tokens: int, num_sampled: int, *differences: Any) -> None:
        self._number += 1
        self.rank.launch(StepPlan(StepId(self._number), 1, depth, num_tokens, num_sampled, *differences))

    @contextmanager
    def without_dependent_launches(self) -> Iterator[None]:
        from millrace.worker import launch_triton

        with self._changed(launch_triton, "LEAST_CAPABILITY", sys.maxsize):
            launch_triton.launch_options.cache_clear()
            yield
        launch_triton.launch_options.cache_clear()

    @contextmanager
    def with_products_of_torch(self) -> Iterator[None]:
        """Also of few rows, which Triton computes otherwise."""
        from millrace.worker.linear import linear_triton

        with self._changed(linear_triton, "MOST_FEW_ROWS", 0):
            yield

    @contextmanager
    def _changed(self, module: Any, constant: str, value: int) -> Iterator[None]:
        before = getattr(module, constant)
        self._set(module, constant, value)
        yield
        self._set(module, constant, before)

    def _set(self, module: Any, constant: str, value: int) -> None:
        setattr(module, constant, value)
        if self._runner._graphs is not None:
            self._runner._graphs._graphs.clear()
