"""The commands of docker-compose.yml as plain processes: a server with its settings, two replicas of the CPU engine, their
health checks and their stop signal."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace import Client, GenerationRequest, SamplingParams
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from tests.deploy.test_compose import SERVICES, command_of
from tests.millrace.cli.command import environment, python
from tests.processes import LIMIT_S, ROOT

NUM_JOBS = 40


@pytest.fixture
def compose_server() -> Iterator[EmbeddedServer]:
    """A server with the options of the service `redis`."""
    program, *words = command_of("redis")
    assert program == "valkey-server"
    options = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    with EmbeddedServer(options=options) as server:
        yield server


@pytest.fixture
def ports() -> list[int]:
    """Return a port for each replica, in place of 9400: a container has a network of its own, a process has not."""
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in (first, second)]


@pytest.fixture
def replicas(
    compose_server: EmbeddedServer, ports: list[int], tmp_path: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes with the command of the service `engine-cpu`, and the model of the checkout."""
    command = [word.replace("/models/", f"{ROOT}/examples/") for word in command_of("engine-cpu")]
    processes = []
    for port in ports:
        with (tmp_path / f"engine-{port}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "millrace", *(word.replace("9400", str(port)) for word in command)],
                env=environment(MILLRACE_REDIS_URL=compose_server.url),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        processes.append(process)
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def are_healthy(ports: list[int]) -> list[bool]:
    check = SERVICES["engine-cpu"]["healthcheck"]["test"][2:]
    commands = [[word.replace("9400", str(port)) for word in check] for port in ports]
    # A proxy that does not answer: Docker may hand the address of one to its containers.
    return [python(*command, http_proxy="http://127.0.0.1:9", no_proxy="").status == 0 for command in commands]


def wait_for_engines(client: Client, number: int, replicas: list[subprocess.Popen[bytes]]) -> None:
    limit = time.monotonic() + LIMIT_S
    while client.stats().engines < number:
        assert all(process.poll() is None for process in replicas)
        assert time.monotonic() < limit
        time.sleep(0.1)


def test_the_server_keeps_what_it_accepted(compose_server: EmbeddedServer) -> None:
    with connect(compose_server.url) as connection:
        settings = {
            name: connection.config_get(name)[name] for name in ("appendonly", "appendfsync", "maxmemory-policy")
        }
    assert settings == {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction"}


def test_two_replicas_share_the_queue_and_end_with_the_stop_signal(
    compose_server: EmbeddedServer, ports: list[int], replicas: list[subprocess.Popen[bytes]]
) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=0)
    requests = [GenerationRequest(id=f"j{n}", prompt=f"{n} + 1 =", sampling=sampling) for n in range(NUM_JOBS)]
    assert are_healthy(ports) == [False, False], "they are still starting"
    with Client(compose_server.url) as client:
        wait_for_engines(client, 2, replicas)
        assert are_healthy(ports) == [True, True]
        jobs = list(client.as_completed(client.submit_many(requests), timeout_s=LIMIT_S))
        assert {job.id for job in jobs} == {request.id for request in requests}
        assert {job.state for job in jobs} == {"finished"}
        assert client.stats().finished == NUM_JOBS
    for process in replicas:
        process.send_signal(signal.Signals[_stop_signal()])
    assert [process.wait(LIMIT_S) for process in replicas] == [0, 0]
    assert are_healthy(ports) == [False, False]


def _stop_signal() -> str:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("STOPSIGNAL "))
