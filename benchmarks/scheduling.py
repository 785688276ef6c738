"""Measures the scheduler without a model: one decode step of a full batch, and a block of the pool."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.options import Options
from millrace.engine_service.core.block_pool import BlockPool
from millrace.engine_service.core.scheduler import Scheduler, SchedulerConfig
from millrace.engine_service.core.sequence import Sequence, StopRules
from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import RowSampling, SeqId, StepPlan, StepResult

NUM_ROUNDS = 5
NUM_RUNNING = 256
NUM_WAITING = {"0_waiting": 0, "1000_waiting": 1000, "100000_waiting": 100_000}
PROMPT_TOKENS = 2000
SHORT_PROMPT_TOKENS = 50
"""Of 100,000 waiting sequences: their tokens alone would take gigabytes."""
NUM_STEPS = 300
BLOCK_SIZE = 16
NUM_BLOCKS = 60_000
GREEDY = RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [])
RULES = StopRules(max_tokens=10_000, min_tokens=0, end_token_ids=frozenset({2}))


def measure(options: Options) -> dict[str, Any]:
    """Return all figures of this part."""
    num_rounds, num_steps = options.num_rounds, 20 if options.is_quick else NUM_STEPS
    figures: dict[str, Any] = {"block_us": _median(lambda: _block_us(num_steps), num_rounds)}
    for name, num_waiting in NUM_WAITING.items():
        figures[f"decode_step_ms_{name}"] = _median(partial(_step_ms, num_waiting, num_steps), num_rounds)
    return figures


def _median(work: Callable[[], float], num_rounds: int) -> float:
    return round(statistics.median(work() for _ in range(num_rounds)), 4)


def _step_ms(num_waiting: int, num_steps: int) -> float:
    """Return the median time to make the plan of a decode step and to apply its result."""
    config = SchedulerConfig(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=8192)
    scheduler = Scheduler(config, BlockPool(NUM_BLOCKS, KVLayout(BLOCK_SIZE)), epoch=1)
    draw = random.Random(0)
    for number in range(NUM_RUNNING):  # of mixed lengths, so that one in 16 needs a block in each step
        _add(scheduler, number + 1, 100 + draw.randrange(BLOCK_SIZE), draw)
    while _step(scheduler)[0].rows:
        pass
    length = PROMPT_TOKENS if num_waiting <= 1000 else SHORT_PROMPT_TOKENS
    for number in range(num_waiting):
        _add(scheduler, NUM_RUNNING + number + 1, length, draw)
    return statistics.median(_step(scheduler)[1] for _ in range(num_steps)) * 1e3


def _add(scheduler: Scheduler, seq_id: int, prompt_len: int, draw: random.Random) -> None:
    prompt = [draw.randrange(3, 30_000) for _ in range(prompt_len)]
    scheduler.add(Sequence(SeqId(seq_id), prompt, GREEDY, RULES))


def _step(scheduler: Scheduler) -> tuple[StepPlan, float]:
    """Return the plan of one step, and the seconds that the scheduler took for it."""
    began_s = time.perf_counter()
    plan = scheduler.schedule()
    planned_s = time.perf_counter()
    assert plan is not None
    result = StepResult(plan.step_id, plan.epoch, [5] * plan.num_sampled)
    done_s = time.perf_counter()
    scheduler.apply(result)
    return plan, time.perf_counter() - done_s + planned_s - began_s


def _block_us(num_times: int) -> float:
    """Return the time to allocate and free one block, of tables of 100."""
    pool = BlockPool(NUM_BLOCKS, KVLayout(BLOCK_SIZE))
    began_s = time.perf_counter()
    for _ in range(num_times):
        pool.free(pool.allocate(100))
    return (time.perf_counter() - began_s) * 1e6 / (num_times * 100)
