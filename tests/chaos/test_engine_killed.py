"""kill -9 of an engine in each window between taking a job and having its end confirmed. All five invariants hold.

The windows are hit on purpose, not by luck: a proxy holds the command that opens or closes the window, or the worker stands
still, and then the engine is killed.
"""

from __future__ import annotations

import pytest

from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import wait_until
from tests.chaos.workload import make_jobs

pytestmark = [pytest.mark.faults, TEST_LIMIT]


def test_killed_before_the_reply_to_its_claim_arrives(place: Place) -> None:
    proxy, reserve = place.proxy(), place.reserve()
    victim = place.engine(via=proxy)
    claim = proxy.catch("claim", "hold-reply")
    place.submit(make_jobs(8))
    claim.wait()
    wait_until(lambda: "running" in place.states().values())
    victim.kill()
    heir = reserve.call()
    place.wait_all()
    place.check(ALL, heir)


@pytest.mark.slow
def test_killed_in_prefill(place: Place) -> None:
    """The worker is stopped, so the first step, with the first part of the prompts, never ends."""
    reserve = place.reserve()
    victim = place.engine("--max-num-batched-tokens", "64")
    victim.freeze_worker()
    place.submit(make_jobs(8, prompt_repeats=8))
    wait_until(lambda: set(place.states().values()) == {"running"})
    assert place.num_tokens_kept() == 0
    victim.kill()
    heir = reserve.call()
    place.wait_all()
    place.check(ALL, heir)


def test_killed_in_mid_decode_of_a_job_that_is_read_live(place: Place) -> None:
    reserve = place.reserve()
    victim = place.engine()
    ids = place.submit(make_jobs(6, max_tokens=600))
    readers = [place.watch(job_id) for job_id in ids[:2]]
    wait_until(lambda: place.num_tokens_kept() > 6 * 64 and all(reader.num_tokens for reader in readers))
    victim.kill()
    assert place.num_tokens_kept() > 0, "all were over before the engine was"
    heir = reserve.call()
    place.wait_all()
    place.check(ALL, heir)


@pytest.mark.slow
def test_another_engine_goes_on_as_soon_as_the_heartbeat_of_the_killed_one_has_expired(place: Place) -> None:
    """Not before, and at most some heartbeats later. There are four heartbeats in the limit."""
    limit_s = 4.0
    reserve = place.reserve(heartbeat_s=limit_s)
    victim = place.engine(heartbeat_s=limit_s)
    ids = place.submit(make_jobs(8, max_tokens=900))
    wait_until(lambda: place.num_tokens_kept() > 8 * 64)
    heir = reserve.call()
    victim.kill()
    keys = place.client._keys
    held = [job_id for job_id, state in place.states().items() if state == "running"]
    assert held

    def has_expired() -> bool:
        num_held = place.redis.scard(f"{keys.prefix}leases:{victim.engine_id}")
        if place.redis.exists(keys.prefix + "engine:" + victim.engine_id):
            assert num_held == len(held), "taken from an engine that counts as alive"
            return False
        return True

    def run_again() -> bool:
        records = [place.record(job_id) for job_id in held]
        return all(record.get("engine") == heir.engine_id for record in records)

    wait_until(has_expired)
    wait_until(run_again, limit_s, "that the other engine has all of them")
    place.wait_all(ids)
    place.check(ALL, heir)


@pytest.mark.parametrize("fault", ["hold-request", "hold-reply"])
def test_killed_after_compute(place: Place, fault: str) -> None:
    """hold-request: before the commit arrives; it arrives when the job belongs to another engine.
    hold-reply: after the commit, before its reply."""
    proxy, reserve = place.proxy(), place.reserve()
    victim = place.engine(via=proxy)
    finish = proxy.catch("finish", fault)  # type: ignore[arg-type]
    (job_id,) = place.submit(make_jobs(1))
    finish.wait()
    if fault == "hold-reply":
        wait_until(lambda: place.states() == {job_id: "finished"})
    else:
        assert place.states() == {job_id: "running"}
    victim.kill()
    heir = reserve.call()
    if fault == "hold-request":
        wait_until(lambda: place.record(job_id)["attempt"] >= "2")
    finish.release()
    place.wait_all()
    place.check(ALL, heir)
    num_attempts = int(place.record(job_id)["attempt"])
    assert num_attempts >= 2 if fault == "hold-request" else num_attempts == 1
