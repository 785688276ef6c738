"""A worker that dies, and engines that are told to go. All five invariants hold."""

from __future__ import annotations

import signal

import pytest

from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import wait_until
from tests.chaos.workload import make_jobs

pytestmark = [pytest.mark.slow, TEST_LIMIT]


def test_a_worker_is_killed_and_its_engine_goes_on_with_the_same_jobs(place: Place) -> None:
    engine = place.engine(heartbeat_s=20.0)
    ids = place.submit(make_jobs(12, max_tokens=900))
    wait_until(lambda: place.num_tokens_kept() > 12 * 64)
    engine.kill_worker()
    place.wait_all()
    place.check(ALL, engine)
    assert engine.text().count("restarting the workers") == 1
    assert {place.record(job_id)["attempt"] for job_id in ids} == {"1"}


def test_sigterm_inside_the_grace_ends_what_runs(place: Place) -> None:
    engine = place.engine("--drain-grace", "60", heartbeat_s=20.0)
    ids = place.submit(make_jobs(8, max_tokens=300))
    wait_until(lambda: place.num_tokens_kept() > 8 * 64)
    place.check(ALL, engine)
    assert {place.record(job_id)["attempt"] for job_id in ids} == {"1"}


def test_sigterm_past_the_grace_gives_back_what_runs_with_its_tokens(place: Place) -> None:
    reserve = place.reserve(heartbeat_s=20.0)
    engine = place.engine("--drain-grace", "0", heartbeat_s=20.0)
    ids = place.submit(make_jobs(8, max_tokens=900))
    wait_until(lambda: place.num_tokens_kept() > 8 * 64)
    assert engine.terminate() == 0
    engine.check_kv_returned()
    assert "queued" in place.states().values()
    assert place.num_tokens_kept() > 0
    heir = reserve.call()
    place.wait_all()
    place.check(ALL, heir)
    assert {place.record(job_id)["attempt"] for job_id in ids} == {"1"}


def test_killed_while_it_drains(place: Place) -> None:
    reserve = place.reserve()
    engine = place.engine("--drain-grace", "60")
    place.submit(make_jobs(8, max_tokens=900))
    wait_until(lambda: place.num_tokens_kept() > 8 * 64)
    engine.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "draining" in engine.text())
    engine.kill()
    heir = reserve.call()
    place.wait_all()
    place.check(ALL, heir)
