"""Claims of an engine that has cached how some prompts begin."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest
import redis

from millrace.producer.prompt_start import prompt_digest
from millrace.producer.request import GenerationRequest
from millrace.producer.sampling import SamplingParams
from millrace.producer.wire import canonical_body, to_submission
from tests.processes import wait_until
from tests.results.engines import Engine, outcomes, submission, submit
from tests.results.full_queue import FullQueue

A, B = (canonical_body(GenerationRequest(prompt=letter * 300)) for letter in "ab")
CACHED = [digest for digest in [prompt_digest(A)] if digest]


def submit_mixed(queue: FullQueue, job_ids: str, **fields: Any) -> None:
    """Submit a job for each word, with the body that its first letter names."""
    queue.submit([submission(job_id, body=A if job_id[0] == "a" else B, **fields) for job_id in job_ids.split()])


def test_a_job_with_a_cached_prompt_goes_before_others(queue: FullQueue, engine: Engine) -> None:
    submit_mixed(queue, "b1 a1 b2 a2 b3")
    assert engine.claim_ids(1, cached_prompts=CACHED) == ["a1"]
    assert engine.claim_ids(3, cached_prompts=CACHED) == ["a2", "b1", "b2"]
    assert engine.claim_ids(3, cached_prompts=CACHED) == ["b3"]


def count_commands(engine: Engine, redis_client: redis.Redis, num_jobs: int, cached_prompts: list[str]) -> int:
    """The commands of a claim, those inside of the script included."""
    redis_client.config_resetstat()
    assert len(engine.claim(num_jobs, cached_prompts=cached_prompts)) == num_jobs
    stats: Any = redis_client.info("commandstats")
    return sum(each["calls"] for name, each in stats.items() if name not in ("cmdstat_info", "cmdstat_config"))


def test_without_cached_prompts_the_order_is_that_of_age(queue: FullQueue, engine: Engine) -> None:
    submit_mixed(queue, "b1 a1 b2 a2")
    assert engine.claim_ids(3) == ["b1", "a1", "b2"]
    assert engine.claim_ids(3, cached_prompts=["0" * 40]) == ["a2"]


def test_only_the_first_jobs_are_looked_at(queue: FullQueue, engine: Engine) -> None:
    submit_mixed(queue, "b0 b1 b2 b3 a")
    assert engine.claim_ids(1, cached_prompts=CACHED) == ["b0"]
    assert engine.claim_ids(2, cached_prompts=CACHED) == ["a", "b1"]


def test_a_job_goes_before_none_that_is_a_second_older(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit_mixed(queue, "b1 a1")
    time: Any = redis_client.time
    submitted = time()
    wait_until(lambda: time() >= (submitted[0] + 1, submitted[1]))
    submit_mixed(queue, "a2 b2 a3")
    assert engine.claim_ids(2, cached_prompts=CACHED) == ["a1", "b1"]
    assert engine.claim_ids(2, cached_prompts=CACHED) == ["a2", "a3"]


def test_any_claims_follow_the_rule_and_take_each_job_once(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    rng = random.Random(4)
    for number in range(40):
        jobs = []  # by priority and age
        for priority in range(rng.choice([1, 1, 3])):
            named = [f"{rng.choice('aab')}-{number}-{priority}-{n}" for n in range(rng.randint(1, 30))]
            submit_mixed(queue, " ".join(named), priority=priority)
            jobs += [(priority, job_id) for job_id in named]
        while jobs:
            max_jobs, num_fit = rng.randint(1, 12), rng.randint(1, 12)
            claimed = engine.claim_ids(max_jobs, budget=10 * num_fit, num_held=1, cached_prompts=CACHED)
            assert claimed == [job_id for _, job_id in cached_first(jobs)[: min(max_jobs, num_fit)]]
            jobs = [job for job in jobs if job[1] not in claimed]
            ready: Any = redis_client.zrange(queue.keys.prefix + "ready:default", 0, -1)
            assert [member.decode().split(":")[2] for member in ready] == [job_id for _, job_id in jobs]


def cached_first(jobs: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return these jobs, which have about the same age, in the order of a claim."""
    order: list[tuple[int, str]] = []
    for rank, (priority, job_id) in enumerate(jobs):
        place = rank
        while (
            job_id[0] == "a"
            and place > max(0, rank - 3)
            and order[place - 1][0] == priority
            and order[place - 1][1][0] != "a"
        ):
            place -= 1
        order.insert(place, (priority, job_id))
    return order


def test_priorities_go_before_cached_prompts(queue: FullQueue, engine: Engine) -> None:
    submit_mixed(queue, "b1 b2", priority=1)
    submit_mixed(queue, "b3 a1", priority=2)
    submit_mixed(queue, "a2", priority=3)
    assert engine.claim_ids(cached_prompts=CACHED) == ["b1", "b2", "a1", "b3", "a2"]


def test_tenants_share_as_before(queue: FullQueue, engine: Engine) -> None:
    submit_mixed(queue, " ".join(f"b{n}" for n in range(30)), tenant="x")
    submit_mixed(queue, " ".join(f"a{n}" for n in range(100, 130)), tenant="y")
    submit_mixed(queue, " ".join(f"b{n} a{n} a{n + 100} a{n + 200} a{n + 300}" for n in range(1000, 1015)), tenant="z")
    claimed = [job for _ in range(6) for job in engine.claim(5, cached_prompts=CACHED)]
    assert Counter(job.tenant for job in claimed) == {"x": 10, "y": 10, "z": 10}
    assert [job.job_id[0] for job in claimed if job.tenant == "z"] == ["a"] * 10


