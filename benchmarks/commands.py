"""Counts the commands that an engine sends to Redis for an unwatched job of NUM_TOKENS tokens, with MONITOR.

A real service with the tiny model connects to the server by TCP, and the client by the unix socket, so that their
commands can be told apart. Commands of an idle time of the same length, such as heartbeats, are subtracted. Commands
inside scripts do not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from benchmarks.models import path_of
from benchmarks.service import Service
from benchmarks.workloads import TINY_MODEL
from millrace import Client, GenerationRequest, SamplingParams
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect

NUM_JOBS = 100
NUM_TOKENS = 64
JOB = GenerationRequest(
    prompt="3 + 4 =", sampling=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
)
END_MARK = "end of the counted commands"


def measure() -> dict[str, float]:
    """Return commands per job: for jobs that are submitted one after the other, and for jobs that are submitted at
    once."""
    with EmbeddedServer(tcp=True) as server:
        with connect(server.url) as admin:
            url = "unix://" + str(admin.config_get("unixsocket")["unixsocket"])
        service = Service(server.url, path_of(TINY_MODEL), "commands")
        try:
            service.seconds_to_first_token()
            with Client(url, queue="commands") as client:
                return {
                    "commands_per_unwatched_job": _per_job(url, lambda: _run(client, batch_size=1)),
                    "commands_per_unwatched_job_of_many": _per_job(url, lambda: _run(client, batch_size=NUM_JOBS)),
                }
        finally:
            service.stop()


def _run(client: Client, batch_size: int) -> None:
    for _ in range(0, NUM_JOBS, batch_size):
        ids = client.submit_many([JOB] * batch_size)
        assert {job.state for job in client.as_completed(ids)} == {"finished"}


def _per_job(url: str, work: Callable[[], None]) -> float:
    begin_s = time.perf_counter()
    num_busy = _count(url, work)
    seconds = time.perf_counter() - begin_s
    return (num_busy - _count(url, lambda: time.sleep(seconds))) / NUM_JOBS


def _count(url: str, work: Callable[[], None]) -> int:
    """Count the commands that the server gets by TCP during the work. `url` is that of its unix socket."""

    def work_and_mark_the_end() -> None:
        try:
            work()
        finally:
            client.echo(END_MARK)

    with connect(url) as client, connect(url).monitor() as monitor:  # type: ignore[no-untyped-call]
        working = threading.Thread(target=work_and_mark_the_end)
        working.start()
        num_sent = 0
        while END_MARK not in (command := monitor.next_command())["command"]:
            num_sent += command["client_type"] == "tcp"
        working.join()
    return num_sent
