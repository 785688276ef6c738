"""The way between an engine and its worker, without any computation: a call there and back, and a step's messages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.executor.wire.messages import (
    SeqId,
    Step,
    StepId,
    StepPlan,
    StepRow,
    WorkerConfig,
    decode_to_worker,
    encode,
)

NUM_ROUNDS = 9
NUM_CALLS = 2000
NUM_MESSAGES = 2000
NUM_SEQUENCES = 256


def measure(model: Path) -> dict[str, Any]:
    """All figures of this file."""
    plan = _decode_plan()
    payload = encode(Step(1, plan))
    return {
        **_round_trips(model),
        "step_message_bytes": len(payload),
        "step_message_us": round(_median_us(lambda: decode_to_worker(encode(Step(1, plan))), NUM_MESSAGES), 1),
    }


def _round_trips(model: Path) -> dict[str, Any]:
    """Of a call without payload to one rank on this host, in turns: to the stub, which does nothing with it, and to a real
    worker, which tries its device."""
    kinds = {"rpc": ("millrace.executor.rank.stub", WorkerConfig(model="", num_blocks=32, block_size=16))}
    kinds["health_check"] = ("millrace.worker", WorkerConfig(model=str(model), num_blocks=32, device="cpu"))
    with ExitStack() as stack:
        executors = {}
        for name, (module, config) in kinds.items():
            executors[name] = MultiprocExecutor(config, worker_module=module, log_level="WARNING")
            stack.callback(executors[name].shutdown)
            executors[name].start()
        rounds = [{name: _round_trip_us(one) for name, one in executors.items()} for _ in range(NUM_ROUNDS)]
    figures: dict[str, Any] = {}
    for name in kinds:
        each = [round(one[name], 1) for one in rounds]
        figures[f"{name}_us_p50"] = statistics.median(each)
        figures[f"{name}_us_p50_of_each_round"] = each
    return figures


def _round_trip_us(executor: MultiprocExecutor) -> float:
    return _median_us(lambda: executor.collective_rpc("check_health"), NUM_CALLS)


def _decode_plan() -> StepPlan:
    """A step in which every sequence gets its next token, and one in sixteen a new block, as with blocks of 16."""
    rows = [StepRow(SeqId(1000 + i), 500 + i, 1, 1, [2000 + i] if i % 16 == 0 else []) for i in range(NUM_SEQUENCES)]
    return StepPlan(StepId(100_000), 1, depth=1, rows=rows)


def _median_us(work: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        begin_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds) * 1e6
