"""What workers do wrong, at every moment of their life: it is noticed, named, survived, and nothing is left behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from executor.errors import ExecutorError, StartError, WorkerDied, WorkerError
from executor.multiproc import MultiprocExecutor
from tests.executor.kinds import (
    SHORT,
    Make,
    check_health_for,
    decode,
    first_step,
    is_alive,
    start,
    stub_config,
    wait_until_gone,
    worker_pids,
)
from tests.processes import wait_until

TWO = {"tensor_parallel_size": 2}

both_ranks = pytest.mark.parametrize("rank", [0, 1])


@both_ranks
@pytest.mark.parametrize("action", ["die", "stop", "hang"])
def test_a_step_that_does_not_end_is_ended(make: Make, action: str, rank: int, tmp_path: Path) -> None:
    """Prefill is a worker's first step here, decode its second."""
    for number in (1, 2):
        (meeting := tmp_path / str(number)).mkdir()
        fault = f"{action}-at-step={number},on-rank={rank},once={meeting / 'done'},meet={meeting}"
        executor = start(make(fault, SHORT, **TWO))
        for plan in [first_step(executor), decode(executor, 2)][: number - 1]:
            executor.execute_model(plan).result()
        with pytest.raises(WorkerDied) as caught:
            executor.execute_model([first_step, decode][number - 1](executor, number)).result()
        assert caught.value.rank == rank or action == "hang"  # then its peer waits for it, and is late as well
        assert caught.value.reason.startswith("killed by SIGKILL" if action == "die" else "stuck")
        executor.restart()
        assert executor.execute_model(first_step(executor)).result().seq_ids == [1]
        assert executor.stats().recovery_s > 0


@both_ranks
@pytest.mark.parametrize("action", ["die", "stop", "exit"])
def test_a_start_that_fails_leaves_nobody_behind_and_can_be_tried_again(
    make: Make, action: str, rank: int, tmp_path: Path
) -> None:
    executor = make(f"{action}-at-start,on-rank={rank},once={tmp_path / 'done'}", SHORT, **TWO)
    with pytest.raises(StartError) as caught:
        executor.start()
    assert caught.value.rank == rank
    assert worker_pids(executor) == []
    start(executor)
    assert executor.execute_model(first_step(executor)).result().seq_ids == [1]


@both_ranks
@pytest.mark.parametrize("action", ["die", "stop", "raise"])
def test_a_nap_that_fails_says_so_and_a_restart_helps(make: Make, action: str, rank: int, tmp_path: Path) -> None:
    executor = start(make(f"{action}-at-sleep,on-rank={rank},once={tmp_path / 'done'}", SHORT, **TWO))
    with pytest.raises(WorkerError if action == "raise" else WorkerDied):
        executor.sleep()
    executor.restart()
    assert executor.execute_model(first_step(executor)).result().seq_ids == [1]


@both_ranks
@pytest.mark.parametrize("action", ["die", "stop", "hang"])
def test_a_shutdown_ends_them_whatever_they_do(make: Make, action: str, rank: int) -> None:
    executor = start(make(f"{action}-at-shutdown,on-rank={rank}", SHORT, **TWO))
    pids = worker_pids(executor)
    executor.shutdown()
    assert not any(is_alive(pid) for pid in pids)


def test_a_worker_that_exits_as_if_all_were_well_is_lost_too(make: Make) -> None:
    executor = start(make("exit-at-step=1"))
    with pytest.raises(WorkerDied, match="exit status 0"):
        executor.execute_model(first_step(executor)).result()


def test_a_stopped_worker_is_noticed_by_the_health_check_of_an_idle_engine(make: Make) -> None:
    executor = start(make("", SHORT))
    os.kill(worker_pids(executor)[0], signal.SIGSTOP)
    with pytest.raises(WorkerDied, match="heartbeat"):
        check_health_for(executor, seconds=15)
    wait_until_gone(worker_pids(executor)[0])


