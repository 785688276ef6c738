"""Whole engines on a GPU: throughput, sleep, and beside them what takes longer: a large model, Redis, and restarts."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.contenders import EngineKind, run_in_turns
from benchmarks.gpu.setting import Figures, Part, Setting
from benchmarks.options import Options
from benchmarks.workloads import QWEN, TINY_MODEL
from millrace import LLM, SamplingParams
from millrace.embedded import EmbeddedServer
from millrace.executor.metrics import ExecutorMetrics

VARIANTS: dict[str, dict[str, Any]] = {
    "millrace": {},
    "eager": {"enforce_eager": True},
    "uni": {"executor": "uni"},
    "fp8-kv": {"kv_cache_dtype": "fp8"},
    "batch-invariant": {"batch_invariant": True},
    "no-run-ahead": {"run_ahead": False},
    "eager-no-run-ahead": {"enforce_eager": True, "run_ahead": False},
}
"""The options of Millrace by name."""
OTHER_LIMIT_S = 40.0
"""Of a round of transformers' continuous batching, which would take minutes. Its speed at the begin counts."""
CLOSING_S = 10.0
"""At the end of a part, to end an engine."""
IDLE_S, LARGE_IDLE_S = 4.0, 15.0
"""Before the rounds: the worker captures the graphs that most steps need, and may have to compile their kernels first."""
NUM_ROUNDS = 2
NUM_RESTARTS, NUM_KILLS = 2, 10
RECOVERY_LIMIT_S = 120.0
NUM_ROWS, NUM_TOKENS = 32, 64
"""Sequences that run when the worker is killed, and their tokens."""


def throughput(setting: Setting) -> Part:
    """Run the workload NANO on each engine, one after the other: each takes most of the GPU's memory. An engine for which
    the time does not suffice is cut, and its figures say so."""
    end_s = time.monotonic() + setting.limit_s - CLOSING_S
    options: Figures = {"device": setting.device, "temperature": 0.6, "idle_s": IDLE_S}
    kinds = [EngineKind(name, "millrace", options | changed) for name, changed in VARIANTS.items()]
    other: Figures = {"is_continuous": True, "batch_size": 256, "limit_s": OTHER_LIMIT_S, "device": setting.device}
    kinds.insert(2, EngineKind("transformers", "transformers", other | {"temperature": 0.6}))
    figures: Figures = {}
    for kind in kinds:
        if kind.options.get("kv_cache_dtype") == "fp8" and setting.device == "cpu":
            kind = replace(kind, options={**kind.options, "attention": "reference"})
        figures[kind.name] = one = _run("NANO", kind, setting, 1, end_s)
        if kind.name != "millrace" and {"failed"}.isdisjoint({*one, *figures["millrace"]}):
            one["millrace_over_it"] = round(figures["millrace"]["tokens_per_s"] / one["tokens_per_s"], 3)
        yield kind.name, one
        if kind.name == "transformers" and {"failed"}.isdisjoint({*one, *figures["eager"]}):
            yield "eager_over_transformers", round(figures["eager"]["tokens_per_s"] / one["tokens_per_s"], 3)
    if failed := [f"{name}: {one['failed']}" for name, one in figures.items() if "failed" in one]:
        yield "failed", "; ".join(failed)


def redis(setting: Setting) -> Part:
    """Run the workload NANO through a Redis, and before and behind it offline. The engines take turns with the GPU."""
    end_s = time.monotonic() + setting.limit_s - CLOSING_S
    offline = EngineKind("offline", "millrace", {"device": setting.device, "temperature": 0.6, "idle_s": IDLE_S})
    speeds = []
    with EmbeddedServer() as server:
        queue = EngineKind("redis", "millrace", {**offline.options, "url": server.url})
        for name, kind in (("offline before", offline), ("redis", queue), ("offline behind", offline)):
            one = _run("NANO", kind, setting, NUM_ROUNDS, end_s)
            yield name, one
            if "failed" in one:
                yield "failed", f"{name}: {one['failed']}"
                return
            speeds.append(one["tokens_per_s"])
    before, through, behind = speeds
    yield "over_offline", round(2 * through / (before + behind), 4)


def large(setting: Setting) -> Part:
    """Run the workload NANO-14B."""
    kind = EngineKind("millrace", "millrace", {"device": setting.device, "temperature": 0.6, "idle_s": LARGE_IDLE_S})
    figures = _run("NANO-14B", kind, setting, NUM_ROUNDS, time.monotonic() + setting.limit_s - CLOSING_S)
    yield "NANO-14B", figures
    if "failed" in figures:
        yield "failed", figures["failed"]


def _run(workload: str, kind: EngineKind, setting: Setting, num_rounds: int, end_s: float) -> Figures:
    options = Options("", 1 if setting.is_quick else num_rounds, setting.is_quick)
    run = run_in_turns(workload, [kind], options, end_s, end_s)[kind.name]
    log = models.HOME / "logs" / f"{kind.name}.{workload}.log"
    print(f"{kind.name}:", log.read_text() if log.exists() else "", flush=True)  # of a machine that may be gone later
    return run.figures(None, "")


