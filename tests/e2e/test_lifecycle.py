"""What time, priority and versions do to a job, with a real engine at the other end."""

from __future__ import annotations

import redis

from millrace import Client
from millrace.results.keys import QueueKeys
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import wait_until

LIMIT_S = 60.0


def test_a_running_job_ends_at_its_deadline_with_what_it_has(start_engine: StartEngine, client: Client) -> None:
    start_engine()
    job_id = client.submit(prompt="A story:", max_tokens=100_000, ignore_eos=True, stream=True, deadline_s=0.5)
    text = "".join(event.text for event in client.stream(job_id))
    job = client.get(job_id)
    assert (job.state, job.finish_reason) == ("expired", "expired")
    assert job.text == text
    assert job.token_ids


def test_a_deadline_that_passes_in_the_queue_expires_the_job_untouched(
    start_engine: StartEngine, client: Client
) -> None:
    job_id = client.submit(prompt="3 + 4 =", max_tokens=4, deadline_s=0.01)
    start_engine()
    job = client.wait(job_id, LIMIT_S)
    assert (job.state, job.token_ids, job.attempt) == ("expired", [], 0)


def test_a_delayed_job_runs_when_its_time_has_come(start_engine: StartEngine, client: Client) -> None:
    start_engine()
    job_id = client.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0, delay_s=1.0)
    assert client.get(job_id).state == "delayed"
    job = client.wait(job_id, LIMIT_S)
    assert job.text == " 7"
    assert job.timings.started_ms is not None
    assert job.timings.started_ms - job.timings.created_ms >= 1000


def test_an_inbox_entry_waits_while_the_queue_is_full(
    start_engine: StartEngine, client: Client, redis_client: redis.Redis, queue_name: str
) -> None:
    keys = QueueKeys(queue_name)
    client.pause()
    client.submit(prompt="3 + 4 =", max_tokens=4)
    redis_client.hset(keys.settings, "max_queued_jobs", 1)
    start_engine()
    redis_client.xadd(keys.inbox, {"job": '{"id":"late","prompt":"3 + 4 =","max_tokens":4,"temperature":0}'})
    wait_until(lambda: int(redis_client.xinfo_stream(keys.inbox)["length"]) == 1)
    client.resume()
    wait_until(lambda: redis_client.exists(keys.job("late")) == 1)
    assert client.wait("late", LIMIT_S).text == " 7"
    assert redis_client.xlen(keys.inbox) == 0


def test_a_record_of_a_newer_protocol_is_left_to_a_newer_engine(
    start_engine: StartEngine, client: Client, redis_client: redis.Redis, queue_name: str
) -> None:
    record = QueueKeys(queue_name).job("from-the-future")
    client.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0, job_id="from-the-future")
    redis_client.hset(record, mapping={"v": "2", "novelty": "kept"})
    engine = start_engine()
    assert client.wait(client.submit(prompt="5 + 4 =", max_tokens=4, temperature=0.0), LIMIT_S).text == " 9"
    wait_until(lambda: client.get("from-the-future").state == "delayed")
    assert engine.terminate() == 0
    job = client.get("from-the-future")
    assert (job.state in ("queued", "delayed"), job.attempt) == (True, 0)
    assert redis_client.hget(record, "novelty") == b"kept"
