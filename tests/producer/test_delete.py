"""An ended job is deleted without a trace; any other job stays."""

from __future__ import annotations

import pytest
import redis

from millrace import Client, JobNotFound, QueueError
from millrace.results.messages import Event
from millrace.results.queue import JobQueue
from tests.results.engines import Engine


@pytest.mark.parametrize("state", ["finished", "failed", "cancelled"])
@pytest.mark.parametrize("n", [1, 3])
def test_nothing_of_a_deleted_job_is_left(
    client: Client, engine: Engine, redis_client: redis.Redis, state: str, n: int
) -> None:
    keys = engine.queue.keys
    redis_client.hset(keys.settings, "max_events", 8)  # so that events are trimmed
    client.submit("x", job_id="doomed", n=n, meta={"owner": "me"}, batch="b", stream=True, deadline_s=3600.0)
    claimed = engine.claim_one()
    for position in range(24):
        for index in [None] if n == 1 else range(n):
            event = Event(offset=position, token_ids=[position], text="y", index=index)
            assert engine.append(claimed, position, [position], event, index) == "ok"
    next(client.stream("doomed"))  # marks it as watched
    engine.finish(claimed, state=state)
    assert client.get("doomed").state == state
    client.delete("doomed")
    left = sorted(key.decode() for key in redis_client.scan_iter(f"{keys.prefix}*") if b"doomed" in key)
    assert left == []
    assert redis_client.zscore(keys.dead, "doomed") is None
    assert client.batch_status("b").total == 1, "what was counted stays counted"
    assert client.list_jobs(state) == []
    for look in (client.get, client.wait, client.cancel, client.retry, client.position, client.delete):
        with pytest.raises(JobNotFound):
            look("doomed")
    with pytest.raises(JobNotFound):
        list(client.stream("doomed"))


def test_a_job_that_has_not_ended_stays(client: Client, engine: Engine) -> None:
    client.submit("x", job_id="running")
    claimed = engine.claim_one()
    client.submit("x", job_id="queued")
    client.submit("x", job_id="delayed", delay_s=3600.0)
    for state in ("running", "queued", "delayed"):
        with pytest.raises(QueueError, match=f"'{state}' is {state}: only a job that has ended .*cancel it first"):
            client.delete(state)
        assert client.get(state).state == state
    engine.finish(claimed)
    assert client.delete_many(["running", "queued", "nobody", "\udcff"]) == {
        "running": "deleted",
        "queued": "queued",
        "nobody": "unknown",
        "\udcff": "unknown",
    }


def test_the_late_writes_of_an_engine_do_not_bring_a_deleted_job_back(client: Client, engine: Engine) -> None:
    client.submit("x", job_id="a")
    claimed = engine.claim_one()
    engine.finish(claimed)
    client.delete("a")
    assert engine.finish(claimed) == "stale"
    assert engine.append(claimed, 0, [1], Event(offset=0, token_ids=[1], text="y")) == "stale"
    assert engine.begin(claimed) == "stale"
    engine.beat()
    with pytest.raises(JobNotFound):
        client.get("a")


def test_a_job_under_a_deleted_id_is_a_new_one(redis_url: str, redis_client: redis.Redis, queue_name: str) -> None:
    queue = f"{queue_name}-again"  # its feed of completions has the id twice
    engine = Engine(JobQueue(redis_client, queue))
    with Client(redis_url, queue) as client:
        client.submit("x", job_id="a")
        engine.finish(engine.claim_one())
        client.delete("a")
        client.submit("another request", job_id="a")
        engine.finish(engine.claim_one())
        assert [job.state for job in client.as_completed(["a"], 5)] == ["finished"]


def test_jobs_can_be_deleted_from_a_full_server(client: Client, engine: Engine, redis_client: redis.Redis) -> None:
    client.submit("x" * 100_000, job_id="a")
    client.cancel("a")
    redis_client.config_set("maxmemory", 1)
    try:
        client.delete("a")
    finally:
        redis_client.config_set("maxmemory", 0)
