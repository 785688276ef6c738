"""Measurements of a GPU beside the 8 minutes of `benchmarks.gpu`, each a part of its own: through Redis, a large model, and
starts and restarts."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.contenders import EngineKind, run_in_turns
from benchmarks.options import Options
from benchmarks.workloads import QWEN, TINY_MODEL
from millrace import LLM, SamplingParams
from millrace.embedded import EmbeddedServer
from millrace.executor.metrics import ExecutorMetrics

LIMIT_S = 280.0
"""Of one engine, with its start."""
NUM_ROUNDS = 2
NUM_KILLS = 10
RECOVERY_LIMIT_S = 120.0
NUM_ROWS, NUM_TOKENS = 32, 64
"""Sequences that run when the worker is killed, and their tokens."""

Figures = dict[str, Any]


def redis(device: str, *, is_quick: bool) -> Figures:
    """Run the workload NANO through a Redis, and before and behind it offline. The engines take turns with the GPU."""
    offline = EngineKind("offline", "millrace", {"device": device, "temperature": 0.6})
    with EmbeddedServer() as server:
        queue = EngineKind("redis", "millrace", {**offline.options, "url": server.url, "idle_s": 1.0})
        runs = [_run("NANO", kind, is_quick) for kind in (offline, queue, offline)]
    before, through, behind = (run["tokens_per_s"] for run in runs)
    return {"offline": runs[::2], "redis": runs[1], "over_offline": round(2 * through / (before + behind), 4)}


def large(device: str, *, is_quick: bool) -> Figures:
    """Run the workload NANO-14B."""
    return _run("NANO-14B", EngineKind("millrace", "millrace", {"device": device, "temperature": 0.6}), is_quick)


def _run(workload: str, kind: EngineKind, is_quick: bool) -> Figures:
    options, now_s = Options("", 1 if is_quick else NUM_ROUNDS, is_quick), time.monotonic()
    run = run_in_turns(workload, [kind], options, now_s + LIMIT_S, now_s + LIMIT_S)[kind.name]
    print((models.HOME / "logs" / f"{kind.name}.{workload}.log").read_text())  # of a machine that may be gone later
    if run.failure:
        raise RuntimeError(f"{kind.name}: {run.failure}")
    figures = run.figures(None, "")
    print(kind.name, figures, flush=True)
    return figures


def restarts(device: str, *, is_quick: bool) -> Figures:
    """Measure a start without Triton's cache and one with it, each up to the first token. Then kill the worker under load
    several times, and measure the time up to the next token, and the memory of the device."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as cache:
        before = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = cache  # of the workers, too
        try:
            for name in ("no_kernels_compiled", "kernels_compiled"):
                began_s = time.perf_counter()
                llm = LLM(models.path_of(TINY_MODEL if is_quick else QWEN), device=device, executor="mp")
                _generate(llm, 1, 1)
                figures[f"start_to_first_token_s, {name}"] = round(time.perf_counter() - began_s, 3)
                if name == "no_kernels_compiled":
                    llm.shutdown()
            with llm:
                figures |= _kill_workers(llm, device, 1 if is_quick else NUM_KILLS)
        finally:
            os.environ.pop("TRITON_CACHE_DIR")
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before
    return figures


def _generate(llm: LLM, num_rows: int, num_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.6, ignore_eos=True)
    llm.generate([[10 + index, 11, 12] for index in range(num_rows)], sampling, use_tqdm=False)


def _kill_workers(llm: LLM, device: str, num_kills: int) -> Figures:
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
        for _ in range(num_kills):
            before = executor.stats()
            wait_for(before.epoch, before.num_tokens)
            began_s = time.perf_counter()
            os.kill(executor.worker_pids()[0], signal.SIGKILL)
            restarted = wait_for(before.epoch + 1)
            wait_for(restarted.epoch, restarted.num_tokens)
            seconds.append(round(time.perf_counter() - began_s, 3))
            memory_mib.append(_memory_mib(executor, device))
    finally:
        is_over.set()
        worker.join()
    return {
        "killed_to_next_token_s": seconds,
        "killed_to_next_token_s_median": statistics.median(seconds),
        "memory_mib": memory_mib,
    }


def _memory_mib(executor: Any, device: str) -> int:
    """Return the memory that all processes hold on the GPU; on a CPU that of the worker."""
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        return int(total - free) >> 20
    pid = executor.worker_pids()[0]
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
