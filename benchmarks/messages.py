"""Measures communication between engine and worker without computation: a call and its reply, and a step's message."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.options import Options
from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.executor.wire.messages import SeqId, Step, StepId, StepPlan, WorkerConfig, decode_to_worker, encode

NUM_ROUNDS = 9
NUM_CALLS = 2000
NUM_MESSAGES = 2000
NUM_SEQUENCES = 256


def measure(options: Options) -> dict[str, Any]:
    """Return all figures of this part. `is_quick` changes nothing."""
    # All sequences feed one token, and one of 16 gets a new block, as with blocks of 16 tokens.
    blocks = [(SeqId(1000 + i), 2000 + i) for i in range(0, NUM_SEQUENCES, 16)]
    step = Step(1, StepPlan(StepId(100_000), 1, 1, NUM_SEQUENCES, NUM_SEQUENCES, new_blocks=blocks))
    return {
        **_round_trips(options.model, options.num_rounds),
        "step_message_bytes": len(encode(step)),
        "step_message_us": round(_median_us(lambda: decode_to_worker(encode(step)), NUM_MESSAGES), 1),
    }


def _round_trips(model: Path, num_rounds: int) -> dict[str, Any]:
    """Time a call without payload to one rank on this host: to the stub, which does nothing, and to a real worker,
    which runs one operation on its device. In turns."""
    kinds = {
        "rpc": ("tests.executor.stub", WorkerConfig(model="", num_blocks=32, block_size=16)),
        "health_check": ("millrace.worker", WorkerConfig(model=str(model), num_blocks=32, device="cpu")),
    }
    with ExitStack() as stack:
        executors = {}
        for name, (module, config) in kinds.items():
            executors[name] = MultiprocExecutor(config, worker_module=module, log_level="WARNING")
            stack.callback(executors[name].shutdown)
            executors[name].start()
        rounds = [{name: _round_trip_us(each) for name, each in executors.items()} for _ in range(num_rounds)]
    figures: dict[str, Any] = {}
    for name in kinds:
        medians_us = [round(times_us[name], 1) for times_us in rounds]
        figures[f"{name}_us_p50"] = statistics.median(medians_us)
        figures[f"{name}_us_p50_of_each_round"] = medians_us
    return figures


def _round_trip_us(executor: MultiprocExecutor) -> float:
    return _median_us(lambda: executor.collective_rpc("check_health"), NUM_CALLS)


def _median_us(work: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        begin_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds) * 1e6
