"""Cancellation in every state, and in a race with the end. The job ends once, with a beginning of its undisturbed output."""

from __future__ import annotations

import pytest

from results.queue import JobQueue
from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import wait_until
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
def test_cancel_races_with_the_end(place: Place) -> None:
    """Each is asked to end at another moment of its life; whichever comes first counts, and counts once."""
    engine = place.engine("--max-num-seqs", "16")
    ids = place.submit(make_jobs(120, max_tokens=40))
    answers = {}
    for done in place.client.as_completed(ids, 60.0):
        number = int(done.id.removeprefix("job-"))
        for neighbour in (number + 16, number + 23):
            if f"job-{neighbour}" in place.accepted and neighbour % 3:
                answers[f"job-{neighbour}"] = place.client.cancel(f"job-{neighbour}")
    states = place.states()
    assert set(states.values()) == {"finished", "cancelled"}
    assert {states[job_id] for job_id, answer in answers.items() if answer == "cancelled"} <= {"cancelled"}
    place.check(ALL, engine, states=states)
