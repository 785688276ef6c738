"""A service with a model on several ranks: a rank dies or hangs, the engine sleeps or drains, and every job ends once, with
the text of a single rank without faults."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from millrace.embedded import EmbeddedServer
from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import ChaosEngine, wait_until
from tests.chaos.workload import Undisturbed, make_jobs
from tests.e2e.test_sleep import wait_for_level

pytestmark = [TEST_LIMIT, pytest.mark.ranks]

TP2 = ("--tensor-parallel-size", "2")
PP2 = ("--pipeline-parallel-size", "2")

NUM_JOBS = 6


@pytest.fixture(scope="module")
def single_rank() -> Iterator[Undisturbed]:
    run = Undisturbed()
    yield run
    run.close()


@pytest.fixture
def place(server: EmbeddedServer, queue_name: str, tmp_path: Path, single_rank: Undisturbed) -> Iterator[Place]:
    with Place(server, queue_name, tmp_path, single_rank) as place:
        yield place


def serve(place: Place, *sizes: str) -> ChaosEngine:
    """Start an engine with these sizes and a lease that does not expire in the test."""
    return place.engine(*sizes, heartbeat_s=20.0)


def submit_and_wait_for_tokens(place: Place, max_tokens: int = 300) -> None:
    """Submit jobs, and wait for 20 tokens per job on average."""
    place.submit(make_jobs(NUM_JOBS, max_tokens=max_tokens))
    wait_until(lambda: place.num_tokens_kept() > NUM_JOBS * 20)


def check_whole_in_one_attempt(place: Place, *drain: ChaosEngine) -> None:
    place.wait_all()
    place.check(ALL, *drain)
    assert {place.record(job_id)["attempt"] for job_id in place.accepted} == {"1"}


KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "rank", "number"),
    [
        *((sizes, rank, number) for sizes in (TP2, PP2) for rank in range(2) for number in (KILL, STOP)),
        *((TP2 + PP2, rank, KILL) for rank in range(4)),
        (TP2 + PP2, 1, STOP),
    ],
)
def test_whichever_rank_is_lost_while_tokens_flow(
    place: Place, sizes: tuple[str, ...], rank: int, number: signal.Signals
) -> None:
    engine = serve(place, *sizes)
    lose_a_rank(place, engine, rank, engine.worker_pids()[rank], number)


def test_one_of_two_ranks_is_killed_while_tokens_flow(place: Place) -> None:
    engine = serve(place, *TP2)
    lose_a_rank(place, engine, 1, engine.worker_pids()[1], KILL)


@pytest.mark.ray
@pytest.mark.skipif(find_spec("ray") is None, reason="needs millrace[ray]")
def test_a_rank_on_a_ray_of_the_services_own_is_killed_while_tokens_flow(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nothing := tmp_path / "nothing").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(nothing))  # no cluster is known there
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    engine = serve(place, *TP2, "--executor", "ray")
    assert "started a local Ray" in engine.text()
    pids = re.findall(
        r"rank 0 is process (\d+) on", engine.text()
    )  # of several starts, if the first ones took too long
    children = engine.worker_pids()  # of Ray, which starts the ranks
    lose_a_rank(place, engine, 0, int(pids[-1]), KILL)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def lose_a_rank(place: Place, engine: ChaosEngine, rank: int, pid: int, number: signal.Signals) -> None:
    submit_and_wait_for_tokens(place)
    assert "running" in place.states().values(), "all jobs ended before the rank was lost"
    assert Path(f"/proc/{pid}").exists(), engine.text()
    os.kill(pid, number)
    check_whole_in_one_attempt(place, engine)
    assert engine.text().count("restarting the workers") == 1
    assert f"rank {rank} " in engine.text()


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_with_two_stages_sleeps_with_steps_in_flight_and_wakes(place: Place, level: int) -> None:
    engine = serve(place, *PP2)
    submit_and_wait_for_tokens(place)
    pids = engine.worker_pids()
    place.client.sleep(level)
    wait_for_level(place.client, level)
    assert "queued" in place.states().values()
    place.client.wake()
    check_whole_in_one_attempt(place)
    assert engine.worker_pids() == pids
    place.check(ALL, engine)


@pytest.mark.slow
def test_sigterm_inside_the_grace_ends_what_two_stages_run(place: Place) -> None:
    engine = place.engine(*PP2, "--drain-grace", "60", heartbeat_s=20.0)
    submit_and_wait_for_tokens(place)
    pids = engine.worker_pids()
    place.check(ALL, engine)
    assert {place.record(job_id)["attempt"] for job_id in place.accepted} == {"1"}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_sigterm_past_the_grace_gives_back_what_two_stages_run(place: Place) -> None:
    """One rank continues after the tokens of two stages."""
    reserve = place.reserve(heartbeat_s=20.0)
    engine = place.engine(*PP2, "--drain-grace", "0", heartbeat_s=20.0)
    submit_and_wait_for_tokens(place, max_tokens=900)
    assert engine.terminate() == 0, engine.text()
    engine.check_kv_returned()
    assert "queued" in place.states().values()
    check_whole_in_one_attempt(place, reserve.call())