def test_a_claim_stops_at_the_first_job_of_its_order_that_does_not_fit(queue: FullQueue, engine: Engine) -> None:
    submit_mixed(queue, "b1", cost=100)
    submit_mixed(queue, "a1", cost=10)
    assert engine.claim_ids(num_held=1, budget=50, cached_prompts=CACHED) == ["a1"]
    submit_mixed(queue, "a2", cost=100)
    assert engine.claim_ids(num_held=1, budget=50, cached_prompts=CACHED) == []
    assert engine.claim_ids(num_held=1, budget=250, cached_prompts=CACHED) == ["a2", "b1"]


def test_a_repeated_claim_returns_the_same_jobs(queue: FullQueue, engine: Engine) -> None:
    submit_mixed(queue, "b1 a1 b2 a2")
    first = engine.claim(3, claim_id="c", cached_prompts=CACHED)
    assert [job.job_id for job in first] == ["a1", "a2", "b1"]
    assert engine.claim(3, claim_id="c") == first
    assert queue.stats().queued == 1


LONG = "é'\"\\" * 100
REQUESTS: list[tuple[dict[str, Any], bool]] = [
    ({"prompt": LONG}, True),
    ({"prompt": LONG, "cache_salt": "x", "meta": {"a": 1}, "n": 2}, True),
    ({"prompt_token_ids": list(range(100))}, True),
    ({"messages": [{"role": "user", "content": LONG}]}, True),
    ({"prompt": "short"}, False),
    ({"prompt": LONG, "meta": {"a": "x" * 2000}}, False),
]


@pytest.mark.parametrize(("fields", "has_digest"), REQUESTS)
def test_a_client_gives_the_digest_of_a_long_prompt(
    fields: dict[str, Any], has_digest: bool, queue: FullQueue, engine: Engine
) -> None:
    fields = {**fields}
    n = fields.pop("n", 1)
    request = GenerationRequest(**fields, id="this", sampling=SamplingParams(n=n))
    digest = prompt_digest(canonical_body(request))
    assert (digest is not None) == has_digest
    submit(queue, "other", body=B)
    queue.submit([to_submission(request)])
    assert engine.claim_ids(1, cached_prompts=[digest or prompt_digest(A) or ""]) == ["this" if has_digest else "other"]


def test_a_job_is_the_same_with_and_without_the_digest(queue: FullQueue, redis_client: redis.Redis) -> None:
    job = submission("a", body=A)
    without = msgspec.structs.replace(job, prompt_digest=None)
    other = msgspec.structs.replace(job, digest="0" * 64)
    assert queue.submit([job, without, job, other]) == outcomes(["created", "exists", "exists", "conflict"])
    assert redis_client.hget(queue.keys.job("a"), "digest") == job.digest.encode()


def test_what_is_no_digest_leaves_the_order_as_it_is(queue: FullQueue, engine: Engine) -> None:
    wrong = ["x", "0" * 7, "0" * 9, "-------0", "0123456g", ":" * 8]
    jobs = [submission(f"job-{number}", body=A, prompt_digest=digest) for number, digest in enumerate(wrong)]
    queue.submit(jobs)
    assert engine.claim_ids(cached_prompts=wrong) == [job.job_id for job in jobs]


def test_a_job_keeps_its_digest_when_it_is_delayed_given_back_or_run_again(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "b", body=B)
    submit(queue, "a", body=A, delay_ms=1)
    wait_until(lambda: engine.claim(budget=0, num_held=1) or queue.stats().queued == 2)
    (job,) = engine.claim(1, cached_prompts=CACHED)
    engine.release(job)
    (again,) = engine.claim(1, cached_prompts=CACHED)
    assert (job.job_id, again.job_id) == ("a", "a")
    engine.finish(again, state="failed")
    queue.redrive("a")
    assert engine.claim_ids(1, cached_prompts=CACHED) == ["a.r1"]


def test_the_jobs_that_are_looked_at_cost_no_command(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit_mixed(queue, " ".join(f"b{n}" for n in range(40)))

    engine.claim(1)
    assert count_commands(engine, redis_client, 3, CACHED) <= count_commands(engine, redis_client, 3, [])


def test_a_claim_of_one_job_is_few_commands(queue: FullQueue, engine: Engine, redis_client: redis.Redis) -> None:
    submit_mixed(queue, " ".join(f"b{n}" for n in range(40)))

    engine.claim(1)
    assert count_commands(engine, redis_client, 1, []) <= 24
    assert count_commands(engine, redis_client, 1, CACHED) <= 24


def test_jobs_that_pass_over_others_cost_no_more_commands(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit_mixed(queue, " ".join(f"b{n} a{n}" for n in range(40)))

    engine.claim(1)
    assert count_commands(engine, redis_client, 30, CACHED) <= count_commands(engine, redis_client, 30, []) + 2


def test_prompts_differ_by_salt_and_beginning() -> None:
    requests = [{"prompt": "a" * 300}, {"prompt": "b" + "a" * 300}, {"prompt": "a" * 300, "cache_salt": "x"}]
    digests = [prompt_digest(canonical_body(GenerationRequest(**fields))) for fields in requests]  # type: ignore[arg-type]
    assert len(set(digests)) == 3
    same = GenerationRequest(prompt="a" * 300 + "b", tenant="x", priority=5)
    assert prompt_digest(canonical_body(same)) == digests[0]
