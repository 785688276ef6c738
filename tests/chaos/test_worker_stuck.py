"""A worker that hangs in the middle of a step: it is detected, killed and replaced, and its engine continues with the same
jobs. All five invariants hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import ChaosEngine, wait_until
from tests.chaos.workload import make_jobs

pytestmark = [pytest.mark.faults, TEST_LIMIT]

SHORT_S = 4.0
"""A limit for steps that usually take milliseconds: long enough for a busy machine."""


def check_replaced_once(place: Place, engine: ChaosEngine) -> None:
    """Check that one worker was replaced, and that the jobs never left their engine."""
    place.wait_all()
    place.check(ALL, engine)
    text = engine.text()
    assert text.count("the ranks are ended after their stacks are logged") == 1
    assert text.count("restarting the workers") == 1
    assert {place.record(job_id)["attempt"] for job_id in place.accepted} == {"1"}


def test_a_step_that_hangs_while_heartbeats_go_on(place: Place, tmp_path: Path) -> None:
    faults = {"hangs_at_step": 30, "has_hung": str(tmp_path / "has-hung"), "stuck_s": SHORT_S}
    engine = place.engine(heartbeat_s=20.0, faults=faults)
    place.submit(make_jobs(8, max_tokens=80))
    check_replaced_once(place, engine)
    assert "stuck: a step has lasted" in engine.text()
    assert "hang_as_in_a_collective" in engine.text(), "where it hung is in the log"


@pytest.mark.slow
@pytest.mark.parametrize("heartbeat_s", [20.0, 0.5])
def test_a_worker_that_is_stopped_in_mid_decode(place: Place, heartbeat_s: float) -> None:
    """With the default limits. The lease is the engine's, which lives, so its length does not matter."""
    engine = place.engine(heartbeat_s=heartbeat_s)
    place.submit(make_jobs(8, max_tokens=900))
    wait_until(lambda: place.num_tokens_kept() > 8 * 64)
    engine.freeze_worker()
    check_replaced_once(place, engine)


@pytest.mark.slow
def test_a_stuck_worker_of_an_engine_that_drains(place: Place) -> None:
    """SIGTERM while the step hangs: the engine drains once the step was aborted. Another engine runs its jobs."""
    reserve = place.reserve()
    engine = place.engine("--drain-grace", "1")
    place.submit(make_jobs(8, max_tokens=900))
    wait_until(lambda: place.num_tokens_kept() > 8 * 64)
    engine.freeze_worker()
    assert engine.terminate() == 0, engine.text()
    engine.check_kv_returned()
    heir = reserve.call()
    place.wait_all()
    place.check(ALL, heir)
