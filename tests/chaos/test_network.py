"""Lost replies, reset connections, and networks that drop every packet. All five invariants hold."""

from __future__ import annotations

import pytest

from millrace import Client
from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import wait_until
from tests.chaos.proxy import Direction
from tests.chaos.workload import make_jobs

pytestmark = [pytest.mark.faults, TEST_LIMIT]


def test_a_claim_and_a_commit_whose_replies_are_lost_are_sent_again(place: Place) -> None:
    proxy = place.proxy()
    claim, finish = proxy.catch("claim", "cut-before-reply"), proxy.catch("finish", "cut-before-reply")
    ids = place.submit(make_jobs(4))  # before anybody serves: the first claim takes them all
    engine = place.launch(via=proxy, heartbeat_s=20.0)
    claim.wait()
    wait_until(lambda: all("lease" in place.record(job_id) for job_id in ids))
    leases = {job_id: place.record(job_id)["lease"] for job_id in ids}
    finish.wait()
    place.wait_all()
    assert {job_id: place.record(job_id)["lease"] for job_id in ids} == leases, "claimed a second time"
    assert {place.record(job_id)["attempt"] for job_id in ids} == {"1"}
    place.check(ALL, engine)
    assert engine.num_refused() == 0


def test_the_reply_to_a_submit_is_lost_and_the_job_is_there_once(place: Place) -> None:
    """No engine runs: the test counts the jobs in the queue."""
    proxy = place.proxy()
    with Client(proxy.url, queue=place.queue) as client:
        submit = proxy.catch("submit", "cut-before-reply")
        ids = client.submit_many(make_jobs(16))
        assert submit.is_caught
        assert client.stats().queued == len(ids) == 16


BOTH: tuple[Direction, ...] = ("to_server", "to_client")


@pytest.mark.parametrize(
    "directions",
    [
        pytest.param(BOTH, id="both ways", marks=pytest.mark.slow),
        pytest.param(("to_server",), id="engine to server", marks=pytest.mark.slow),
        pytest.param(("to_client",), id="server to engine", marks=pytest.mark.slow),
    ],
)
def test_cut_off_for_longer_than_the_lease_and_back(place: Place, directions: tuple[Direction, ...]) -> None:
    """What it sent meanwhile arrives once the network works again, and is refused. Then the engine serves again. One of two
    readers is cut off with it."""
    proxy, reserve = place.proxy(), place.reserve()
    lonely = place.engine(via=proxy)
    place.submit(make_jobs(12, max_tokens=900))
    readers = [place.watch("job-0"), place.watch("job-1", via=proxy)]
    wait_until(lambda: place.num_tokens_kept() > 12 * 64 and all(reader.num_tokens for reader in readers))
    proxy.blackhole(*directions)
    heir = reserve.call()
    place.wait_all()
    proxy.heal()
    wait_until(lambda: place.client.stats().engines == 2)
    assert heir.terminate() == 0
    place.submit(make_jobs(4, first=100))
    place.wait_all()
    place.check(ALL, lonely)
    heir.check_kv_returned()
    assert lonely.num_refused() + lonely.num_dropped() > 0


@pytest.mark.slow
def test_cut_off_for_longer_than_a_socket_waits(place: Place) -> None:
    """Every command times out and is sent again, several times."""
    proxy = place.proxy()
    lonely = place.engine(via=proxy)
    place.submit(make_jobs(12, max_tokens=900))
    wait_until(lambda: place.num_tokens_kept() > 12 * 64)
    proxy.blackhole(*BOTH)
    wait_until(lambda: "outage, seen by" in lonely.text(), 60.0)
    proxy.heal()
    place.wait_all()
    place.check(ALL, lonely)


@pytest.mark.slow
def test_connections_that_are_reset_again_and_again(place: Place) -> None:
    proxy = place.proxy()
    engine = place.engine(via=proxy)
    ids = place.submit(make_jobs(24, max_tokens=600))
    reader = place.watch("job-1", via=proxy)
    for _ in range(20):
        before = place.num_tokens_kept()
        wait_until(lambda before=before: place.num_tokens_kept() != before or place.client.stats().running == 0)  # type: ignore[misc]
        proxy.cut()
    proxy.refuse()
    place.outlast_the_lease()
    proxy.refuse(False)
    place.wait_all(ids)
    place.check(ALL, engine)
    assert reader.num_resumed > 0
