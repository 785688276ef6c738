"""The start of `mp` in two parts, and which devices its ranks use when one of them is lost."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from millrace.executor.environment import SECRETS
from millrace.executor.errors import StartError
from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.executor.launch.process import _Starter
from tests.executor.kinds import SHORT, STUB, Make, start, stub_config
from tests.processes import environment_of


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> MultiprocExecutor:
    """Four ranks, not started: the tests only ask for their devices."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return MultiprocExecutor(stub_config(tensor_parallel_size=4), worker_module="tests.executor.stub")


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
    executor = MultiprocExecutor(stub_config(tensor_parallel_size=2), worker_module="tests.executor.stub")
    executor.resize(1, 1, lost_rank=0)
    assert devices(executor) == ""


def test_a_start_waits_for_the_processes_that_were_begun(make: Make) -> None:
    executor = make("", SHORT, tensor_parallel_size=2)
    assert isinstance(executor, MultiprocExecutor)
    executor.begin_start()
    begun = executor.worker_pids()
    assert len(begun) == 2
    start(executor)
    assert executor.worker_pids() == begun
    executor.restart()
    assert not set(executor.worker_pids()) & set(begun)


def test_a_rank_gets_no_logins_of_the_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "login")
    monkeypatch.setenv("LOCALE_OF_TEST", "kept")
    executor = make("", SHORT)
    assert isinstance(executor, MultiprocExecutor)
    start(executor)
    (pid,) = executor.worker_pids()
    variables = environment_of(pid)
    assert (set(SECRETS & variables.keys()), variables["LOCALE_OF_TEST"]) == (set(), "kept")


def test_processes_that_were_begun_end_without_a_start_too(make: Make) -> None:
    executor = make("", SHORT)
    assert isinstance(executor, MultiprocExecutor)
    executor.begin_start()
    [pid] = executor.worker_pids()
    executor.shutdown()
    assert not Path(f"/proc/{pid}").exists()


def test_processes_that_cannot_begin_leave_their_error_to_the_start(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    executor = make("", SHORT)
    with monkeypatch.context() as patch:
        patch.setattr("millrace.executor.launch.multiproc.WorkerProcess", fail)
        executor.begin_start()
        with pytest.raises(StartError, match="no more processes"):
            executor.start()
    executor.restart()


def run_in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_workers_outlive_the_thread_that_starts_them(make: Make) -> None:
    executor = make("", SHORT)
    run_in_thread(lambda: start(executor))
    assert isinstance(executor, MultiprocExecutor)
    (pid,) = executor.worker_pids()
    run_in_thread(lambda: executor.sleep(1))
    run_in_thread(executor.wake_up)
    executor.check_health()
    assert executor.worker_pids() == [pid]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_of_a_process_that_has_started_workers_starts_its_own(make: Make) -> None:
    start(make("", SHORT))
    executor = MultiprocExecutor(stub_config(), worker_module="tests.executor.stub")
    child = multiprocessing.get_context("fork").Process(target=_start_and_end, args=(executor,))
    child.start()
    child.join(60)
    assert child.exitcode == 0


def _start_and_end(executor: MultiprocExecutor) -> None:
    start(executor)
    executor.shutdown()


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Returns a function that sends this thread a signal. Its handler raises `TimeoutError`, as for a time limit."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before, receiver = signal.signal(signal.SIGUSR2, handle), threading.get_ident()
    yield lambda: signal.pthread_kill(receiver, signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)


def test_a_time_limit_of_the_program_ends_a_start_and_is_no_lack_of_the_system(interrupt: Callable[[], None]) -> None:
    executor = MultiprocExecutor(stub_config("hang-at-start"), worker_module=STUB)
    timer = threading.Timer(0.2, interrupt)
    timer.start()
    with pytest.raises(TimeoutError) as caught:
        executor.start()
    timer.join()
    assert type(caught.value) is TimeoutError
    assert (executor.worker_pids(), executor.stats().num_failed_workers) == ([], 0)


def test_a_process_that_begins_when_its_start_is_interrupted_is_ended(interrupt: Callable[[], None]) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def begin() -> subprocess.Popen[bytes]:
        interrupt()
        children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return children[0]

    starter = _Starter()
    starter.start()
    with pytest.raises(TimeoutError):
        starter.call(begin)
    with pytest.raises(FileNotFoundError):  # of a start that has failed there is nothing to end
        starter.call(lambda: subprocess.Popen(["/nowhere"]))
    assert children[0].wait(60) == -signal.SIGKILL
    children[0].communicate()
