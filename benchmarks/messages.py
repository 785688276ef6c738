"""The way between an engine and its worker, without any computation: a call there and back, and a step's messages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from executor.messages import SeqId, Step, StepId, StepPlan, StepRow, WorkerConfig, decode_to_worker, encode
from executor.multiproc import MultiprocExecutor

NUM_CALLS = 3000
NUM_MESSAGES = 2000
NUM_SEQUENCES = 256


def measure() -> dict[str, Any]:
    """All figures of this file."""
    plan = _decode_plan()
    payload = encode(Step(1, plan))
    return {
        "rpc_round_trip_us_p50": round(_rpc_round_trip_us(), 1),
        "step_message_bytes": len(payload),
        "step_message_us": round(_median_us(lambda: decode_to_worker(encode(Step(1, plan))), NUM_MESSAGES), 1),
    }


def _rpc_round_trip_us() -> float:
    """Of a call without payload to one rank on this host; the rank is the stub, which does nothing with it."""
    config = WorkerConfig(model="", num_blocks=32, block_size=16)
    executor = MultiprocExecutor(config, worker_module="executor.stub", log_level="WARNING")
    executor.start()
    try:
        return _median_us(lambda: executor.collective_rpc("check_health"), NUM_CALLS)
    finally:
        executor.shutdown()


def _decode_plan() -> StepPlan:
    """A step in which every sequence gets its next token, and one in sixteen a new block, as with blocks of 16."""
    rows = [
        StepRow(SeqId(1000 + i), 500 + i, 1, 1, True, [2000 + i] if i % 16 == 0 else []) for i in range(NUM_SEQUENCES)
    ]
    return StepPlan(StepId(100_000), 1, depth=1, rows=rows)


def _median_us(work: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        begin_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds) * 1e6
