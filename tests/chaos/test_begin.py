"""Faults at the `begin` call, which an engine makes before it runs a job alone because other engines died with it."""

from __future__ import annotations

import signal

import pytest

from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import LIMIT_S, wait_until
from tests.chaos.workload import make_jobs

pytestmark = [pytest.mark.slow, TEST_LIMIT]


def submit_one_that_runs_alone(place: Place) -> str:
    """Submit a job with which two engines have died before."""
    place.client.pause()
    (job_id,) = place.submit(make_jobs(1, max_tokens=60))
    place.redis.hset(place.client._keys.job(job_id), mapping={"crashes": 2, "attempt": 2})
    place.client.resume()
    return job_id


def test_engines_killed_before_they_begin_are_not_held_against_the_job(place: Place) -> None:
    job_id = submit_one_that_runs_alone(place)
    for num_killed in range(1, 6):
        proxy = place.proxy()
        begin = proxy.catch("begin", "hold-request")
        victim = place.launch(via=proxy)
        begin.wait()
        victim.kill()
        assert place.record(job_id)["attempt"] == str(2 + num_killed)
    heir = place.engine()
    place.wait_all()
    place.check(ALL, heir)
    record = place.record(job_id)
    assert (record["crashes"], record["false_starts"], record["attempt"]) == ("2", "5", "8")


def test_redis_goes_away_as_an_engine_is_about_to_begin(place: Place) -> None:
    """When Redis is back, the job belongs to another engine. This one is refused and takes the next job."""
    proxy, reserve = place.proxy(), place.reserve()
    job_id = submit_one_that_runs_alone(place)
    begin = proxy.catch("begin", "hold-request")
    victim = place.engine(via=proxy)
    begin.wait()
    proxy.blackhole("to_server", "to_client")
    heir = reserve.call()
    place.wait_all()
    assert place.record(job_id)["attempt"] == "4"
    assert heir.terminate() == 0
    proxy.heal()
    wait_until(lambda: victim.num_dropped() == 1)
    place.submit(make_jobs(4, first=10))
    place.wait_all()
    place.check(ALL, victim)


def test_an_engine_that_waits_to_begin_can_be_stopped(place: Place) -> None:
    proxy = place.proxy()
    job_id = submit_one_that_runs_alone(place)
    begin = proxy.catch("begin", "hold-reply")
    engine = place.engine(via=proxy)
    begin.wait()
    engine.process.send_signal(signal.SIGTERM)
    engine.wait_for_log("draining")
    begin.release()
    assert engine.process.wait(LIMIT_S) == 0
    assert place.states() == {job_id: "queued"}
    assert place.record(job_id)["attempt"] == "2"
    heir = place.engine()
    place.wait_all()
    place.check(ALL, heir)
