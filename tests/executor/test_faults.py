"""Faults of workers at every moment: the executor notices and names them, recovers, and leaves nothing behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import msgspec
import pytest

from millrace.engine_service.core.scheduler import SchedulerConfig
from millrace.engine_service.engine import Engine
from millrace.executor.base import Executor
from millrace.executor.errors import ExecutorError, ExecutorTimeout, StartError, WorkerDied, WorkerError
from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.executor.limits import Limits
from millrace.executor.metrics import ExecutorMetrics
from millrace.executor.wire.calls import PendingCall
from millrace.executor.wire.channel import Channel
from tests.engine_service.test_engine import assert_undisturbed, generation, run
from tests.executor.kinds import (
    SHORT,
    STUB,
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
from tests.executor.rude_worker import INVALID_REPLIES, LARGEST_FRAME
from tests.executor.stub import next_token
from tests.processes import LIMIT_S, children_of, wait_until

TWO = {"tensor_parallel_size": 2}

both_ranks = pytest.mark.parametrize("rank", [0, 1])


@both_ranks
@pytest.mark.parametrize("action", ["die", "stop", "hang"])
def test_a_step_that_does_not_end_is_ended(make: Make, action: str, rank: int, tmp_path: Path) -> None:
    """Prefill is a worker's first step here, decode its second."""
    for number in (1, 2):
        (meeting := tmp_path / str(number)).mkdir()
        fault = f"{action}-at-step={number},on-rank={rank},once={meeting / 'done'},barrier={meeting}"
        executor = start(make(fault, SHORT, **TWO))
        for plan in [first_step(executor), decode(executor, 2)][: number - 1]:
            executor.execute_model(plan).result()
        with pytest.raises(WorkerDied) as caught:
            executor.execute_model([first_step, decode][number - 1](executor, number)).result()
        assert caught.value.rank == rank or action == "hang"  # then its peer waits for it, and is late as well
        assert caught.value.reason.startswith("killed by SIGKILL" if action == "die" else "stuck")
        executor.restart()
        assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1
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
    assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1


SLEEP_ERRORS: dict[str, type[ExecutorError]] = {
    "die": WorkerDied,
    "raise": WorkerError,
    "stop": WorkerDied,
    "hang": ExecutorTimeout,
}
"""`hang`: with a heartbeat."""

SHOWN = {("stop", "sleep", 1), ("hang", "wake-up", 0)}
"""The cases that wait for a limit and are part of `make test`."""


