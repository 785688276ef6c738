"""Engines of one queue share its jobs."""

from __future__ import annotations

from collections import Counter

import redis

from millrace import Client, GenerationRequest, SamplingParams
from millrace.results.keys import QueueKeys
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import wait_until

NUM_ENGINES = 4
LONG = SamplingParams(max_tokens=900, ignore_eos=True)


def test_idle_engines_share_a_burst_of_jobs(
    launch: StartEngine, client: Client, redis_client: redis.Redis, queue_name: str
) -> None:
    for engine in [launch("--max-num-seqs", "64", "--num-blocks", "4096") for _ in range(NUM_ENGINES)]:
        engine.wait_until_serving()
    keys = QueueKeys(queue_name)

    def counts_of_a_burst(num_jobs: int) -> list[int]:
        ids = client.submit_many([GenerationRequest(prompt=f"{n} + 4 =", sampling=LONG) for n in range(num_jobs)])
        wait_until(lambda: client.stats().queued == 0)
        counts = Counter(redis_client.hget(keys.job(job_id), "engine") for job_id in ids)
        client.cancel_many(ids)
        wait_until(lambda: client.stats().running == 0)
        return sorted(counts.values())

    for num_jobs, slack in ((8, 0), (200, 10)):
        part = num_jobs // NUM_ENGINES
        # An engine has 0.5 s to take its part. On a loaded machine one may come later, so one of five bursts has to be even.
        bursts = (counts_of_a_burst(num_jobs) for _ in range(5))
        assert any(
            len(counts) == NUM_ENGINES and all(abs(count - part) <= slack for count in counts) for counts in bursts
        )
