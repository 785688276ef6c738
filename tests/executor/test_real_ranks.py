"""A real model on real ranks: the same tokens with all sizes, also after sleep and deaths."""

from __future__ import annotations

import os
import signal
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from millrace import LLM
from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.executor.wire.calls import PendingCall
from millrace.executor.wire.messages import StepPlan
from millrace.producer.sampling import SamplingParams
from tests.e2e.engines import TINY
from tests.engine_service.core.integrity import check_scheduler
from tests.processes import all_children_of

pytestmark = pytest.mark.ranks

PROMPTS = ["3 + 4 =", "20 + 22 =", "11 + 7 ="]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}


def make_llm(**options: Any) -> LLM:
    return LLM(TINY, device="cpu", dtype="float32", **options)


def generate(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Of one rank in this process."""
    with make_llm() as llm:
        return generate(llm)


@pytest.mark.parametrize("sizes", [TP2, PP2, pytest.param({**TP2, **PP2}, marks=pytest.mark.slow)])
def test_the_tokens_do_not_depend_on_the_sizes_nor_on_sleep(sizes: dict[str, int], expected: list[list[int]]) -> None:
    with make_llm(max_parallel_loading_workers=1, **sizes) as llm:
        assert generate(llm) == expected
        llm.sleep(2)
        llm.wake_up(["weights"])
        llm.wake_up()
        assert generate(llm) == expected


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped_while_idle_costs_no_token(
    victim: int, number: signal.Signals, expected: list[list[int]]
) -> None:
    with make_llm(**TP2) as llm:
        generate(llm)
        os.kill(executor_of(llm).worker_pids()[victim], number)
        assert generate(llm) == expected
        assert llm.metrics().executor.num_restarts == 1


PREFILL, DECODE = 1, 8
"""Which step of the work it is."""

SHOWN = {("TP2", PREFILL, 1, signal.SIGKILL), ("PP2", DECODE, 0, signal.SIGKILL)}
"""The cases of `make test`; the others are slow."""

CASES = [
    pytest.param(*case, marks=[] if case in SHOWN else [pytest.mark.slow])
    for case in product(("TP2", "PP2"), (PREFILL, DECODE), (0, 1), (signal.SIGKILL, signal.SIGSTOP))
]


@pytest.mark.parametrize(("sizes", "step", "victim", "number"), CASES)
def test_a_rank_that_is_killed_or_stopped_in_a_step_costs_no_token(
    sizes: str, step: int, victim: int, number: signal.Signals, expected: list[list[int]]
) -> None:
    with make_llm(**(TP2 if sizes == "TP2" else PP2)) as llm:
        generate(llm)
        has_landed = False
        while not has_landed:
            strike = Strike(executor_of(llm), step, victim, number)
            assert generate(llm) == expected
            has_landed = strike.has_landed
        assert llm.metrics().executor.num_restarts == 1


class Strike:
    """Sends a rank the signal once it computes the nth step from now on."""

    def __init__(self, executor: MultiprocExecutor, nth: int, victim: int, number: signal.Signals) -> None:
        self.has_landed = False
        """False as well where the step was over before, as on a crowded machine."""
        self._executor = executor
        self._nth = nth
        self._victim = victim
        self._number = number
        self._numbers = count(1)
        executor.execute_model = self._send  # type: ignore[method-assign]

    def _send(self, plan: StepPlan) -> PendingCall:
        if next(self._numbers) != self._nth:
            return MultiprocExecutor.execute_model(self._executor, plan)
        pid = self._executor.worker_pids()[self._victim]
        before_ns = computed_ns(pid)
        step = MultiprocExecutor.execute_model(self._executor, plan)
        while computed_ns(pid) - before_ns < 300_000:  # a step takes milliseconds
            os.sched_yield()
        os.kill(pid, signal.SIGSTOP)
        self._executor.process_messages(0)
        self.has_landed = not step.done()
        os.kill(pid, self._number if self.has_landed else signal.SIGCONT)
        return step


def computed_ns(pid: int) -> int:
    """What the process's main thread has had of a CPU."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])


def executor_of(llm: LLM) -> MultiprocExecutor:
    executor = llm._engine._executor
    assert isinstance(executor, MultiprocExecutor)
    return executor


class Left(NamedTuple):
    """What this project holds on this machine."""

    processes: set[int]
    open_files: int
    shared_memory: set[str]
    temporary_files: set[str]
    resident_bytes: int


def what_is_left(temporary: Path) -> Left:
    return Left(
        processes=set(all_children_of(os.getpid())),
        open_files=len(os.listdir("/proc/self/fd")),
        shared_memory={
            name for name in os.listdir("/dev/shm") if name.startswith(("torch", "gloo", "nccl", "millrace"))
        },
        temporary_files=set(os.listdir(temporary)),
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_starts_of_real_ranks_leave_everything_as_it_was(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    seen: list[Left] = []
    for number in range(10):
        with make_llm(executor="mp", **(TP2 if number % 2 else {})) as llm:
            generate(llm)
            if number % 3 == 2:
                os.kill(executor_of(llm).worker_pids()[-1], signal.SIGKILL)
        seen.append(what_is_left(short_path))
    first, last = seen[2], seen[-1]
    assert last[:4] == first[:4]
    assert last.temporary_files == set()
    assert last.resident_bytes - first.resident_bytes < 16 * 2**20


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_restarts_in_a_step_leave_memory_and_pool_as_they_were(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    seen: list[Left] = []
    with make_llm(executor="mp", enable_prefix_caching=False) as llm:
        generate(llm)
        scheduler, executor = llm._engine.scheduler, executor_of(llm)
        while len(seen) < 10:
            strike = Strike(executor, DECODE, 0, signal.SIGKILL)
            assert generate(llm) == expected
            if strike.has_landed:
                seen.append(what_is_left(short_path))
            check_scheduler(scheduler)
            assert scheduler.pool.num_free == scheduler.pool.num_blocks - 1
        assert llm.metrics().executor.num_restarts == 10
    first, last = seen[1], seen[-1]
    assert len(last.processes) == len(first.processes)
    assert last[1:4] == first[1:4]
    assert last.resident_bytes - first.resident_bytes < 16 * 2**20
