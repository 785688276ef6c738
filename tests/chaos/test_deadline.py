"""A deadline that passes in each state. The job expires once, with a prefix of its undisturbed output."""

from __future__ import annotations

import msgspec
import pytest

from millrace import GenerationRequest
from millrace.results.queue import JobQueue
from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import wait_until
from tests.chaos.workload import make_jobs
from tests.results.engines import Engine

pytestmark = [pytest.mark.slow, TEST_LIMIT]

DEADLINE_S = 4.0
"""Long enough to bring a job into the state in which its deadline shall pass."""


def jobs_with_deadline(num_jobs: int, seconds: float = DEADLINE_S, first: int = 0) -> list[GenerationRequest]:
    return [
        msgspec.structs.replace(job, deadline_s=seconds) for job in make_jobs(num_jobs, max_tokens=900, first=first)
    ]


def test_it_passes_while_the_job_is_queued_delayed_or_at_a_dead_engine(place: Place) -> None:
    """The queued and the delayed job expire with a heartbeat, the dead engine's when another engine recovers it."""
    heir, dead = place.reserve(), place.engine()
    (orphaned,) = place.submit(jobs_with_deadline(1))
    wait_until(lambda: place.num_tokens_kept() > 0)
    dead.kill()
    living = Engine(JobQueue(place.redis, place.queue))
    (delayed,) = place.submit(jobs_with_deadline(1, first=1))
    living.release(living.claim_one(), delay_ms=3_600_000)
    (queued,) = place.submit(jobs_with_deadline(1, first=2))
    assert place.states() == {orphaned: "running", delayed: "delayed", queued: "queued"}

    def is_over() -> bool:
        living.beat()
        return place.states() == {orphaned: "running", delayed: "expired", queued: "expired"}

    wait_until(is_over)
    engine = heir.call()
    place.wait_all()
    expired = dict.fromkeys(place.accepted, "expired")
    assert place.states() == expired
    assert place.client.stats().queued == 0
    place.check(ALL, engine, states=expired)


def test_it_passes_while_the_job_runs(place: Place) -> None:
    """The worker is stopped until the deadline has passed, so the job cannot end before. The other job has no deadline."""
    engine = place.engine()
    (hurried,) = place.submit(jobs_with_deadline(1))
    (other,) = place.submit(jobs_with_deadline(1, 3600.0, first=1))
    wait_until(lambda: set(place.states().values()) == {"running"} and place.num_tokens_kept() > 0)
    engine.freeze_worker()
    wait_until(lambda: place.record(hurried).get("expire") == "1")
    engine.thaw_worker()
    place.wait_all()
    assert place.states() == {hurried: "expired", other: "finished"}
    place.check(ALL, engine, states={hurried: "expired"})


def test_it_passes_after_the_end(place: Place) -> None:
    """It changes nothing."""
    engine = place.engine()
    requests = [msgspec.structs.replace(job, deadline_s=DEADLINE_S * 5) for job in make_jobs(4, max_tokens=8)]
    place.submit(requests)
    place.wait_all()
    assert place.redis.zcard(place.client._keys.prefix + "deadlines") == 0
    place.check(ALL, engine)
