"""Many engines and many jobs on one queue: each job is claimed once, and every tenant gets its share.

Some engines here compute nothing: they claim and finish, in threads of this process, over connections of their own. They
can do in seconds what the queue has to stand; the others are real services.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from millrace.results.connection import connect
from millrace.results.messages import EngineId
from millrace.results.queue import JobQueue
from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import wait_until
from tests.chaos.workload import make_jobs
from tests.results.engines import Engine, finish_of, submission
from tests.results.invariants import check_all_ended

pytestmark = [pytest.mark.faults, TEST_LIMIT]

SUBMIT_BATCH = 1000


def submit_passive(queue: JobQueue, num_jobs: int, tenant: str = "default") -> list[str]:
    ids = [f"{tenant}-{number}" for number in range(num_jobs)]
    for first in range(0, num_jobs, SUBMIT_BATCH):
        queue.submit([submission(job_id, tenant=tenant) for job_id in ids[first : first + SUBMIT_BATCH]])
    return ids


@pytest.mark.parametrize("num_engines", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_10000_jobs_are_claimed_once_by_engines_that_all_want_them(
    place: Place, redis_url: str, num_engines: int
) -> None:
    queue = JobQueue(place.redis, place.queue)
    ids = submit_passive(queue, 10_000)
    claimed: list[list[str]] = [[] for _ in range(num_engines)]
    barrier = threading.Barrier(num_engines)

    def work(mine: list[str]) -> None:
        own = JobQueue(connect(redis_url), place.queue)
        engine = Engine(own)
        barrier.wait()
        while jobs := engine.claim(64):
            mine += [job.job_id for job in jobs]
            assert set(own.write([finish_of(job) for job in jobs])) == {"ok"}
            engine.held.clear()
        own.close()

    threads = [threading.Thread(target=work, args=(mine,)) for mine in claimed]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(job_id for mine in claimed for job_id in mine) == Counter(ids)
    assert min(len(mine) for mine in claimed) > 0
    check_all_ended(place.redis, place.queue, ids)


def test_two_engines_drain_one_queue(place: Place) -> None:
    engines = place.engines(2, "--max-num-seqs", "8", heartbeat_s=20.0)
    ids = place.submit(make_jobs(200, max_tokens=24))
    place.wait_all()
    assert {place.record(job_id)["attempt"] for job_id in ids} == {"1"}
    place.check(ALL, *engines)


@pytest.mark.slow
@pytest.mark.parametrize("num_engines", [2, 3, 5])
def test_engines_generate_10000_jobs_and_each_of_them_once(place: Place, num_engines: int) -> None:
    """All of them start with the whole queue."""
    ids = place.submit(make_jobs(10_000, max_tokens=1))
    engines = [place.launch(heartbeat_s=20.0) for _ in range(num_engines)]
    for _ in place.client.as_completed(ids, 200.0):
        pass
    records = [place.record(job_id) for job_id in ids]
    assert {record["attempt"] for record in records} == {"1"}
    assert {record["engine"] for record in records} == {engine.engine_id for engine in engines}
    place.check(ALL, *engines)


# --- fairness ------------------------------------------------------------------------------------------------------


@pytest.fixture
def long_queue(place: Place) -> Iterator[JobQueue]:
    """100,000 jobs of one tenant, some of them served; then 10 of another."""
    queue = JobQueue(place.redis, place.queue)
    submit_passive(queue, 100_000, "large")
    for job in Engine(queue, "warm-up").claim(64):
        queue.write([finish_of(job)])
    submit_passive(queue, 10, "small")
    yield queue
    place.redis.unlink(
        *place.redis.scan_iter(queue.keys.prefix.replace("{", "\\{").replace("}", "\\}") + "*", count=10_000)
    )


def test_10_jobs_wait_for_no_more_than_10_of_100000_others(long_queue: JobQueue) -> None:
    """All jobs cost the same, so the tenants take turns: after 21 claimed jobs the small tenant is served, however long the
    other one's queue is. Counted in jobs, and so in tokens."""
    engine = Engine(long_queue)
    order: list[str] = []
    while len(order) < 21:
        order += [job_id.partition("-")[0] for job_id in engine.claim_ids(1)]
    assert order.count("small") == 10


def test_10_jobs_are_in_the_first_batch_that_is_claimed(long_queue: JobQueue) -> None:
    """The same when an engine takes many at once."""
    batch = Engine(long_queue).claim_ids(32)
    assert sum(job_id.startswith("small") for job_id in batch) == 10


# --- reapers -------------------------------------------------------------------------------------------------------

AT_ONCE = 256
"""Jobs that a reaper takes back in one call."""
NUM_ORPHANS = 4 * AT_ONCE - 24
"""One call for each of three reapers, and some more for which two of them race."""


def orphan(place: Place) -> EngineId:
    """Return an engine that has died with all the jobs."""
    queue = JobQueue(place.redis, place.queue)
    dead = Engine(queue, "dead")
    while dead.claim():
        pass
    assert len(dead.held) == NUM_ORPHANS
    dead.die()
    return dead.id


@pytest.mark.slow
def test_a_reaper_is_killed_while_it_reaps_and_two_others_go_on_at_once(place: Place) -> None:
    """The replies to all three are held: each has recovered some of one dead engine's jobs, and has not finished when the
    next one starts. Then two of them race for the rest."""
    first, *others = [place.proxy() for _ in range(3)]
    reserves = [place.reserve("--max-num-seqs", "64", via=proxy) for proxy in others]
    place.submit(make_jobs(NUM_ORPHANS, max_tokens=4))
    orphans = f"{place.client._keys.prefix}leases:{orphan(place)}"
    recover = first.catch("recover", "hold-reply")
    reaper = place.launch("--max-num-seqs", "1", via=first)
    recover.wait()
    wait_until(lambda: place.client.stats().queued == AT_ONCE)
    reaper.kill()

    recovers = [proxy.catch("recover", "hold-reply") for proxy in others]
    engines = [reserve.let_serve() for reserve in reserves]
    for recover in recovers:
        recover.wait()
    wait_until(lambda: place.redis.scard(orphans) == NUM_ORPHANS - 3 * AT_ONCE)
    assert not any("recovered" in engine.text() for engine in engines)
    for recover in recovers:
        recover.release()
    place.wait_all()
    place.check(ALL, *engines)
    assert all(f"recovered {AT_ONCE} jobs" in engine.text() for engine in engines)