def sleep(setting: Setting) -> Part:
    """Measure how long a worker takes to fall asleep, to wake up, and to come back when it was killed, each up to the next
    token; and the memory that it holds: of the device, or of the process on a CPU."""
    path = models.path_of(TINY_MODEL if setting.is_quick else QWEN)
    before_mib = _device_mib(setting)  # and this process has its context
    began_s = time.perf_counter()
    llm = LLM(path, device=setting.device, dtype=setting.dtype, executor="mp", max_model_len=512)
    executor: Any = llm._engine._executor

    def memory_mib() -> int:
        return _device_mib(setting) - before_mib if setting.device == "cuda" else _worker_mib(executor)

    _generate(llm, 1, 1)
    yield "start_to_first_token_s", round(time.perf_counter() - began_s, 3)
    yield "next_token_s", _seconds(lambda: _generate(llm, 1, 1))
    yield "memory_mib", memory_mib()
    for level in (1, 2):
        figures: Figures = {"sleep_s": _seconds(lambda level=level: llm.sleep(level))}  # type: ignore[misc]
        figures |= {"memory_left_mib": memory_mib(), "wake_s": _seconds(llm.wake_up)}
        yield f"level {level}", figures | {"next_token_s": _seconds(lambda: _generate(llm, 1, 1))}
    restarts = []
    for _ in range(1 if setting.is_quick else NUM_RESTARTS):
        os.kill(executor.worker_pids()[0], signal.SIGKILL)
        restarts.append(_seconds(lambda: _generate(llm, 1, 1)))
        yield "killed_to_next_token_s", restarts
    yield "memory_after_restarts_mib", memory_mib()
    llm.shutdown()


def restarts(setting: Setting) -> Part:
    """Measure a start without Triton's cache and one with it, each up to the first token. Then kill the worker under load
    several times, and measure the time up to the next token, and the memory of the device."""
    _device_mib(setting)  # makes this process's context, whose memory the later pools lack
    with tempfile.TemporaryDirectory() as cache:
        before = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = cache  # of the workers, too
        try:
            for name, is_last in (("start, nothing compiled yet", False), ("start", True)):
                began_s = time.perf_counter()
                path = models.path_of(TINY_MODEL if setting.is_quick else QWEN)
                llm = LLM(path, device=setting.device, executor="mp")
                _generate(llm, 1, 1)
                yield name, {"start_to_first_token_s": round(time.perf_counter() - began_s, 3)}
                if not is_last:
                    llm.shutdown()
            with llm:
                yield from _kill_workers(llm, setting)
        finally:
            os.environ.pop("TRITON_CACHE_DIR")
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before


def _kill_workers(llm: LLM, setting: Setting) -> Part:
    executor: Any = llm._engine._executor
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            _generate(llm, NUM_ROWS, NUM_TOKENS)

    def wait_for(epoch: int, num_tokens: int = -1) -> ExecutorMetrics:
        """Wait for this epoch and more tokens than these. Polls, since nothing announces a token. Raises `RuntimeError` when
        none will come."""
        end_s = time.monotonic() + RECOVERY_LIMIT_S
        while (now := executor.stats()).epoch < epoch or now.num_tokens <= num_tokens:
            if not worker.is_alive() or time.monotonic() > end_s:
                raise RuntimeError(f"no token within {RECOVERY_LIMIT_S:.0f} s, or the generation has failed: {now}")
            time.sleep(0.001)
        metrics: ExecutorMetrics = now
        return metrics

    worker = threading.Thread(target=work)
    worker.start()
    seconds, memory_mib = [], []
    try:
        for _ in range(1 if setting.is_quick else NUM_KILLS):
            before = executor.stats()
            wait_for(before.epoch, before.num_tokens)
            began_s = time.perf_counter()
            os.kill(executor.worker_pids()[0], signal.SIGKILL)
            restarted = wait_for(before.epoch + 1)
            wait_for(restarted.epoch, restarted.num_tokens)
            seconds.append(round(time.perf_counter() - began_s, 3))
            memory_mib.append(_device_mib(setting) if setting.device == "cuda" else _worker_mib(executor))
            yield (
                "worker killed under load",
                {
                    "next_token_s": statistics.median(seconds),
                    "next_token_s_of_each_round": seconds,
                    "memory_mib": memory_mib[-1],
                    "memory_mib_of_each_round": memory_mib,
                },
            )
    finally:
        is_over.set()
        worker.join()


def _generate(llm: LLM, num_rows: int, num_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.6, ignore_eos=True)
    llm.generate([[10 + index, 11, 12] for index in range(num_rows)], sampling, use_tqdm=False)


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return round(time.perf_counter() - began_s, 3)


def _device_mib(setting: Setting) -> int:
    """Return the memory that all processes hold on the GPU. 0 on a CPU."""
    if setting.device != "cuda":
        return 0
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free) >> 20


def _worker_mib(executor: Any) -> int:
    (pid,) = executor.worker_pids()
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
