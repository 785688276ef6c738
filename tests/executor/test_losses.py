"""Which rank an error names, and a start for which the system lacks a directory or a process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.executor.errors import StartError, WorkerDied, WorkerError
from millrace.executor.launch.multiproc import MultiprocExecutor
from tests.executor.kinds import Make, decode, first_step, start, stub_config
from tests.processes import wait_until


@pytest.fixture
def fragile() -> Iterator[list[MultiprocExecutor]]:
    """Executors that are stopped at the end."""
    made: list[MultiprocExecutor] = []
    yield made
    for executor in made:
        executor.shutdown()


def start_fragile(fragile: list[MultiprocExecutor], faults: str, **sizes: int) -> MultiprocExecutor:
    fragile.append(MultiprocExecutor(stub_config(faults, **sizes), worker_module="tests.executor.fragile_worker"))
    start(fragile[-1])
    return fragile[-1]


# --- whose error it is ---


def test_the_rank_that_died_is_named_and_not_the_peer_that_noticed(
    fragile: list[MultiprocExecutor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.executor.wire.calls._PEER_DEATH_S", 10.0)
    executor = start_fragile(fragile, f"lose-peer={tmp_path}", tensor_parallel_size=2)
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        executor.execute_model(first_step(executor)).result()
    assert caught.value.rank == 1
    assert executor.stats().num_failed_workers == 1


def test_a_rank_with_a_lost_device_says_so_and_ends_with_that_status(
    fragile: list[MultiprocExecutor], capfd: pytest.CaptureFixture[str]
) -> None:
    executor = start_fragile(fragile, "lose-device")
    with pytest.raises(WorkerError, match="illegal memory access") as caught:
        executor.execute_model(first_step(executor)).result()
    assert caught.value.failure.cause == "device_lost"

    def end() -> str:
        with contextlib.suppress(WorkerDied):
            executor.check_health()
            return ""
        return str(executor._lost)

    wait_until(end, what="the end of the rank")
    assert "device lost" in end()
    written = capfd.readouterr().err
    assert "a step failed" in written and "_touch_device" in written


def test_a_rank_whose_stats_fail_goes_on(fragile: list[MultiprocExecutor], capfd: pytest.CaptureFixture[str]) -> None:
    executor = start_fragile(fragile, "lose-stats")
    executor.execute_model(first_step(executor)).result()
    with pytest.raises(WorkerError, match="unknown error"):
        executor.worker_stats()  # after a call it also takes a sample for its heartbeat
    assert len(executor.execute_model(decode(executor, 2)).result().token_ids) == 1
    assert "reading the worker's stats failed" in capfd.readouterr().err


# --- a system without resources ---


@pytest.mark.parametrize("missing", ["directory", "process"])
def test_a_start_that_lacks_a_resource_of_the_system_may_be_tried_again(
    make: Make, missing: str, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make()
    with monkeypatch.context() as patch:
        if missing == "directory":
            patch.setattr("tempfile.tempdir", str(short_path / "gone"))
        else:
            patch.setattr(sys, "executable", str(short_path / "gone"))
        with pytest.raises(StartError, match="gone") as caught:
            executor.start()
    assert (caught.value.phase, caught.value.rank, caught.value.is_retryable) == ("spawn", 0, True)
    start(executor)
    assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1
