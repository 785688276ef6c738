"""Limits on what waits, shares between tenants, and a queue that stands still."""

from __future__ import annotations

from collections import Counter

import pytest
import redis

from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.errors import QueueError
from millrace.results.messages import Event, Usage
from millrace.results.replies import Outcome
from tests.results.engines import Engine, outcomes, submission, submit
from tests.results.full_queue import FullQueue


def set_setting(queue: FullQueue, client: redis.Redis, name: str, value: float | str) -> None:
    client.hset(queue.keys.settings, name, value)


def test_a_limit_on_jobs_counts_what_waits_and_not_what_runs(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    set_setting(queue, redis_client, "max_queued_jobs", 3)
    late = submission("late", delay_ms=3_600_000)
    found = queue.submit([submission("a"), late, submission("b"), submission("c"), submission("a")])
    assert found == outcomes(["created", "created", "created", "full max_queued_jobs 3", "exists"])
    engine.claim(1)
    assert queue.submit([submission("c"), submission("d")]) == outcomes(["created", "full max_queued_jobs 3"])


def test_a_limit_on_tokens_lets_a_smaller_job_in(queue: FullQueue, redis_client: redis.Redis) -> None:
    set_setting(queue, redis_client, "max_queued_tokens", 100)
    jobs = [submission(f"j{cost}", cost=cost) for cost in (60, 50, 40)]
    assert queue.submit(jobs) == outcomes(["created", "full max_queued_tokens 100", "created"])
    assert queue.stats().waiting_tokens == 100


def test_each_tenant_has_its_own_part(queue: FullQueue, redis_client: redis.Redis) -> None:
    set_setting(queue, redis_client, "tenant_max_queued_jobs", 2)
    set_setting(queue, redis_client, "tenant_max_queued_tokens", 50)
    jobs = [submission(f"x{i}", tenant="x") for i in range(3)]
    jobs += [submission(f"y{cost}", tenant="y", cost=cost) for cost in (40, 11, 10)]
    full = ["full tenant_max_queued_jobs 2", "created", "full tenant_max_queued_tokens 50"]
    assert queue.submit(jobs) == outcomes(["created", "created", *full, "created"])


def test_a_limit_of_one_tenant_precedes_that_of_each(queue: FullQueue, redis_client: redis.Redis) -> None:
    set_setting(queue, redis_client, "tenant_max_queued_jobs", 1)
    set_setting(queue, redis_client, "tenant_max_queued_jobs:gold", 2)
    set_setting(queue, redis_client, "tenant_max_queued_tokens:small", 20)
    jobs = [submission(f"{tenant}{i}", tenant=tenant) for tenant in ("gold", "small") for i in range(3)]
    jobs.append(submission("large", tenant="small", cost=21))
    full = "full tenant_max_queued_jobs"
    large = "oversized tenant_max_queued_tokens 20"
    expected = ["created", "created", f"{full} 2", "created", f"{full} 1", f"{full} 1", f"{full} 1"]
    assert queue.submit(jobs) == outcomes(expected)
    set_setting(queue, redis_client, "tenant_max_queued_jobs:small", 9)
    assert queue.submit(jobs[-2:]) == outcomes(["created", large])
    queue.cancel("gold0")
    set_setting(queue, redis_client, "tenant_max_queued_jobs:gold", 0)
    assert queue.redrive("gold0") == "gold0.r1"


@pytest.mark.parametrize("limit", ["max_queued_tokens", "tenant_max_queued_tokens"])
def test_who_alone_breaks_a_limit_is_told_that_waiting_is_no_use(
    queue: FullQueue, redis_client: redis.Redis, limit: str
) -> None:
    set_setting(queue, redis_client, limit, 50)
    jobs = [submission(f"j{cost}", cost=cost) for cost in (51, 50, 51)]
    assert queue.submit(jobs) == outcomes([f"oversized {limit} 50", "created", f"oversized {limit} 50"])


def test_what_comes_back_is_taken_in_any_case(queue: FullQueue, engine: Engine, redis_client: redis.Redis) -> None:
    submit(queue, "a", "b")
    a, b = engine.claim()
    set_setting(queue, redis_client, "max_queued_jobs", 1)
    submit(queue, "c")
    assert engine.release(a) == "ok"
    assert engine.finish(b, state="failed") == "ok"
    assert queue.redrive("b") == "b.r1"
    assert queue.stats().queued == 3


def test_an_inbox_entry_stays_until_there_is_room(queue: FullQueue, engine: Engine, redis_client: redis.Redis) -> None:
    set_setting(queue, redis_client, "max_queued_jobs", 1)
    submit(queue, "a")
    entry_id = redis_client.xadd(queue.keys.inbox, {"job": "{}"}).decode()  # type: ignore[union-attr]
    assert [queue.accept(entry_id, submission("b"))] == outcomes(["full max_queued_jobs 1"])
    engine.claim(1)
    assert queue.accept(entry_id, submission("b")) == Outcome("created")
    assert queue.accept(entry_id, submission("b")) == Outcome("taken")


def test_weights_share_by_tokens(queue: FullQueue, engine: Engine, redis_client: redis.Redis) -> None:
    set_setting(queue, redis_client, "weight:gold", 3)
    set_setting(queue, redis_client, "weight:broken", "heavy")
    for tenant in ("gold", "plain", "broken"):
        queue.submit([submission(f"{tenant}-{i}", tenant=tenant) for i in range(100)])
    got = Counter(job_id.split("-")[0] for job_id in engine.claim_ids(100))
    assert got["gold"] == pytest.approx(60, abs=2)
    assert got["plain"] == pytest.approx(got["broken"], abs=1)


@pytest.mark.parametrize("weight", ["1e-306", "1e306", "0", "-1", "inf", "nan"])
def test_a_weight_that_is_none_counts_as_one(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis, weight: str
) -> None:
    set_setting(queue, redis_client, "weight:default", weight)
    queue.submit([submission(f"x{i}", cost=5000) for i in range(3)])
    assert engine.finish(engine.claim_one()) == "ok"
    assert queue.get("x0").state == "finished"


@pytest.mark.parametrize("cost", [10, 1000])
def test_a_tenant_whose_line_runs_empty_again_and_again_takes_no_more_than_its_share(
    queue: FullQueue, engine: Engine, cost: int
) -> None:
    """Whatever its jobs were thought to cost, and settled to in the end."""
    queue.submit([submission(f"steady-{i}", tenant="steady", cost=cost) for i in range(100)])
    turns = Counter[str]()
    for number in range(60):
        queue.submit([submission(f"refilled-{number}", tenant="refilled", cost=cost)])
        job = engine.claim_one()
        turns[job.job_id.split("-")[0]] += 1
        assert engine.finish(job, usage=Usage(prompt_tokens=5, completion_tokens=35)) == "ok"
    assert abs(turns["steady"] - turns["refilled"]) <= 2


def test_when_nobody_waits_all_begin_anew(queue: FullQueue, engine: Engine) -> None:
    queue.submit([submission("x1", tenant="x", cost=10_000), submission("y1", tenant="y", cost=10)])
    assert engine.claim_ids(2) == ["x1", "y1"]
    queue.submit([submission("x2", tenant="x")])
    queue.submit([submission(f"y{i}", tenant="y") for i in range(2, 5)])
    assert engine.claim_ids(2) == ["x2", "y2"]


def test_the_few_jobs_of_one_tenant_wait_for_about_as_many_of_a_huge_one() -> None:
    with EmbeddedServer() as server, connect(server.url) as client:
        queue = FullQueue(client, "fair")
        for first in range(0, 100_000, 1000):
            queue.submit([submission(f"huge-{first + i}", tenant="huge") for i in range(1000)])
        engine = Engine(queue)
        engine.claim(100)
        queue.submit([submission(f"small-{i}", tenant="small") for i in range(10)])
        order = engine.claim_ids(40)
        last = max(i for i, job_id in enumerate(order) if job_id.startswith("small"))
        assert last <= 20


def test_many_tenants_take_turns_in_one_claim(queue: FullQueue, engine: Engine) -> None:
    for tenant in range(20):
        queue.submit([submission(f"{tenant}-{i}", tenant=f"t{tenant:02}") for i in range(10)])
    turns = [Counter(job_id.split("-")[0] for job_id in engine.claim_ids(40)) for _ in range(5)]
    for number, turn in enumerate(turns, start=1):
        total = sum(turns[:number], Counter[str]())
        assert max(total.values()) - min(total.values()) <= 1, turn


# --- pause ---------------------------------------------------------------------------------------------------------


def test_a_paused_queue_hands_nothing_out_and_goes_on_where_it_was(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", "b")
    running = engine.claim_one()
    queue.pause(True)
    assert queue.stats().is_paused
    submit(queue, "c")
    claim = queue.claim(engine.id, "p1", max_jobs=9, kv_token_budget=10**6, num_held=1, fingerprint="f")
    assert claim is not None
    assert (claim.jobs, claim.num_ready) == ([], 0)
    assert engine.finish(running, Event(offset=0, token_ids=[1], text="x")) == "ok"
    engine.beat()
    assert queue.wait_for_signal(engine.id, 0.01, include_wake=True) is None, "nobody is woken for nothing"
    queue.pause(False)
    assert queue.wait_for_signal(engine.id, 1, include_wake=True) == "wake"
    assert engine.claim_ids() == ["b", "c"]


# --- refused writes ------------------------------------------------------------------------------------------------


def test_writes_of_a_zombie_are_refused_and_counted(queue: FullQueue) -> None:
    submit(queue, "a")
    zombie, heir = Engine(queue, "zombie"), Engine(queue, "heir")
    old = zombie.claim_one()
    zombie.die()
    queue.recover()
    new = heir.claim_one()
    assert zombie.show(old, 0, [9], "wrong") == "stale"
    assert zombie.finish(old, Event(offset=0, token_ids=[9], text="wrong")) == "stale"
    assert zombie.release(old) == "stale"
    assert heir.finish(new, Event(offset=0, token_ids=[1], text="right")) == "ok"
    assert zombie.finish(old) == "stale"
    assert queue.get("a").text == "right"
    assert queue.stats().stale_writes == 4


# --- what an operator, or a client of somebody else's, may get wrong -----------------------------------------------


@pytest.mark.parametrize(("value", "longest_ms"), [("1500.5", 1500), ("soon", 86_400_000), ("inf", 86_400_000)])
def test_a_time_that_is_no_whole_number_ends_a_job_as_well(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis, value: str, longest_ms: int
) -> None:
    set_setting(queue, redis_client, "result_ttl_ms", value)
    submit(queue, "a")
    assert engine.finish(engine.claim_one()) == "ok"
    assert 0 < redis_client.pttl(queue.keys.job("a")) <= longest_ms


def test_a_level_of_sleep_that_does_not_exist_is_refused(queue: FullQueue, engine: Engine) -> None:
    with pytest.raises(QueueError, match="level of sleep"):
        queue.sleep(3)
    assert engine.beat().sleep_level == 0
