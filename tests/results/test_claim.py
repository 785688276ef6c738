from __future__ import annotations

import threading
from collections import Counter

import pytest
import redis

from millrace.results.connection import connect
from millrace.results.messages import EngineId, Event
from tests.results.engines import Engine, submission, submit
from tests.results.full_queue import FullQueue


def test_jobs_are_claimed_in_the_order_they_came(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "c", "a", "b")
    assert engine.claim_ids() == ["c", "a", "b"]


def test_a_lower_priority_number_comes_first(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "normal")
    submit(queue, "later", priority=5)
    submit(queue, "urgent", "urgent-too", priority=-3)
    assert engine.claim_ids() == ["urgent", "urgent-too", "normal", "later"]


def test_a_claim_takes_at_most_what_is_asked_for_and_tells_what_is_left(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", "b", "c")
    claim = queue.claim(engine.id, "c1", max_jobs=2, kv_token_budget=100, num_held=0, fingerprint="f")
    assert claim is not None
    assert ([job.job_id for job in claim.jobs], claim.num_ready) == (["a", "b"], 1)


def test_a_claim_takes_only_what_fits_and_never_passes_over_a_large_job(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "small", cost=10)
    submit(queue, "large", cost=100)
    submit(queue, "small-too", cost=10)
    assert engine.claim_ids(budget=50) == ["small"]
    assert engine.claim_ids(budget=50) == []
    engine.held.clear()
    assert engine.claim_ids(budget=50) == ["large"], "an idle engine may always claim one job"
    assert engine.claim_ids(budget=50) == ["small-too"]


def test_a_repeated_claim_id_returns_the_same_jobs_and_takes_no_others(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", "b", "c")
    first = engine.claim(2, claim_id="c1")
    assert engine.claim(2, claim_id="c1") == first
    assert queue.stats().running == 2
    engine.finish(first[0])
    assert engine.claim(2, claim_id="c1") == first[1:], "what has ended since is not given again"


def test_an_engine_without_a_heartbeat_gets_nothing_until_it_registers(queue: FullQueue) -> None:
    submit(queue, "a")
    stranger = EngineId("stranger")

    def claim() -> list[str] | None:
        got = queue.claim(stranger, "c1", max_jobs=1, kv_token_budget=99, num_held=0, fingerprint="f")
        return None if got is None else [job.job_id for job in got.jobs]

    assert claim() is None
    queue.heartbeat(stranger, 60_000, {})
    assert claim() == ["a"]


def test_every_claim_has_a_lease_of_its_own_that_grows(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", "b")
    a, b = engine.claim()
    assert b.lease > a.lease
    engine.release(a)
    again = engine.claim_one()
    assert again.job_id == "a"
    assert again.lease > b.lease


def test_tenants_share_by_tokens_not_by_jobs(queue: FullQueue, engine: Engine) -> None:
    queue.submit([submission(f"big-{i}", tenant="big", cost=100) for i in range(20)])
    queue.submit([submission(f"small-{i}", tenant="small", cost=10) for i in range(100)])
    tenants = Counter(job_id.split("-")[0] for job_id in engine.claim_ids(55))
    assert tenants == {"big": 5, "small": 50}


def test_a_tenant_that_arrives_does_not_wait_for_the_backlog_of_another(queue: FullQueue, engine: Engine) -> None:
    queue.submit([submission(f"many-{i}", tenant="many") for i in range(500)])
    engine.claim(100)
    submit(queue, "few-1", "few-2", tenant="few")
    assert {"few-1", "few-2"} <= set(engine.claim_ids(5))


def test_a_tenant_that_was_away_has_saved_nothing_up(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "early", tenant="idle")
    queue.submit([submission(f"busy-{i}", tenant="busy") for i in range(200)])
    engine.claim(101)
    queue.submit([submission(f"late-{i}", tenant="idle") for i in range(50)])
    got = Counter(job_id.split("-")[0] for job_id in engine.claim_ids(40))
    assert got["busy"] >= 19


def test_what_a_job_really_took_is_settled_at_its_end(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    queue.submit([submission(f"a-{i}", tenant="a", cost=1000) for i in range(3)])
    job = engine.claim_one()
    assert redis_client.zscore(queue.keys.prefix + "tenants", "a") == 1000
    engine.finish(job)
    assert redis_client.zscore(queue.keys.prefix + "tenants", "a") == 2


def test_engines_that_claim_at_once_get_different_jobs(queue: FullQueue, redis_url: str, queue_name: str) -> None:
    queue.submit([submission(f"j{i}") for i in range(2000)])
    got: list[list[str]] = []

    def drain() -> None:
        engine = Engine(FullQueue(connect(redis_url), queue_name))
        ids: list[str] = []
        while claimed := engine.claim_ids(37):
            ids += claimed
        got.append(ids)
        engine.queue.close()

    threads = [threading.Thread(target=drain) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [job_id for ids in got for job_id in ids]
    assert sorted(everything) == sorted(f"j{i}" for i in range(2000))


def test_work_wakes_one_idle_engine_and_a_full_claim_wakes_the_next(queue: FullQueue, engine: Engine) -> None:
    assert queue.wait_for_signal(engine.id, 0.01, include_wake=True) is None
    submit(queue, "a", "b")
    assert queue.wait_for_signal(engine.id, 1, include_wake=True) == "wake"
    assert queue.wait_for_signal(engine.id, 1, include_wake=True) == "wake"
    engine.claim(1)
    assert queue.wait_for_signal(engine.id, 1, include_wake=True) == "wake", "b is still there for somebody"
    engine.claim(1)
    assert queue.wait_for_signal(engine.id, 0.01, include_wake=True) is None


def test_a_busy_engine_leaves_the_wake_up_to_the_idle_ones(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    assert queue.wait_for_signal(engine.id, 0.01, include_wake=False) is None
    assert queue.wait_for_signal(engine.id, 1, include_wake=True) == "wake"


def test_a_record_that_somebody_deleted_does_not_block_the_queue(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "gone", "here")
    redis_client.delete(queue.keys.job("gone"))
    assert engine.claim_ids() == ["here"]


def test_a_line_that_somebody_deleted_does_not_block_the_queue(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "gone")
    redis_client.delete(
        queue.keys.prefix + "ready:default",
        queue.keys.prefix + "waiting",
        queue.keys.job("gone"),
        queue.keys.body("gone"),
    )
    assert engine.claim_ids() == []
    assert queue.stats().queued == 0
    submit(queue, "here")
    assert engine.claim_ids() == ["here"]


@pytest.mark.parametrize("field", ["cost", "crashes", "attempt", "published"])
def test_a_number_that_somebody_damaged_does_not_block_the_queue(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis, field: str
) -> None:
    submit(queue, "damaged", "here")
    redis_client.hset(queue.keys.job("damaged"), field, "x")
    damaged, here = engine.claim()
    assert engine.release(damaged) == "ok"
    (damaged,) = engine.claim(1)
    event = Event(offset=0, token_ids=[1], text="x")
    assert [engine.finish(job, event) for job in (damaged, here)] == ["ok", "ok"]
    assert (queue.stats().running, queue.stats().finished) == (0, 2)
    redis_client.hset(queue.keys.job("damaged"), field, 1)  # for who looks at the queue after every test


def test_a_job_that_costs_nothing_is_claimed_and_cancelled_like_others(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", "b", cost=0)
    job = engine.claim_one()
    assert queue.cancel("b") == "cancelled"
    assert engine.finish(job) == "ok"


def test_a_lease_never_comes_back_even_when_the_server_forgets_what_it_gave_out(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "a", "b")
    a = engine.claim_one()
    redis_client.delete(queue.keys.prefix + "serial")
    assert engine.claim_one().lease > a.lease


@pytest.fixture
def replicas(queue: FullQueue) -> list[Engine]:
    """Four engines that have found nothing to do."""
    engines = [Engine(queue, f"replica{number}") for number in range(4)]
    for one in engines:
        assert one.claim() == []
    return engines


def claim_fairly(replicas: list[Engine], number: int, redis_client: redis.Redis, max_jobs: int = 256) -> int:
    """Return how many jobs one of them gets. All have claimed a moment ago, also where this test takes long."""
    for one in replicas:
        redis_client.hset(one.queue.keys.prefix + "engine:" + one.id, "takes_until", 10**15)
    return len(replicas[number].claim(max_jobs, is_fair=True))


@pytest.mark.parametrize("num_jobs", [8, 200])
def test_idle_engines_get_equal_parts(
    queue: FullQueue, replicas: list[Engine], redis_client: redis.Redis, num_jobs: int
) -> None:
    submit(queue, *map(str, range(num_jobs)))
    assert [claim_fairly(replicas, number, redis_client) for number in range(4)] == [num_jobs // 4] * 4


def test_an_engine_with_more_jobs_than_others_leaves_the_next_ones_to_them(
    queue: FullQueue, replicas: list[Engine], redis_client: redis.Redis
) -> None:
    submit(queue, *"abcdef")
    replicas[0].claim()
    submit(queue, *"ghij")
    assert [claim_fairly(replicas, number, redis_client) for number in range(4)] == [0, 3, 1, 0]


def test_what_the_others_leave_may_be_claimed(
    queue: FullQueue, replicas: list[Engine], redis_client: redis.Redis
) -> None:
    submit(queue, *"abcdefgh")
    assert [claim_fairly(replicas, 0, redis_client) for _ in range(2)] == [2, 0]
    assert len(replicas[0].claim()) == 6


def test_the_part_of_others_wakes_them(queue: FullQueue, replicas: list[Engine], redis_client: redis.Redis) -> None:
    submit(queue, *"ab")
    replicas[0].claim(1)
    queue._transport.send(("DEL", queue.keys.wake))
    assert claim_fairly(replicas, 0, redis_client) == 0
    assert queue.wait_for_signal(replicas[1].id, 1, include_wake=True) == "wake"


@pytest.mark.parametrize("why", ["alone", "full", "no capacity in tokens", "runs a job alone", "silent", "gone"])
def test_an_engine_takes_all_when_no_other_can(queue: FullQueue, redis_client: redis.Redis, why: str) -> None:
    engine, other = Engine(queue), Engine(queue)
    submit(queue, "first", "large", cost=50)
    if why == "runs a job alone":
        redis_client.hset(queue.keys.job("first"), mapping={"crashes": 2, "attempt": 2})
    if why != "alone":
        other.claim(1 if why == "full" else 3, budget=50 if why == "no capacity in tokens" else 1000)
    if why == "silent":
        redis_client.hset(queue.keys.prefix + "engine:" + other.id, "takes_until", 1)
    if why == "gone":
        other.die()
    submit(queue, *"abcdefgh")
    assert len(engine.claim(is_fair=True)) >= 8
    assert queue.stats().queued == 0


def test_where_jobs_wait_for_all_engines_each_claim_is_full(
    queue: FullQueue, replicas: list[Engine], redis_client: redis.Redis
) -> None:
    submit(queue, *map(str, range(40)))
    replicas[0].claim(10)
    assert claim_fairly(replicas, 0, redis_client, max_jobs=7) == 7
