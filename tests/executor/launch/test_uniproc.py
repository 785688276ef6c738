"""Errors of a worker in this process become errors of the executor, and keep nothing of the worker alive."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.executor.errors import StartError, WorkerDied, WorkerError
from millrace.executor.launch.uniproc import UniprocExecutor
from tests.executor.fragile_worker import Activations, PinnedMemory
from tests.executor.kinds import first_step, start, stub_config


def fragile(faults: str) -> UniprocExecutor:
    executor = UniprocExecutor(stub_config(faults), worker_module="tests.executor.fragile_worker")
    start(executor)
    return executor


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_lost_device_is_a_worker_error_and_nothing_that_it_used_is_freed() -> None:
    num_freed = PinnedMemory.num_freed
    executor = fragile("lose-device")
    with pytest.raises(WorkerError, match="illegal memory access") as caught:
        executor.check_health()
    assert caught.value.failure.cause == "device_lost"
    del caught
    executor.restart()
    assert (executor.epoch, executor.stats().num_active_workers) == (2, 1)
    executor.shutdown()
    assert PinnedMemory.num_freed == num_freed
    with pytest.raises(WorkerDied):
        executor.check_health()


def test_an_error_that_the_caller_is_handling_keeps_its_traceback() -> None:
    executor = fragile("memory-at-step=1")
    try:
        raise ValueError("the caller's own")
    except ValueError as error:
        with pytest.raises(WorkerError):
            executor.execute_model(first_step(executor)).result()
        kept = error.__traceback__
    assert kept is not None


def test_the_health_check_does_not_use_the_device_of_a_sleeping_worker() -> None:
    executor = fragile("lose-device")
    executor.sleep()
    executor.check_health()


@pytest.mark.usefixtures("_no_collection")
def test_a_step_out_of_memory_leaves_none_of_its_tensors() -> None:
    executor = fragile("memory-at-step=1")
    with pytest.raises(WorkerError) as caught:
        executor.execute_model(first_step(executor)).result()
    assert "_run_forward" in caught.value.failure.traceback
    assert len(Activations.alive) == 0
    assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1


@pytest.mark.usefixtures("_no_collection")
def test_a_start_out_of_memory_frees_its_memory_for_the_next(tmp_path: Path) -> None:
    faults = f"memory-at-start={tmp_path / 'tried'}"
    executor = UniprocExecutor(stub_config(faults), worker_module="tests.executor.fragile_worker")
    try:
        executor.start()
    except StartError as error:
        last_error = error  # kept, as by a caller that tries again
    assert last_error.is_retryable
    assert len(Activations.alive) == 0
    start(executor)


def test_a_worker_whose_stats_fail_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    executor = fragile("lose-stats")
    assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1
    executor._next_sample_s = 0.0
    executor.check_health()
    assert caplog.text.count("reading the worker's stats failed") == 2
    assert executor.stats().device_bytes == [0]


def test_the_traceback_of_a_failed_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    executor = fragile("raise-at-step=1,memory-at-step=2")
    for number in (1, 2):
        with pytest.raises(WorkerError):
            executor.execute_model(first_step(executor, number)).result()
    assert "the stub was told to raise" in caplog.text
    assert "_run_forward" not in caplog.text, "running out of memory is logged in one line"


# --- in a forked process ---

FORKED = """
import os, sys
{before}
from millrace.executor.launch.uniproc import UniprocExecutor
from tests.executor.kinds import start, stub_config

pid = os.fork()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
try:
    executor = UniprocExecutor(stub_config(), worker_module="tests.executor.stub")
    start(executor)
    executor.shutdown()
    print("it runs")
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("before", "result"), [("import torch", "executor: uni cannot run in this process"), ("", "it runs")]
)
def test_a_process_forked_with_torch_is_refused(before: str, result: str) -> None:
    code = FORKED.format(before=before)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout.startswith(result)) == (0, True), ran
