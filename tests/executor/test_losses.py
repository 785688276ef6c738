"""Which rank is to blame, on which devices the others go on, and what a start says for which nothing was to be had."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from millrace.executor.errors import StartError, UnknownMethod, WorkerDied, WorkerError
from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.executor.rank.heartbeat import Heartbeat
from millrace.executor.wire.failures import EXIT_CRASH, exit_status, is_retryable_exit, to_failure
from tests.executor.fragile_worker import AcceleratorError
from tests.executor.kinds import SHORT, Make, decode, first_step, start, stub_config
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
    monkeypatch.setattr("millrace.executor.wire.calls._WITNESS_S", 10.0)
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
    assert "the worker did not end in order" in written


def test_a_rank_that_can_not_tell_its_figures_goes_on(
    fragile: list[MultiprocExecutor], capfd: pytest.CaptureFixture[str]
) -> None:
    executor = start_fragile(fragile, "lose-figures")
    executor.execute_model(first_step(executor)).result()
    with pytest.raises(WorkerError, match="unknown error"):
        executor.worker_stats()  # after a call it looks by itself, too
    assert executor.execute_model(decode(executor, 2)).result().seq_ids == [1]
    assert "can't tell its figures" in capfd.readouterr().err


def test_memory_that_is_short_outside_of_torchs_allocator_is_no_lost_device() -> None:
    assert to_failure(AcceleratorError("CUDA error: out of memory")).cause == "out_of_memory"
    assert to_failure(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")).cause == "out_of_memory"
    lost = to_failure(AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert (lost.cause, is_retryable_exit(exit_status(lost)), is_retryable_exit(EXIT_CRASH)) == (
        "device_lost",
        True,
        True,
    )


# --- what may be called ---


@pytest.mark.parametrize("make", ["uni", "mp"], indirect=True)
@pytest.mark.parametrize("method", ["execute_model", "shutdown"])
def test_steps_and_the_end_are_no_calls(make: Make, method: str) -> None:
    executor = start(make())
    with pytest.raises(UnknownMethod, match=f"'{method}' is not a method of a worker; there are check_health,"):
        executor.collective_rpc(method)
    assert executor.execute_model(first_step(executor)).result().seq_ids == [1]


# --- a start for which nothing is to be had ---


@pytest.mark.parametrize("missing", ["directory", "process"])
def test_what_the_system_does_not_give_now_it_may_give_later(
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
    assert executor.execute_model(first_step(executor)).result().seq_ids == [1]


# --- devices ---


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> MultiprocExecutor:
    """Of four ranks, not started: only which devices they would get matters here."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return MultiprocExecutor(stub_config(tensor_parallel_size=4), worker_module="millrace.executor.rank.stub")


def devices(executor: MultiprocExecutor) -> str | None:
    return executor._environment().get("CUDA_VISIBLE_DEVICES")


def test_an_attempt_with_all_ranks_that_fails_forgets_no_broken_device(four: MultiprocExecutor) -> None:
    assert devices(four) is None
    four.resize(2, 1, lost_rank=3)
    assert devices(four) == "0,1,2"
    four.resize(1, 1, lost_rank=0)
    assert devices(four) == "1,2"
    four.resize(4, 1)
    assert devices(four) is None
    four.resize(1, 1, lost_rank=3)
    assert devices(four) == "1,2"
    four.resize(4, 1)
    four.resize(1, 1, lost_rank=1)
    assert devices(four) == "2"


def test_when_every_device_was_lost_once_the_oldest_loss_is_tried_first(four: MultiprocExecutor) -> None:
    for rank in (2, 1, 0, 3):
        four.resize(4, 1)
        four.resize(2, 1, lost_rank=rank)
    assert devices(four) == "2,1"


def test_when_all_ranks_are_back_no_device_counts_as_lost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    executor = make("", SHORT, tensor_parallel_size=3)
    assert isinstance(executor, MultiprocExecutor)
    executor.resize(1, 1, lost_rank=0)
    assert devices(executor) == "1,2"
    executor.resize(3, 1)
    start(executor)
    executor.resize(1, 1, lost_rank=1)
    assert devices(executor) == "0,2"


def test_a_host_whose_gpus_are_hidden_hides_them_from_fewer_ranks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    executor = MultiprocExecutor(stub_config(tensor_parallel_size=2), worker_module="millrace.executor.rank.stub")
    executor.resize(1, 1, lost_rank=0)
    assert devices(executor) == ""


# --- the heartbeat ---


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_heart_that_fails_does_not_hold_the_end_of_its_process_up() -> None:
    context = zmq.Context()
    engine, socket = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    engine.bind("inproc://heartbeat")
    socket.connect("inproc://heartbeat")
    Heartbeat(socket)
    engine.send(b"\xc1 this is no message")
    wait_until(lambda: socket.closed, what="the end of the heartbeat")
    engine.close(linger=0)
    context.term()
