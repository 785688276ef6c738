"""Cancellation in every state and in a race with the end. The job ends once, with a prefix of its undisturbed output."""

from __future__ import annotations

import pytest

from millrace.results.queue import JobQueue
from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import wait_until
from tests.chaos.proxy import Fault
from tests.chaos.workload import make_jobs
from tests.results.engines import Engine

pytestmark = [pytest.mark.faults, TEST_LIMIT]


def test_cancel_in_every_state(place: Place) -> None:
    queue = JobQueue(place.redis, place.queue)
    queued, delayed, orphaned, running, done = place.submit(make_jobs(5, max_tokens=900))
    assert place.client.cancel(queued) == "cancelled"

    passive = Engine(queue)
    first, second, *others = passive.claim()
    assert (first.job_id, second.job_id) == (delayed, orphaned)
    for job in others:
        passive.release(job)
    passive.release(first, delay_ms=3_600_000)
    assert place.client.cancel(delayed) == "cancelled"
    assert place.client.cancel(orphaned) == "cancelling"
    passive.die()

    engine = place.engine()
    wait_until(lambda: place.num_tokens_kept() > 0)
    engine.freeze_worker()
    assert place.client.cancel(running) == "cancelling"
    engine.thaw_worker()
    place.wait_all()
    assert [place.client.cancel(job_id) for job_id in place.accepted] == list(place.states().values())
    ended = dict.fromkeys((queued, delayed, orphaned, running), "cancelled")
    assert place.states() == {**ended, done: "finished"}
    place.check(ALL, engine, states=ended)


@pytest.mark.slow
def test_cancel_in_a_full_batch_and_in_the_line_before_it(place: Place) -> None:
    """While jobs end, cancel jobs that are next in the queue or have just started. The others are not affected."""
    engine = place.engine("--max-num-seqs", "16")
    ids = place.submit(make_jobs(120, max_tokens=40))
    cancelled = set()
    for done in place.client.as_completed(ids, 60.0):
        number = int(done.id.removeprefix("job-"))
        for neighbour in (number + 16, number + 23):
            if neighbour < len(ids) and neighbour % 3 and place.client.cancel(f"job-{neighbour}") != "finished":
                cancelled.add(f"job-{neighbour}")
    states = place.states()
    assert set(states.values()) == {"finished", "cancelled"}
    assert {job_id for job_id, state in states.items() if state == "cancelled"} <= cancelled
    place.check(ALL, engine, states=states)


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        pytest.param("hold-request", "cancelling", id="before the end is in Redis"),
        pytest.param("hold-reply", "finished", id="before the engine knows that it is"),
    ],
)
def test_cancel_comes_while_the_end_is_on_its_way(place: Place, fault: Fault, answer: str) -> None:
    """The output is complete, so the job has finished, and the engine ignores the cancellation."""
    proxy = place.proxy()
    engine = place.engine(via=proxy)
    finish = proxy.catch("finish", fault)
    (job_id,) = place.submit(make_jobs(1, max_tokens=8))
    finish.wait()
    wait_until(lambda: (place.record(job_id)["state"] == "finished") == (answer == "finished"))
    assert place.client.cancel(job_id) == answer
    wait_until(lambda: place.has_no_signals(engine))
    finish.release()
    place.wait_all()
    assert place.client.cancel(job_id) == "finished"
    place.check(ALL, engine)
