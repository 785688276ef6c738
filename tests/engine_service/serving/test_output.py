"""What becomes of jobs that an engine hands back unstarted."""

from __future__ import annotations

import time

import pytest

from millrace.engine_service.serving.output import Output
from millrace.results.messages import ClaimedJob, JobId, Lease, Release, Write

HOUR_S = 3600


@pytest.mark.parametrize(
    ("age_s", "at_least_ms", "at_most_ms"),
    [(0, 1000, 1000), (20, 5000, 10_000), (HOUR_S, 15_000, 15_000), (-HOUR_S, 1000, 1000), (10**9, 15_000, 15_000)],
)
def test_a_job_for_a_newer_engine_stays_away_for_longer_the_older_it_is(
    age_s: int, at_least_ms: int, at_most_ms: int
) -> None:
    """Whatever the clocks of the server and of this host say."""
    claimed = ClaimedJob(
        job_id=JobId("newer"),
        lease=Lease(1),
        attempt=1,
        body=b"{}",
        seed=1,
        cost=1,
        crash_count=0,
        token_ids=[],
        num_published=0,
        is_watched=False,
        created_ms=int((time.time() - age_s) * 1000),
        protocol=2,
    )
    written: list[Write] = []
    Output(written.append, "model-a").defer(claimed)
    (release,) = written
    assert isinstance(release, Release)
    assert at_least_ms <= release.delay_ms <= at_most_ms
