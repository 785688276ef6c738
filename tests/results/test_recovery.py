from __future__ import annotations

import threading

from millrace.results.connection import connect
from millrace.results.messages import Checkpoint, Event, Recovery
from tests.results.engines import Engine, submission, submit
from tests.results.full_queue import FullQueue


def test_the_jobs_of_a_dead_engine_go_back_to_the_front(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", "b")
    doomed = Engine(queue, "doomed")
    doomed.claim(1)
    submit(queue, "c")
    doomed.die()
    assert queue.recover() == [Recovery(doomed.id, 1, [])]
    assert engine.claim_ids() == ["a", "b", "c"]
    assert queue.stats().engines == 1


def test_the_jobs_of_a_living_engine_stay_where_they_are(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    engine.claim(1)
    assert queue.recover() == []
    assert queue.stats().running == 1


def test_a_heartbeat_that_runs_out_is_a_death(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    engine.claim(1)
    engine.beat(ttl_ms=1)
    while not queue.recover():
        pass
    assert engine.beat().lost == ["a"]


def test_a_recovered_job_goes_on_with_its_tokens_and_counts_the_attempt(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    doomed = Engine(queue, "doomed")
    job = doomed.claim_one()
    doomed.show(job, 0, [1, 2], "xy")
    doomed.append(job, 2, [3])
    doomed.die()
    queue.recover()
    again = engine.claim_one()
    assert (again.checkpoints, again.attempt) == ([Checkpoint([1, 2, 3], 2)], 2)
    assert again.seed == job.seed


def test_a_zombie_writes_nothing_and_is_told_what_it_lost(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    zombie = Engine(queue, "zombie")
    job = zombie.claim_one()
    zombie.die()
    queue.recover()
    new = engine.claim_one()
    assert zombie.show(job, 0, [9], "zombie") == "stale"
    assert zombie.queue.write([]) == []
    assert zombie.beat().lost == ["a"]
    assert zombie.finish(job, Event(offset=0, token_ids=[9], text="zombie")) == "stale"
    engine.finish(new, Event(offset=0, token_ids=[1], text="right"))
    assert queue.get("a").text == "right"


def test_an_engine_that_was_only_slow_goes_on(queue: FullQueue) -> None:
    """Its heartbeat ran out, but it came back before anybody noticed."""
    submit(queue, "a")
    slow = Engine(queue, "slow")
    job = slow.claim_one()
    slow.die()
    assert slow.beat().lost == []
    assert queue.recover() == []
    assert slow.finish(job) == "ok"


def test_a_job_whose_cancellation_was_asked_for_is_not_run_again(queue: FullQueue) -> None:
    submit(queue, "a")
    engine = Engine(queue)
    engine.claim(1)
    assert queue.cancel("a") == "cancelling"
    engine.die()
    queue.recover()
    assert queue.get("a").state == "cancelled"


def test_recovery_comes_in_batches(queue: FullQueue) -> None:
    queue.submit([submission() for _ in range(25)])
    doomed = [Engine(queue, "doomed") for _ in range(3)]
    for engine in doomed:
        engine.claim(8)
        engine.die()
    assert [sum(one.num_jobs for one in queue.recover(10)) for _ in range(4)] == [10, 10, 4, 0]
    assert queue.stats().queued == 25
    assert queue.stats().engines == 0


def test_two_reapers_take_each_job_back_once(queue: FullQueue, redis_url: str, queue_name: str) -> None:
    queue.submit([submission() for _ in range(500)])
    doomed = Engine(queue, "doomed")
    doomed.claim(500)
    doomed.die()
    counts: list[int] = []

    def reap() -> None:
        own = FullQueue(connect(redis_url), queue_name)
        while count := sum(one.num_jobs for one in own.recover(7)):
            counts.append(count)
        own.close()

    reapers = [threading.Thread(target=reap) for _ in range(3)]
    for reaper in reapers:
        reaper.start()
    for reaper in reapers:
        reaper.join()
    assert sum(counts) == 500
    assert queue.stats().queued == 500
