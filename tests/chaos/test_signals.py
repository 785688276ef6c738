"""Signals that reach an engine between two heartbeats, during a step. It handles them after the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import ChaosEngine, wait_until
from tests.chaos.workload import make_jobs

pytestmark = [pytest.mark.faults, TEST_LIMIT]

HEARTBEAT_S = 600.0
"""The first heartbeat comes at the start, the second after the test: the engine learns of the change by the signal alone."""


@pytest.fixture
def hang(place: Place, tmp_path: Path) -> Callable[[], ChaosEngine]:
    """Return a function that starts an engine whose fourth step lasts until the file `goes-on` exists."""

    def start() -> ChaosEngine:
        faults = {"hangs_at_step": 4, "has_hung": str(tmp_path / "has-hung"), "hangs_until": str(tmp_path / "goes-on")}
        return place.engine(faults={**faults, "stuck_s": 60.0}, heartbeat_s=HEARTBEAT_S)

    return start


def submit_and_hang(
    place: Place, engine: ChaosEngine, folder: Path, *, max_tokens: int, deadline_s: float | None = None
) -> str:
    """Submit a job. Return when the engine waits for its fourth step. It may still handle the third when that begins."""
    (job,) = make_jobs(1, max_tokens=max_tokens)
    (job_id,) = place.submit([msgspec.structs.replace(job, deadline_s=deadline_s, stream=False)])
    wait_until((folder / "has-hung").exists)
    wait_until(lambda: all(_is_asleep(engine.process.pid) for _ in range(10)), what="sleep of the engine")
    return job_id


def _is_asleep(pid: int) -> bool:
    """Whether no thread of the process runs or waits for a core. Takes 10 ms."""
    states = [path.read_text().rsplit(")", 1)[1].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    time.sleep(0.01)
    return "R" not in states


def go_on_after_the_signal(place: Place, engine: ChaosEngine, folder: Path) -> None:
    wait_until(lambda: place.has_no_signals(engine))
    (folder / "goes-on").touch()
    place.wait_all()


@pytest.mark.parametrize(
    ("max_tokens", "end"),
    [pytest.param(4, "finished", id="the last one"), pytest.param(64, "cancelled", id="one with more to follow")],
)
def test_a_cancellation(
    place: Place, tmp_path: Path, hang: Callable[[], ChaosEngine], max_tokens: int, end: str
) -> None:
    """After the last step the job has finished."""
    engine = hang()
    job_id = submit_and_hang(place, engine, tmp_path, max_tokens=max_tokens)
    assert place.client.cancel(job_id) == "cancelling"
    go_on_after_the_signal(place, engine, tmp_path)
    assert place.states() == {job_id: end}
    place.check(ALL, engine, states={job_id: end})


def test_a_deadline(place: Place, tmp_path: Path, hang: Callable[[], ChaosEngine]) -> None:
    engine = hang()
    job_id = submit_and_hang(place, engine, tmp_path, max_tokens=64, deadline_s=3.0)
    wait_until(lambda: place.record(job_id).get("expire") == "1")
    go_on_after_the_signal(place, engine, tmp_path)
    assert place.states() == {job_id: "expired"}
    place.check(ALL, engine, states={job_id: "expired"})


def test_a_reader(place: Place, tmp_path: Path, hang: Callable[[], ChaosEngine]) -> None:
    """Events are published from then on. A job without a reader gets all of them at its end."""
    engine = hang()
    job_id = submit_and_hang(place, engine, tmp_path, max_tokens=600)
    place.watch(job_id)
    wait_until(lambda: place.redis.exists(place.client._keys.prefix + "watched:" + job_id) == 1)
    go_on_after_the_signal(place, engine, tmp_path)
    assert place.redis.xlen(place.client._keys.result(job_id)) > 4
    place.check(ALL, engine)
