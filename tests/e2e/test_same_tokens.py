"""Greedy and seeded tokens are the same with every way to plan and place the steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from millrace import LLM, SamplingParams
from millrace.engine_service.core.scheduler import SchedulerStats
from millrace.engine_service.engine import Engine, Progress
from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.wire.messages import StepPlan
from millrace.worker.input_batch import StepBatch
from millrace.worker.rank import Rank
from millrace.worker.runner import StepOutput
from tests.e2e.engines import TINY

SHARED = "Add the numbers, one step after the other, and write the sum at the end of the line: 12 + 7 = "
PROMPTS = [f"{SHARED}{first} + {second} =" for first, second in ((3, 4), (20, 22), (11, 7), (5, 9), (31, 6), (8, 8))]
PARAMS = [
    SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=20 + 5 * number, ignore_eos=number != 3)
    for number in range(len(PROMPTS))
]
SMALL_POOL: dict[str, Any] = {"block_size": 4, "num_blocks": 38}
PLAIN: dict[str, Any] = {"run_ahead": False, "enable_prefix_caching": False}
SWAP: dict[str, Any] = {"swap_space_gib": 0.001}


@pytest.fixture(autouse=True)
def force_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_FORCE_SWAP", "1")


def generate(disturb: Callable[[Engine], None] | None = None, **options: Any) -> tuple[list[list[int]], SchedulerStats]:
    """`disturb` is called between two steps, after blocks have come back from the host tier."""
    with LLM(TINY, device="cpu", dtype="float32", max_model_len=148, **({"executor": "uni"} | options)) as llm:
        if disturb is not None:
            disturb_once(llm._engine, disturb)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], llm.stats()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate(**PLAIN)[0]


@pytest.mark.parametrize("swap", [{}, SWAP], ids=["recompute", "swap"])
@pytest.mark.parametrize(("run_ahead", "caching", "is_short"), list(product((False, True), repeat=3)))
def test_in_this_process(
    run_ahead: bool, caching: bool, is_short: bool, swap: dict[str, Any], expected: list[list[int]]
) -> None:
    """`is_short`: of memory, so sequences are preempted, and of tokens in a step, so prompts are cut into chunks."""
    tokens, stats = generate(
        executor="uni",
        run_ahead=run_ahead,
        enable_prefix_caching=caching,
        max_num_batched_tokens=24 if is_short else 2048,
        **(SMALL_POOL if is_short else {}),
        **swap,
    )
    assert tokens == expected
    assert (stats.num_preemptions > 0) == is_short
    assert (stats.pool.num_swapped_in > 0) == (is_short and bool(swap))


SIZES: dict[str, dict[str, Any]] = {
    "mp": {"executor": "mp"},
    "TP 2": {"executor": "mp", "tensor_parallel_size": 2},
    "PP 2": {"executor": "mp", "pipeline_parallel_size": 2},
}
CASES = [
    pytest.param(size, run_ahead, caching, swaps, marks=[] if size == "mp" else pytest.mark.ranks)
    for run_ahead, caching, swaps in product((False, True), repeat=3)
    for size in ("mp", "TP 2" if run_ahead == swaps else "PP 2")
]
"""Each of the eight choices with one rank and with two."""


@pytest.mark.parametrize(("size", "run_ahead", "caching", "swaps"), CASES)
def test_in_processes_of_their_own(
    size: str, run_ahead: bool, caching: bool, swaps: bool, expected: list[list[int]]
) -> None:
    is_cut = (run_ahead + caching + swaps) % 2 == 1  # prompts into chunks
    tokens, stats = generate(
        run_ahead=run_ahead,
        enable_prefix_caching=caching,
        max_num_batched_tokens=24 if is_cut else 2048,
        **SMALL_POOL,
        **(SWAP if swaps else {}),
        **SIZES[size],
    )
    assert tokens == expected
    assert stats.num_preemptions > 0
    assert (stats.pool.num_swapped_in > 0) == swaps


# --- a pool that swaps, and a fault --------------------------------------------------------------------------------


def disturb_once(engine: Engine, disturb: Callable[[Engine], None]) -> None:
    step = engine.step

    def step_and_disturb() -> list[Progress]:
        progress = step()
        if engine.scheduler.stats().pool.num_swapped_in > 0:
            engine.step = step  # type: ignore[method-assign]
            disturb(engine)
        return progress

    engine.step = step_and_disturb  # type: ignore[method-assign]


def kill_the_worker(engine: Engine) -> None:
    assert isinstance(engine._executor, MultiprocExecutor)
    os.kill(engine._executor.worker_pids()[0], signal.SIGKILL)


def sleep_and_wake_up(engine: Engine) -> None:
    engine.sleep(1)
    engine.wake_up()


def run_out_of_memory(engine: Engine) -> None:
    """In the next step that has moved blocks to the device."""
    assert isinstance(engine._executor, UniprocExecutor) and isinstance(engine._executor._worker, Rank)
    runner = engine._executor._worker.runner
    assert runner is not None
    run = runner._sample

    def fail(plan: StepPlan, batch: StepBatch) -> StepOutput | None:
        if not plan.swap_in:
            return run(plan, batch)
        runner._sample = run  # type: ignore[method-assign]
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner._sample = fail  # type: ignore[method-assign]


FAULTS = [
    pytest.param("mp", kill_the_worker, "restarting the workers", id="death of the worker", marks=pytest.mark.faults),
    pytest.param("uni", sleep_and_wake_up, "", id="sleep"),
    pytest.param("uni", run_out_of_memory, "out of memory: steps have", id="out of memory"),
]


@pytest.mark.parametrize(("executor", "disturb", "logged"), FAULTS)
def test_with_swap_after_a_fault(
    executor: str,
    disturb: Callable[[Engine], None],
    logged: str,
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokens, stats = generate(disturb, executor=executor, max_num_batched_tokens=40, **SMALL_POOL, **SWAP)
    assert tokens == expected
    assert stats.pool.num_swapped_in > 0
    assert logged in caplog.text