def test_the_stacks_of_a_stuck_worker_are_written_down(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    executor = start(make("hang-at-step=1", SHORT))
    with pytest.raises(WorkerDied, match="stuck"):
        executor.execute_model(first_step(executor)).result()
    written = capfd.readouterr().err
    assert "fault_at" in written
    assert "heart.py" in written


def test_running_out_of_memory_is_told_apart(make: Make) -> None:
    executor = start(make("oom-at-step=1"))
    with pytest.raises(WorkerError) as caught:
        executor.execute_model(first_step(executor)).result()
    failure = caught.value.failure
    assert (failure.kind, failure.cause, failure.is_retryable) == ("OutOfMemoryError", "out_of_memory", True)


# --- on the wire ---


def rude(rudeness: str, monkeypatch: pytest.MonkeyPatch) -> MultiprocExecutor:
    monkeypatch.setenv("RUDE", rudeness)
    return MultiprocExecutor(stub_config(), worker_module="tests.executor.rude_worker", limits=SHORT)


def test_a_worker_that_sends_garbage_is_heard_where_it_makes_sense(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor = rude("garbage", monkeypatch)
    try:
        with caplog.at_level(logging.WARNING, "millrace.executor"):
            start(executor)
            assert executor.execute_model(first_step(executor)).result().seq_ids == [1]
        assert len([record for record in caplog.records if "dropped" in record.message]) == 1
        assert executor.stats().num_stale_replies >= 10
    finally:
        executor.shutdown()


def test_a_worker_that_replies_twice_is_heard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = rude("twice", monkeypatch)
    try:
        start(executor)
        for number in (1, 2, 3):
            executor.execute_model(first_step(executor, number, seq_id=number)).result()
        executor.collective_rpc("check_health")
        figures = executor.stats()
        assert (figures.num_steps, figures.num_tokens) == (3, 3)
        assert figures.num_stale_replies >= 3
    finally:
        executor.shutdown()


def test_a_worker_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = rude("old", monkeypatch)
    with pytest.raises(StartError, match="protocol") as caught:
        executor.start()
    assert not caught.value.is_retryable


def test_a_rank_without_a_heart_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was stopped before its first heartbeat: silence counts from its first word."""
    executor = rude("heartless", monkeypatch)
    with pytest.raises(StartError, match="no heartbeat") as caught:
        executor.start()
    assert caught.value.is_retryable


# --- nothing is left ---

PARENT = """
import sys, time
from executor.multiproc import MultiprocExecutor
from tests.executor.kinds import start, stub_config, worker_pids
executor = MultiprocExecutor(stub_config(sys.argv[1], tensor_parallel_size=2), worker_module="executor.stub")
start(executor)
time.sleep(60)
"""


def test_an_engine_that_is_killed_leaves_no_worker_and_no_file(tmp_path: Path) -> None:
    """In the start, where it lasts: while rank 1 loads its model; and afterwards."""
    temporary, loading = tmp_path / "temporary", tmp_path / "loading"
    temporary.mkdir()
    for fault in (f"hang-at-start,on-rank=1,once={loading}", f"hang-at-kv-pool,on-rank=1,once={tmp_path / 'loaded'}"):
        environment = {**os.environ, "TMPDIR": str(temporary)}
        parent = subprocess.Popen([sys.executable, "-c", PARENT, fault], env=environment)
        try:
            wait_until(Path(fault.rpartition("=")[2]).exists, what="the fault")
            wait_until(lambda: not any(temporary.iterdir()), 10, "an empty directory")
            pids = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
            fds = [os.pidfd_open(int(pid)) for pid in pids]
        finally:
            parent.kill()
            parent.wait()
        assert len(fds) == 2
        for fd in fds:
            wait_for_end(fd)


def wait_for_end(fd: int) -> None:
    import select

    assert select.select([fd], [], [], 10)[0]
    os.close(fd)


@pytest.mark.slow
def test_a_hundred_lives_leave_no_process_no_file_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    counts = [live_once(number) for number in range(100)]
    assert list(tmp_path.iterdir()) == []
    assert counts[-1][0] == counts[5][0]
    assert counts[-1][1] - counts[5][1] < 8 * 2**20
    assert subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True).stdout.count("\n") <= 1


def live_once(number: int) -> tuple[int, int]:
    """(open files, resident bytes) of this process after one more life, which ends well or badly by turns."""
    executor = MultiprocExecutor(stub_config("die-at-step=1" if number % 3 == 0 else ""), worker_module="executor.stub")
    start(executor)
    try:
        executor.execute_model(first_step(executor)).result()
    except ExecutorError:
        assert number % 3 == 0
    executor.shutdown()
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), resident_pages * os.sysconf("SC_PAGE_SIZE")
