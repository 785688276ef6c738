"""Faults at the start and the end of an engine. What they do to jobs is in `tests/chaos`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from millrace import Client
from millrace.embedded import EmbeddedServer
from millrace.results.messages import TERMINAL_STATES
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import LIMIT_S, EngineProcess, wait_until


def test_a_worker_killed_while_it_starts_is_started_again(launch: StartEngine, client: Client) -> None:
    engine = launch()
    wait_until(lambda: bool(engine.worker_pids()))
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    engine.wait_until_serving()
    assert "trying again" in engine.text()
    assert client.wait(client.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0), LIMIT_S).text == " 7"


def test_sigterm_during_the_start_leaves_nothing_behind(
    launch: StartEngine, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_path))
    engine = launch()
    wait_until(lambda: bool(engine.worker_pids()))
    pids = engine.worker_pids()
    assert engine.terminate() == 0
    # What the signal interrupted in the middle of a spawn, the kernel and the directory's reaper end a moment later.
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    wait_until(lambda: not list(short_path.glob("millrace-*")))


@pytest.mark.slow
def test_sigterm_while_redis_is_away_ends_in_time_and_says_so(tmp_path: Path) -> None:
    with EmbeddedServer() as server, EngineProcess(tmp_path / "engine.log", server.url, "away") as engine:
        engine.wait_until_serving()
        with Client(server.url, queue="away") as client:
            next(
                iter(client.stream(client.submit(prompt="A story:", max_tokens=100_000, ignore_eos=True, stream=True)))
            )
        server.kill()
        assert engine.terminate(limit_s=45) == 4
        assert "another engine will recover their jobs" in engine.text()


@pytest.mark.faults
def test_a_job_on_which_the_loop_of_every_engine_fails_ends_as_crashed_and_takes_no_other_with_it(
    client: Client, redis_url: str, queue_name: str, tmp_path: Path
) -> None:
    good = client.submit(prompt="A story:", max_tokens=200, ignore_eos=True)
    poison = client.submit(prompt="A story:", max_tokens=200, ignore_eos=True, stream=True, job_id="poison")
    num_failed = 0
    while client.get(poison).state not in TERMINAL_STATES:
        log, place = tmp_path / f"engine-{num_failed}.log", (redis_url, queue_name)
        with EngineProcess(log, *place, module="tests.e2e.failing_service", heartbeat_s=1.0) as engine:
            wait_until(lambda: engine.has_ended or client.get(poison).state in TERMINAL_STATES)
            num_failed += engine.has_ended
            assert engine.has_ended is ("IndexError: list index out of range" in engine.text())
            if not engine.has_ended:
                assert client.wait(good, LIMIT_S).state == "finished"
    error = client.get(poison).error
    assert (error and error.kind, num_failed) == ("crashed", 5)
