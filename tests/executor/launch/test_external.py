"""`millrace serve` under torchrun: its processes become ranks, and the service ends with them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.executor.base import Executor
from millrace.executor.environment import SECRETS
from millrace.executor.errors import ExecutorTimeout, StartError, WorkerDied
from millrace.executor.launch.external import ExternalLauncherExecutor, ExternalRank, _rendezvous_dir, become_rank
from millrace.executor.socket_directory import MAX_DIRECTORY_BYTES
from millrace.executor.wire.channel import Channel
from millrace.producer.client import Client
from tests.e2e.engines import ROOT, TINY, EngineProcess, wait_until
from tests.executor.kinds import (
    SHORT,
    Make,
    check_health_for,
    first_step,
    start,
    stub_config,
    wait_until_gone,
    worker_pids,
)

external = pytest.mark.parametrize("make", ["external"], indirect=True)

LIMITS = msgspec.structs.replace(SHORT, shutdown_s=2.0)
"""Enough for a heartbeat of a rank that is well."""


def shut_down_without_launcher(executor: Executor) -> None:
    """What the service does; the launcher would kill whatever is left."""
    assert isinstance(executor, ExternalLauncherExecutor)
    ExternalLauncherExecutor.shutdown(executor)


def test_without_torchrun_it_says_what_to_type() -> None:
    with pytest.raises(StartError, match="torchrun --nproc-per-node N --max-restarts 3 --no-python millrace serve"):
        ExternalLauncherExecutor(stub_config()).start()


@pytest.mark.parametrize("name", ["x" * 100, "ä" * 38])
def test_the_directory_of_the_socket_is_short_enough_also_in_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", f"/{name}")
    assert len(os.fsencode(_rendezvous_dir({}, 1))) <= MAX_DIRECTORY_BYTES


@external
def test_a_lost_rank_can_only_be_started_again_by_who_started_it(make: Make) -> None:
    executor = start(make())
    os.kill(worker_pids(executor)[1], signal.SIGKILL)
    wait_until_gone(worker_pids(executor)[1])
    with pytest.raises(WorkerDied, match="rank 1"):
        executor.check_health()
    assert not executor.can_restart
    with pytest.raises(StartError, match=r"only torchrun .*--max-restarts"):
        executor.restart()


@external
def test_a_start_that_fails_names_phase_and_rank(make: Make) -> None:
    executor = make("raise-at-start,on-rank=1")
    with pytest.raises(StartError, match="told to raise") as caught:
        executor.start()
    assert (caught.value.phase, caught.value.rank) == ("load_model", 1)


@external
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_respond_when_the_service_stops_is_killed(make: Make, rank: int) -> None:
    executor = start(make(limits=LIMITS))
    pid = worker_pids(executor)[rank]
    os.kill(pid, signal.SIGSTOP)
    shut_down_without_launcher(executor)
    wait_until_gone(pid)


@external
def test_it_is_killed_after_a_second_signal_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = start(make(limits=LIMITS))
    pid = worker_pids(executor)[1]
    os.kill(pid, signal.SIGSTOP)

    def interrupt(_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(executor, "_wait_for_heartbeats", interrupt)
    with pytest.raises(SystemExit):
        shut_down_without_launcher(executor)
    wait_until_gone(pid)


@external
def test_a_rank_that_does_not_respond_while_another_fails_to_start_is_killed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = make("raise-at-start,on-rank=1", limits=LIMITS)
    launch = executor._launch

    def launch_and_stop(channel: Channel) -> list[ExternalRank]:
        ranks: list[ExternalRank] = launch(channel)
        os.kill(ranks[0].pid, signal.SIGSTOP)
        return ranks

    monkeypatch.setattr(executor, "_launch", launch_and_stop)
    with pytest.raises(StartError, match="told to raise"):
        executor.start()
    wait_until_gone(executor.processes[0].pid)


@external
def test_of_a_group_only_the_rank_that_does_not_respond_is_killed(make: Make) -> None:
    executor: Any = start(make(limits=LIMITS))
    os.kill(worker_pids(executor)[1], signal.SIGSTOP)
    with pytest.raises(WorkerDied, match=r"rank 1 .*no heartbeat"):
        check_health_for(executor, 60)
    wait_until_gone(executor.processes[1].pid)
    with pytest.raises(subprocess.TimeoutExpired):
        executor.processes[0].wait(0.5)


@external
def test_a_rank_that_does_not_answer_but_has_its_heartbeat_is_left_to_end_with_the_service(make: Make) -> None:
    """It may only wait for another rank, and torchrun is to see with what the service ends."""
    executor: Any = start(make("hang-at-step=1,on-rank=1", limits=LIMITS))
    executor.execute_model(first_step(executor))
    with pytest.raises(ExecutorTimeout):
        executor.collective_rpc("check_health", timeout_s=0.1)
    shut_down_without_launcher(executor)
    assert [process.poll() for process in executor.processes] == [None, None]


def test_ranks_on_several_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="use ray for several hosts"):
        become_rank([])


def test_a_process_that_becomes_a_rank_forgets_the_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(BaseException):
        """Raised in the place of the exec."""

    def replace(_path: str, _command: list[str], variables: dict[str, str]) -> None:
        assert not SECRETS & variables.keys()
        assert variables["LOCALE_OF_TEST"] == "kept"
        raise Replaced

    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCALE_OF_TEST": "kept",
        **dict.fromkeys(SECRETS, "x"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.execve", replace)
    for name in ("_publish_pid", "_wait_for_pid"):
        monkeypatch.setattr(f"millrace.executor.launch.external.{name}", lambda *_: "1")
    with pytest.raises(Replaced):
        become_rank([])


class Torchrun:
    """One `torchrun` of two ranks, as the README has it, its log in a file."""

    def __init__(
        self,
        log: Path,
        redis_url: str,
        queue: str,
        port: str,
        *options: str,
        model: Path = TINY,
        max_restarts: int = 3,
        program: tuple[str, ...] = ("millrace", "serve"),
    ) -> None:
        self.log = log
        scripts = os.path.dirname(sys.executable)
        command = [f"{scripts}/torchrun", "--nproc-per-node", "2", "--max-restarts", str(max_restarts), "--no-python"]
        command += [*program, "--executor", "external", "--model", str(model)]
        command += ["--redis", redis_url, "--queue", queue, "--device", "cpu", "--heartbeat", "0.5", *options]
        path = {"PATH": os.pathsep.join((scripts, os.environ["PATH"])), "PYTHONPATH": str(ROOT)}
        place = {"TMPDIR": str(log.parent), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        environment = {**os.environ, **path, **place}
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd="/")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(120)

    def text(self) -> str:
        return self.log.read_text()

    def wait_until_serving(self, times: int = 1) -> None:
        wait_until(lambda: self.text().count(" serves ") >= times or self.process.poll() is not None, 60, self.text())
        assert self.process.poll() is None, self.text()

    def descendants(self) -> dict[int, str]:
        """Process id to command line."""
        found, waiting = {}, [self.process.pid]
        while waiting:
            pid = waiting.pop()
            children = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            found.update({one: Path(f"/proc/{one}/cmdline").read_text().replace("\0", " ") for one in children})
            waiting += children
        return found

    def pid_of(self, words: str) -> int:
        return next(pid for pid, command in self.descendants().items() if words in command)


@pytest.fixture
def port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def torchrun(tmp_path: Path, redis_url: str, queue_name: str, port: str) -> Iterator[Torchrun]:
    running = Torchrun(tmp_path / "torchrun.log", redis_url, queue_name, port)
    yield running
    running.stop()


@pytest.fixture
def doomed(tmp_path: Path, redis_url: str, queue_name: str, port: str) -> Iterator[Callable[..., Torchrun]]:
    """Launches one that is stopped at the end, if need be."""
    with contextlib.ExitStack() as stack:

        def launch(*options: str, **others: Any) -> Torchrun:
            running = Torchrun(tmp_path / "torchrun.log", redis_url, queue_name, port, *options, **others)
            stack.callback(running.stop)
            return running

        yield launch


def submit(client: Client) -> str:
    return client.submit("3 + 4 =", temperature=0, max_tokens=200, ignore_eos=True, stream=True)


def token_ids(client: Client, job_id: str) -> list[int]:
    return client.wait(job_id, timeout_s=120).token_ids


def wait_for_tokens(client: Client, job_ids: list[str]) -> None:
    wait_until(lambda: all(client.get(job_id).token_ids for job_id in job_ids), 120, "tokens of each job")


def begin_jobs(torchrun: Torchrun, client: Client) -> tuple[list[int], list[str]]:
    """The tokens of an undisturbed job, and the ids of four like it that have some of theirs."""
    torchrun.wait_until_serving()
    undisturbed = token_ids(client, submit(client))
    job_ids = [submit(client) for _ in range(4)]
    wait_for_tokens(client, job_ids)
    return undisturbed, job_ids


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("victim", "number"),
    list(product(("torchrun", "service", "all"), (signal.SIGTERM, signal.SIGKILL))),
)
def test_a_group_that_is_ended_in_its_start_leaves_no_directory(
    doomed: Callable[..., Torchrun], victim: str, number: signal.Signals
) -> None:
    running = doomed(max_restarts=0)

    def directories() -> list[str]:
        return re.findall(r"ipc://(\S+)/executor.sock", " ".join(running.descendants().values()))

    wait_until(directories, 60)
    directory = Path(directories()[0])
    wait_until(directory.exists)
    wait_until(lambda: any("engine_service" in command for command in running.descendants().values()))
    victims = {
        "torchrun": [running.process.pid],
        "service": [running.pid_of("engine_service")],
        "all": [
            running.process.pid,
            *(pid for pid, name in running.descendants().items() if not name.startswith("/bin/sh")),
        ],
    }
    for pid in victims[victim]:
        os.kill(pid, number)
    running.process.wait(120)
    wait_until(lambda: not directory.exists(), 60)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "victim",
    [
        "--identity 1.1",
        pytest.param("--identity 0.1", marks=pytest.mark.slow),
        pytest.param("engine_service", marks=pytest.mark.slow),
    ],
)
def test_whoever_is_killed_torchrun_restarts_the_group_and_the_jobs_go_on(
    torchrun: Torchrun, redis_url: str, queue_name: str, victim: str
) -> None:
    client = Client(redis_url, queue=queue_name)
    undisturbed, job_ids = begin_jobs(torchrun, client)
    os.kill(torchrun.pid_of(victim), signal.SIGKILL)
    assert client.stats().finished == 1, "all were over before the rank was"
    torchrun.wait_until_serving(times=2)
    assert [token_ids(client, job_id) for job_id in job_ids] == [undisturbed] * 4


@pytest.mark.slow
def test_torchrun_itself_is_killed_and_nothing_is_left_but_the_jobs(
    torchrun: Torchrun, redis_url: str, queue_name: str, tmp_path: Path
) -> None:
    client = Client(redis_url, queue=queue_name)
    undisturbed, job_ids = begin_jobs(torchrun, client)
    pids = torchrun.descendants()
    assert len(pids) == 4  # two ranks, the service, and the shell that removes its directory
    torchrun.process.kill()
    torchrun.process.wait()
    for pid in pids:
        wait_until_gone(pid)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("millrace-")] == []
    assert (client.stats().engines, client.stats().finished) == (0, 1)
    with EngineProcess(tmp_path / "heir.log", redis_url, queue_name) as heir:
        heir.wait_until_serving()
        assert [token_ids(client, job_id) for job_id in job_ids] == [undisturbed] * 4


@pytest.mark.slow
def test_torchrun_is_killed_before_its_processes_know_what_they_become(torchrun: Torchrun, tmp_path: Path) -> None:
    wait_until(lambda: len(torchrun.descendants()) >= 2, 120, "two processes")
    pids = torchrun.descendants()
    torchrun.process.kill()
    torchrun.process.wait()
    for pid in pids:
        wait_until_gone(pid)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("millrace-")] == []
    assert " serves " not in torchrun.text()


@pytest.mark.slow
def test_a_service_that_is_told_to_stop_ends_the_group_in_order(torchrun: Torchrun, tmp_path: Path) -> None:
    torchrun.wait_until_serving()
    os.kill(torchrun.pid_of("engine_service"), signal.SIGTERM)
    assert torchrun.process.wait(120) == 0, torchrun.text()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("millrace-")] == []


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_does_not_wait_for_a_rank_that_does_not_respond_when_the_service_stops(
    doomed: Callable[..., Torchrun], rank: int
) -> None:
    running = doomed(max_restarts=0)
    running.wait_until_serving()
    os.kill(running.pid_of(f"--identity {rank}.1"), signal.SIGSTOP)
    os.kill(running.pid_of("engine_service"), signal.SIGTERM)
    assert running.process.wait(120) != 0
    assert re.search(rf"rank *: {rank} .*\n *exitcode *: -9", running.text()), running.text()


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_named_before_torchrun_gives_up(
    tmp_path: Path, redis_url: str, queue_name: str, port: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    running = Torchrun(tmp_path / "torchrun.log", redis_url, queue_name, port, model=model)
    assert running.process.wait(120) != 0
    assert str(model) in next(line for line in running.text().splitlines() if line.startswith("millrace serve: "))


DOOMED = (sys.executable, "-P", "-m", "tests.e2e.doomed_worker")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("program", "options", "status", "reason"),
    [
        ((*DOOMED, "initialize_cache:memory"), (), 8, "phase kv_pool: CUDA out of memory"),
        ((*DOOMED, "start:device"), (), 7, "uncorrectable ECC error"),
        pytest.param((*DOOMED, "start:memory"), (), 8, "CUDA out of memory", marks=pytest.mark.slow),
        pytest.param((*DOOMED, "launch:device"), (), 7, "uncorrectable ECC error", marks=pytest.mark.slow),
        pytest.param((*DOOMED, "launch:memory@0"), (), 8, "CUDA out of memory", marks=pytest.mark.slow),
        pytest.param((*DOOMED, "launch:memory@1"), (), 8, "CUDA out of memory", marks=pytest.mark.slow),
        (("millrace", "serve"), ("--kv-cache-memory", "1KiB"), 2, "give the pool more memory"),
    ],
)
def test_torchrun_sees_with_what_the_service_ends(
    program: tuple[str, ...],
    options: tuple[str, ...],
    status: int,
    reason: str,
    doomed: Callable[..., Torchrun],
    tmp_path: Path,
    redis_url: str,
    queue_name: str,
) -> None:
    running = doomed(*options, program=program, max_restarts=0)
    if program[-1].startswith("launch:"):
        running.wait_until_serving()
        submit(Client(redis_url, queue=queue_name))
    assert running.process.wait(120) != 0
    log = running.text()
    (last_words,) = [line for line in log.splitlines() if line.startswith("millrace serve: ")]
    assert reason in last_words and "rank " in last_words
    assert "trying again" not in log
    root_cause = log.split("Root Cause")[1]
    assert re.search(r"exitcode *: (-?\d+)", root_cause)[1] == str(status), log  # type: ignore[index]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("millrace-")] == []


@pytest.mark.ranks
def test_a_rank_that_is_killed_in_its_start_is_a_crash_and_no_wrong_option(
    doomed: Callable[..., Torchrun], tmp_path: Path
) -> None:
    """torchrun sees that for itself, and ends the service with the group; who is quicker than that says the same."""
    killed = tmp_path / "killed"
    running = doomed(program=(*DOOMED, f"start:killed:{killed}"), max_restarts=1)
    wait_until(killed.exists, 60, "the kill in the first start")
    running.wait_until_serving()
    words = [line for line in running.text().splitlines() if line.startswith("millrace serve: ")]
    assert all("the workers do not start: rank " in line and "its process has ended" in line for line in words)
    assert "exitcode: -9" in running.text()
    os.kill(running.pid_of("engine_service"), signal.SIGTERM)
    assert running.process.wait(120) == 0, running.text()
