"""What time, priority and versions do to a job, with a real engine at the other end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from millrace import Client
from millrace.results.keys import QueueKeys
from tests.e2e.conftest import Service, StartEngine
from tests.e2e.engines import LIMIT_S, wait_until


@pytest.fixture
def client(shared_client: Client) -> Client:
    return shared_client


@pytest.fixture
def keys(service: Service) -> QueueKeys:
    return QueueKeys(service.queue)


@pytest.fixture
def paused(shared_client: Client) -> Iterator[Client]:
    """A client of a queue whose engine claims nothing; it goes on at the end of the test at the latest."""
    shared_client.pause()
    yield shared_client
    shared_client.resume()


def test_a_running_job_ends_at_its_deadline_with_what_it_has(client: Client) -> None:
    for n, deadline_s in ((1, 6.0), (16, 2.0), (64, 0.5)):  # a fast machine ends the smaller ones before
        job_id = client.submit(
            prompt="A story:", n=n, max_tokens=900, ignore_eos=True, stream=True, deadline_s=deadline_s
        )
        texts = [""] * n
        for event in client.stream(job_id):
            texts[event.index] += event.text
        job = client.get(job_id)
        assert [output.text for output in job.outputs] == texts
        if job.state == "expired":
            break
    assert (job.state, job.finish_reason) == ("expired", "expired")
    assert job.token_ids


def test_a_deadline_that_passes_in_the_queue_expires_the_job_untouched(paused: Client) -> None:
    job_id = paused.submit(prompt="3 + 4 =", max_tokens=4, deadline_s=0.01)
    job = paused.wait(job_id, LIMIT_S)
    assert (job.state, job.token_ids, job.attempt) == ("expired", [], 0)


def test_a_delayed_job_runs_when_its_time_has_come(client: Client) -> None:
    job_id = client.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0, delay_s=1.0)
    job = client.wait(job_id, LIMIT_S)
    assert job.text == " 7"
    assert job.timings.started_ms is not None
    assert job.timings.started_ms - job.timings.created_ms >= 1000


def test_an_inbox_entry_waits_while_the_queue_is_full(
    paused: Client, keys: QueueKeys, redis_client: redis.Redis, queue_name: str
) -> None:
    paused.submit(prompt="3 + 4 =", max_tokens=4)
    redis_client.hset(keys.settings, "max_queued_jobs", 1)
    try:
        entry = {"id": queue_name, "prompt": "3 + 4 =", "max_tokens": 4, "temperature": 0}  # a unique id
        redis_client.xadd(keys.inbox, {"job": json.dumps(entry)})
        assert redis_client.xlen(keys.inbox) == 1
        paused.resume()
        wait_until(lambda: redis_client.exists(keys.job(queue_name)) == 1)
    finally:
        redis_client.hdel(keys.settings, "max_queued_jobs")
    assert paused.wait(queue_name, LIMIT_S).text == " 7"
    assert redis_client.xlen(keys.inbox) == 0


def test_a_record_of_a_newer_protocol_is_left_to_a_newer_engine(
    paused: Client, keys: QueueKeys, redis_client: redis.Redis, queue_name: str
) -> None:
    newer = queue_name  # unique
    paused.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0, job_id=newer)
    redis_client.hset(keys.job(newer), mapping={"v": "2", "novelty": "kept"})
    paused.resume()
    assert paused.wait(paused.submit(prompt="5 + 4 =", max_tokens=4, temperature=0.0), LIMIT_S).text == " 9"
    wait_until(lambda: paused.get(newer).state == "delayed")
    assert paused.get(newer).attempt == 0
    assert redis_client.hget(keys.job(newer), "novelty") == b"kept"
    assert paused.cancel(newer) == "cancelled"


def test_a_late_job_begins_before_claimed_ones_if_its_priority_is_better_or_its_tenant_has_none_running(
    redis_url: str, queue_name: str, start_engine: StartEngine
) -> None:
    engine = start_engine("--max-num-seqs", "2")
    with Client(redis_url, queue=queue_name) as client:

        def submit(max_tokens: int, **options: Any) -> str:
            return client.submit(prompt="A story:", max_tokens=max_tokens, ignore_eos=True, **options)

        def submit_and_wait_for_claim(**options: Any) -> str:
            job_id = submit(20, **options)
            wait_until(lambda: client.get(job_id).state == "running")
            return job_id

        for running in [submit(max_tokens, tenant="bulk", stream=True) for max_tokens in (700, 900)]:
            next(client.stream(running))
        (worker,) = engine.worker_pids()
        os.kill(worker, signal.SIGSTOP)  # so that no job ends before all are claimed
        try:
            bulk = [submit_and_wait_for_claim(tenant="bulk") for _ in range(2)]
            urgent = submit_and_wait_for_claim(tenant="bulk", priority=-100)
            other = submit_and_wait_for_claim(tenant="other")
        finally:
            os.kill(worker, signal.SIGCONT)
        jobs = [client.wait(job_id, LIMIT_S) for job_id in (*bulk, urgent, other)]
        jobs.sort(key=lambda job: (job.timings.ended_ms, job.timings.first_token_ms))  # ends of one write may be equal
        assert [job.id for job in jobs] == [other, urgent, *bulk]