@pytest.mark.parametrize(
    ("action", "place", "rank"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case[0] in ("stop", "hang") and case not in SHOWN else [])
        for case in product(SLEEP_ERRORS, ("sleep", "wake-up"), (0, 1))
    ],
)
def test_a_sleep_that_fails_raises_and_a_restart_helps(
    make: Make, action: str, place: str, rank: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = msgspec.structs.replace(SHORT, sleep_call_s=1.5) if action == "hang" else SHORT
    executor = start(make(f"{action}-at-{place},on-rank={rank},once={tmp_path / 'done'}", limits, **TWO))
    with pytest.raises(SLEEP_ERRORS[action]) as caught:
        sleep_and_wake(executor)
    assert caught.value.rank == rank  # type: ignore[attr-defined]
    executor.restart()
    assert action != "hang" or "in fault_at" in capfd.readouterr().err
    assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1


def sleep_and_wake(executor: Executor) -> None:
    executor.sleep(2)
    executor.wake_up()


def test_the_limit_of_sleep_and_wake_grows_with_the_weights(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the stub's ranks have 1 MiB and 2 MiB. Only after level 2 they are read from disk."""
    limits = Limits(sleep_call_s=60, move_bytes_per_s=2**20, read_bytes_per_s=2**18)
    executor = make("", limits, **TWO)
    executor.start()
    limits_s: list[float] = []
    real_result = PendingCall.result

    def result(self: PendingCall, timeout_s: float | None = None) -> object:
        limits_s.append(self._limit_s if timeout_s is None else timeout_s)
        return real_result(self, timeout_s)

    monkeypatch.setattr(PendingCall, "result", result)
    for level in (1, 2):
        executor.sleep(level)
        executor.wake_up()
    assert limits_s == [63, 63, 63, 72]


def test_a_pending_call_fails_when_its_workers_are_replaced(make: Make, tmp_path: Path) -> None:
    executor = start(make(f"hang-at-step=1,once={tmp_path / 'done'}"))
    step = executor.execute_model(first_step(executor))
    wait_until((tmp_path / "done").exists, what="the fault")
    executor.restart()
    with pytest.raises(WorkerDied):
        step.result(timeout_s=0)
    assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1


def test_replies_are_counted_once_while_their_channel_closes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = start(make())
    executor.execute_model(first_step(executor)).result()
    num_bytes = [executor.stats().reply_bytes]
    real_close = Channel.close

    def close(self: Channel) -> None:
        num_bytes.append(executor.stats().reply_bytes)
        real_close(self)

    monkeypatch.setattr(Channel, "close", close)
    executor.restart()
    num_bytes.append(executor.stats().reply_bytes)
    assert num_bytes[0] > 0
    assert set(num_bytes) == {num_bytes[0]}


@both_ranks
@pytest.mark.parametrize("action", ["die", "stop", "hang"])
def test_a_shutdown_ends_them_whatever_they_do(make: Make, action: str, rank: int) -> None:
    executor = start(make(f"{action}-at-shutdown,on-rank={rank}", SHORT, **TWO))
    pids = worker_pids(executor)
    executor.shutdown()
    assert not any(is_alive(pid) for pid in pids)


def test_a_worker_that_exits_with_status_0_is_lost_too(make: Make) -> None:
    executor = start(make("exit-at-step=1"))
    with pytest.raises(WorkerDied, match="exit status 0"):
        executor.execute_model(first_step(executor)).result()


def test_a_stopped_worker_is_noticed_by_the_health_check_of_an_idle_engine(make: Make) -> None:
    executor = start(make("", SHORT))
    os.kill(worker_pids(executor)[0], signal.SIGSTOP)
    with pytest.raises(WorkerDied, match="heartbeat"):
        check_health_for(executor, seconds=60)
    wait_until_gone(worker_pids(executor)[0])


def test_the_stacks_of_a_stuck_worker_and_of_those_that_wait_for_it_are_written_down(
    make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    executor = start(make(f"hang-at-step=1,on-rank=0,barrier={tmp_path}", SHORT, **TWO))
    with pytest.raises(WorkerDied, match="stuck"):
        executor.execute_model(first_step(executor)).result()
    written = capfd.readouterr().err
    assert written.count("in fault_at") == written.count("in _wait_for_ranks") == 1
    assert written.count("heartbeat.py") >= 2


def test_running_out_of_memory_is_told_apart(make: Make) -> None:
    executor = start(make("oom-at-step=1"))
    with pytest.raises(WorkerError) as caught:
        executor.execute_model(first_step(executor)).result()
    failure = caught.value.failure
    assert (failure.kind, failure.cause, failure.is_retryable) == ("OutOfMemoryError", "out_of_memory", True)


# --- on the wire ---


@pytest.fixture
def rude(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., MultiprocExecutor]]:
    """Makes executors whose ranks misbehave in the way that is named."""
    made: list[MultiprocExecutor] = []

    def make(rudeness: str, faults: str = "", **options: int) -> MultiprocExecutor:
        monkeypatch.setenv("RUDE", rudeness)
        monkeypatch.setenv("RUDE_ONCE", str(tmp_path / "rude"))
        config = stub_config(faults, **options)
        made.append(MultiprocExecutor(config, worker_module="tests.executor.rude_worker", limits=SHORT))
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown()


Rude = Callable[..., MultiprocExecutor]


def wait_for_figures(executor: Executor, is_true: Callable[[ExecutorMetrics], bool]) -> None:
    """Check the health until then, as an idle engine does."""

    def check() -> bool:
        executor.check_health()
        return is_true(executor.stats())

    wait_until(check, what="the expected metrics")


def test_the_valid_messages_of_a_worker_that_sends_garbage_count(rude: Rude, caplog: pytest.LogCaptureFixture) -> None:
    executor = rude("garbage")
    with caplog.at_level(logging.WARNING, "millrace.executor"):
        start(executor)
        assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1
    assert len([record for record in caplog.records if "dropped" in record.message]) == 1
    assert executor.stats().num_stale_replies >= 10


def test_what_arrives_in_the_middle_of_a_step_and_is_not_ours_changes_nothing(
    rude: Rude, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("millrace.executor.wire.channel.MAX_MESSAGE_BYTES", LARGEST_FRAME)
    executor = start(rude("crowd", "slow=300"))
    before = executor.stats()
    with caplog.at_level(logging.WARNING, "millrace.executor"):
        result = executor.execute_model(first_step(executor)).result()
        wait_for_figures(executor, lambda figures: figures.num_stale_replies >= 3)
    assert result.token_ids == [next_token(7, 3)]
    assert len([record for record in caplog.records if "no worker of ours" in record.message]) == 1
    after = executor.stats()
    assert after.num_stale_replies == 3  # garbage twice, once of another start; ZeroMQ drops what is too large
    assert (after.num_failed, after.num_failed_workers) == (before.num_failed, before.num_failed_workers)
    assert len(executor.execute_model(decode(executor, 2)).result().token_ids) == 1


@pytest.mark.parametrize("invalid_reply", INVALID_REPLIES)
def test_an_invalid_result_costs_a_restart_and_no_token(rude: Rude, invalid_reply: str) -> None:
    executor = rude(invalid_reply)
    engine = Engine(executor, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64))
    engine.start()
    generations = [generation(1)]
    run(engine, generations)
    assert_undisturbed(generations)
    assert (executor.stats().num_failed, executor.stats().num_restarts) == (1, 1)


def test_a_call_that_is_answered_like_a_step_has_failed(rude: Rude) -> None:
    executor = rude("step-for-call")
    executor.start()
    with pytest.raises(WorkerError, match="BadReply: it answered a call with a StepReply"):
        executor.collective_rpc("check_health")


def test_the_second_of_two_equal_replies_is_dropped(rude: Rude) -> None:
    executor = start(rude("twice"))
    for number in (1, 2, 3):
        executor.execute_model(first_step(executor, number, seq_id=number)).result()
    executor.collective_rpc("check_health")
    figures = executor.stats()
    assert (figures.num_steps, figures.num_tokens) == (3, 3)
    assert figures.num_stale_replies >= 3


def test_a_worker_of_another_version_is_refused(rude: Rude) -> None:
    with pytest.raises(StartError, match="protocol") as caught:
        rude("old").start()
    assert not caught.value.is_retryable


def test_a_rank_without_a_heartbeat_fails_the_start(rude: Rude) -> None:
    """Like a rank that was stopped before its first heartbeat: the silence counts from Hello."""
    with pytest.raises(StartError, match="no heartbeat") as caught:
        rude("heartless").start()
    assert caught.value.is_retryable


def test_a_rank_that_runs_steps_reports_device_memory_and_utilization(rude: Rude) -> None:
    """The stub's device holds a byte per token: three of the prompt, and one more."""
    executor = start(rude("curious", **TWO))
    executor.execute_model(first_step(executor)).result()
    wait_for_figures(executor, lambda figures: figures.device_bytes == [4, 4])
    wait_for_figures(executor, lambda figures: figures.device_utilization == [0.1, 0.1])


# --- nothing is left ---

PARENT = """
import sys, time
from millrace.executor.launch.multiproc import MultiprocExecutor
from tests.executor.kinds import STUB, start, stub_config, worker_pids
executor = MultiprocExecutor(stub_config(sys.argv[1], tensor_parallel_size=2), worker_module=STUB)
start(executor)
time.sleep(600)
"""


def test_an_engine_that_is_killed_leaves_no_worker_and_no_file(tmp_path: Path, short_path: Path) -> None:
    """In the start, where it lasts: while rank 1 loads its model; and afterwards."""
    for fault in (
        f"hang-at-start,on-rank=1,once={tmp_path / 'loading'}",
        f"hang-at-kv-pool,on-rank=1,once={tmp_path / 'loaded'}",
    ):
        environment = {**os.environ, "TMPDIR": str(short_path)}
        parent = subprocess.Popen([sys.executable, "-c", PARENT, fault], env=environment)
        try:
            wait_until(Path(fault.rpartition("=")[2]).exists, what="the fault")
            wait_until(lambda: not any(short_path.iterdir()), what="an empty directory")
            fds = [os.pidfd_open(pid) for pid in children_of(parent.pid)]
        finally:
            parent.kill()
            parent.wait()
        assert len(fds) == 2
        for fd in fds:
            wait_for_end(fd)
        assert list(short_path.iterdir()) == []


def wait_for_end(fd: int) -> None:
    import select

    assert select.select([fd], [], [], LIMIT_S)[0]
    os.close(fd)


@pytest.mark.slow
def test_a_hundred_starts_leave_no_process_no_file_and_no_memory(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    before = child_pids()
    counts = [start_once(number) for number in range(100)]
    assert list(short_path.iterdir()) == []
    assert counts[-1][0] == counts[5][0]
    assert counts[-1][1] - counts[5][1] < 8 * 2**20
    assert child_pids() == before


def child_pids() -> set[str]:
    return set(subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True).stdout.split())


def start_once(number: int) -> tuple[int, int]:
    """Start and end workers, every third time by a fault. Returns (open files, resident bytes) of this process."""
    executor = MultiprocExecutor(stub_config("die-at-step=1" if number % 3 == 0 else ""), worker_module=STUB)
    start(executor)
    try:
        executor.execute_model(first_step(executor)).result()
    except ExecutorError:
        assert number % 3 == 0
    executor.shutdown()
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), resident_pages * os.sysconf("SC_PAGE_SIZE")
