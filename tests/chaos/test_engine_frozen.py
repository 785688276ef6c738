"""A zombie: an engine that is frozen for longer than its lease and continues. Its late writes are refused."""

from __future__ import annotations

import pytest

from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import wait_until
from tests.chaos.workload import make_jobs

pytestmark = [pytest.mark.faults, TEST_LIMIT]


def test_frozen_past_the_lease_its_late_commit_is_refused(place: Place) -> None:
    """It has computed the whole job and is about to commit it. When it continues, another engine has committed the job."""
    proxy, reserve = place.proxy(), place.reserve()
    zombie = place.engine(via=proxy)
    finish = proxy.catch("finish", "hold-request")
    (job_id,) = place.submit(make_jobs(1))
    finish.wait()
    zombie.freeze()
    heir = reserve.call()
    place.wait_all()
    finish.release()
    zombie.thaw()
    place.check(ALL, heir, zombie)
    assert int(place.record(job_id)["attempt"]) >= 2
    assert zombie.num_refused() >= 1


@pytest.mark.slow
def test_frozen_in_mid_decode_it_drops_what_it_held_and_serves_again(place: Place) -> None:
    reserve = place.reserve()
    zombie = place.engine()
    place.submit(make_jobs(12, max_tokens=900))
    wait_until(lambda: place.num_tokens_kept() > 12 * 64)
    zombie.freeze()
    heir = reserve.call()
    place.wait_all()
    zombie.thaw()
    wait_until(lambda: zombie.num_dropped() > 0)
    assert heir.terminate() == 0
    place.submit(make_jobs(4, first=100))
    place.wait_all()
    place.check(ALL, zombie)
    heir.check_kv_returned()


@pytest.mark.slow
def test_frozen_within_the_lease_nothing_is_taken_from_it(place: Place) -> None:
    """The freeze has to be shorter than the lease; a generation may take longer."""
    engine = place.engine(heartbeat_s=20.0)
    place.engine(heartbeat_s=20.0, via=place.proxy())
    ids = place.submit(make_jobs(4, max_tokens=600))
    wait_until(lambda: place.num_tokens_kept() > 4 * 64)
    engine.freeze()
    place.outlast_the_lease()
    engine.thaw()
    place.wait_all()
    assert {place.record(job_id)["attempt"] for job_id in ids} == {"1"}
    place.check(ALL, engine)
