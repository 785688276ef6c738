"""Claims of an engine that has cached how some prompts begin."""

from __future__ import annotations

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
    submit_mixed(queue, " ".join(f"b{n}" for n in range(8)) + " a")
    assert engine.claim_ids(1, cached_prompts=CACHED) == ["b0"]
    assert engine.claim_ids(2, cached_prompts=CACHED) == ["a", "b1"]


@pytest.mark.parametrize("max_jobs", [1, 3, 100])
def test_a_first_job_is_passed_over_a_limited_number_of_times(max_jobs: int, queue: FullQueue, engine: Engine) -> None:
    names = [f"a{n}" for n in range(40)]
    submit_mixed(queue, "b1 " + " ".join(names))
    claimed = [
        job_id for _ in range(-(-41 // max_jobs)) for job_id in engine.claim_ids(max_jobs, cached_prompts=CACHED)
    ]
    assert claimed == [*names[:16], "b1", *names[16:]]


def test_it_is_still_passed_over_no_more_often_after_it_has_gone_back(queue: FullQueue, engine: Engine) -> None:
    submit_mixed(queue, "b " + " ".join(f"a{n}" for n in range(20)))
    engine.claim(16, cached_prompts=CACHED)
    engine.release(engine.claim(1, cached_prompts=CACHED)[0])
    assert engine.claim_ids(1, cached_prompts=CACHED) == ["b"]


def test_priorities_go_before_cached_prompts(queue: FullQueue, engine: Engine) -> None:
    submit_mixed(queue, "b1 b2", priority=1)
    submit_mixed(queue, "b3 a1", priority=2)
    submit_mixed(queue, "a2", priority=3)
    assert engine.claim_ids(cached_prompts=CACHED) == ["b1", "b2", "a1", "b3", "a2"]


def test_tenants_share_as_before(queue: FullQueue, engine: Engine) -> None:
    submit_mixed(queue, " ".join(f"b{n}" for n in range(30)), tenant="x")
    submit_mixed(queue, " ".join(f"a{n}" for n in range(100, 130)), tenant="y")
    submit_mixed(queue, " ".join(f"b{n} a{n} a{n + 100}" for n in range(200, 215)), tenant="z")
    claimed = [job for _ in range(6) for job in engine.claim(5, cached_prompts=CACHED)]
    assert Counter(job.tenant for job in claimed) == {"x": 10, "y": 10, "z": 10}
    assert [job.job_id[0] for job in claimed if job.tenant == "z"] == ["a"] * 10


def test_a_job_that_does_not_fit_is_not_passed_over(queue: FullQueue, engine: Engine) -> None:
    submit_mixed(queue, "b", cost=100)
    submit_mixed(queue, "a", cost=10)
    assert engine.claim_ids(num_held=1, budget=50, cached_prompts=CACHED) == []
    assert engine.claim_ids(num_held=1, budget=105, cached_prompts=CACHED) == ["a"]


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
    assert count_commands(engine, redis_client, 30, CACHED) <= count_commands(engine, redis_client, 30, []) + 3


def test_a_job_that_is_taken_in_the_claim_that_passes_it_over_keeps_the_count(queue: FullQueue, engine: Engine) -> None:
    submit_mixed(queue, "b " + " ".join(f"a{n}" for n in range(40)))
    claimed = engine.claim(17, cached_prompts=CACHED)
    assert claimed[16].job_id == "b"
    engine.release(claimed[16])
    assert engine.claim_ids(1, cached_prompts=CACHED) == ["b"]


def test_a_job_is_passed_over_by_its_tenants_jobs_only_so_often_in_turns_with_another_tenant(
    queue: FullQueue, engine: Engine
) -> None:
    submit_mixed(queue, "b0 " + " ".join(f"a{n}" for n in range(40)), tenant="x")
    submit_mixed(queue, " ".join(f"b{n}" for n in range(1, 40)), tenant="y")
    claimed = [str(job.job_id) for job in engine.claim(60, cached_prompts=CACHED) if job.tenant == "x"]
    assert claimed.index("b0") == 16


def test_prompts_differ_by_salt_and_beginning() -> None:
    requests = [{"prompt": "a" * 300}, {"prompt": "b" + "a" * 300}, {"prompt": "a" * 300, "cache_salt": "x"}]
    digests = [prompt_digest(canonical_body(GenerationRequest(**fields))) for fields in requests]  # type: ignore[arg-type]
    assert len(set(digests)) == 3
    same = GenerationRequest(prompt="a" * 300 + "b", tenant="x", priority=5)
    assert prompt_digest(canonical_body(same)) == digests[0]
