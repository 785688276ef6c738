"""`millrace serve` under torchrun: its processes become ranks, and the service lives and ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.errors import StartError, WorkerDied
from executor.external import ExternalLauncherExecutor, become_rank
from producer.client import Client
from tests.e2e.engines import ROOT, TINY, wait_until
from tests.executor.kinds import Make, start, stub_config, wait_until_gone, worker_pids

external = pytest.mark.parametrize("make", ["external"], indirect=True)


def test_without_torchrun_it_says_what_to_type() -> None:
    with pytest.raises(StartError, match="torchrun --nproc-per-node"):
        ExternalLauncherExecutor(stub_config()).start()


@external
def test_a_lost_rank_can_only_be_started_again_by_who_started_it(make: Make) -> None:
    executor = start(make())
    os.kill(worker_pids(executor)[1], signal.SIGKILL)
    wait_until_gone(worker_pids(executor)[1])
    with pytest.raises(WorkerDied, match="rank 1"):
        executor.check_health()
    assert not executor.can_restart
    with pytest.raises(StartError, match="only torchrun"):
        executor.restart()


def test_ranks_on_several_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="take ray"):
        become_rank([])


class Torchrun:
    """One `torchrun` of two ranks, its log in a file."""

    def __init__(self, log: Path, redis_url: str, queue: str, *options: str) -> None:
        self.log = log
        command = [
            sys.executable,
            "-P",
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            *options,
            "--no-python",
        ]
        command += [sys.executable, "-P", "-m", "engine_service", "--executor", "external", "--model", str(TINY)]
        command += ["--redis", redis_url, "--queue", queue, "--device", "cpu", "--heartbeat", "0.5"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(log.parent)}
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd="/")

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
    address = ("--master-addr", "127.0.0.1", "--master-port", port)
    running = Torchrun(tmp_path / "torchrun.log", redis_url, queue_name, "--max-restarts", "2", *address)
    yield running
    if running.process.poll() is None:
        running.process.terminate()
    running.process.wait(60)


def submit(client: Client) -> str:
    return client.submit("3 + 4 =", temperature=0, max_tokens=100, ignore_eos=True)


def token_ids(client: Client, job_id: str) -> list[int]:
    return client.wait(job_id, timeout_s=60).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["--identity 0.1", "--identity 1.1", "engine_service"])
def test_whoever_is_killed_torchrun_restarts_the_group_and_the_jobs_go_on(
    torchrun: Torchrun, redis_url: str, queue_name: str, victim: str
) -> None:
    client = Client(redis_url, queue=queue_name)
    torchrun.wait_until_serving()
    undisturbed = token_ids(client, submit(client))
    job_ids = [submit(client) for _ in range(8)]
    time.sleep(0.05)
    os.kill(torchrun.pid_of(victim), signal.SIGKILL)
    torchrun.wait_until_serving(times=2)
    assert [token_ids(client, job_id) for job_id in job_ids] == [undisturbed] * 8


@pytest.mark.slow
def test_a_service_that_is_told_to_stop_ends_the_group_in_order(torchrun: Torchrun, tmp_path: Path) -> None:
    torchrun.wait_until_serving()
    os.kill(torchrun.pid_of("engine_service"), signal.SIGTERM)
    assert torchrun.process.wait(60) == 0, torchrun.text()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("millrace-")] == []
