"""Times, limits, batches, retries and pauses, as a client says them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from millrace import (
    AsyncClient,
    BatchNotFound,
    CannotRedrive,
    Client,
    GenerationRequest,
    InvalidRequest,
    JobNotFound,
    QueueFull,
    SamplingParams,
    TenantStats,
)
from millrace.producer.wire import parse_body
from millrace.results.messages import JobError
from millrace.results.queue import JobQueue
from tests.processes import wait_until
from tests.results.engines import Engine


def requests(num_jobs: int, prefix: str = "j", **fields: Any) -> list[GenerationRequest]:
    return [GenerationRequest(id=f"{prefix}{i}", prompt="x", **fields) for i in range(num_jobs)]


def test_what_a_job_was_given_comes_back(client: Client, engine: Engine) -> None:
    meta = {"customer": "é", "rows": [1, None, {"a": 2.5}]}
    client.submit("x", job_id="a", delay_s=3600, deadline_s=7200, max_retries=0, meta=meta, batch="b")
    job = client.get("a")
    assert (job.state, job.meta, job.batch) == ("delayed", meta, "b")
    assert job.timings.due_ms == job.timings.created_ms + 3_600_000
    assert job.timings.deadline_ms == job.timings.created_ms + 7_200_000
    client.submit("x", job_id="past", run_at=1.0)
    assert client.get("past").state == "queued"
    request = parse_body(engine.claim_one().body)
    assert (request.run_at, request.meta) == (1.0, None)


def test_the_same_request_again_is_the_same_job_whatever_its_times(client: Client) -> None:
    for delay_s in (5, 5.0):
        client.submit("x", job_id="a", delay_s=delay_s, meta={"a": 1})
    assert client.stats().delayed == 1


def test_a_deadline_that_is_over_before_the_job_may_begin_is_refused_by_the_servers_clock(client: Client) -> None:
    late = GenerationRequest(id="late", prompt="x", run_at=9e9, deadline_s=5)
    with pytest.raises(InvalidRequest, match=r"^deadline_s: is over before job 'late' may start") as caught:
        client.submit_many([*requests(1), late, *requests(1, "k")])
    assert (caught.value.field, caught.value.index, caught.value.job_ids) == ("deadline_s", 1, ["j0", "k0"])
    assert (client.stats().queued, client.stats().delayed) == (2, 0)


def test_what_a_foreign_client_gave_a_job_hides_no_job(
    client: Client, queue: JobQueue, redis_client: redis.Redis
) -> None:
    client.submit("x", job_id="well", meta={"a": 1})
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    wrong = {"nan": b'{"a":NaN}', "list": b"[1]", "bytes": b'{"a":"\xff"}', "deep": deep}
    for job_id, meta in wrong.items():
        client.submit("x", job_id=job_id, meta={"a": 1})
        redis_client.set(queue.keys.prefix + "meta:" + job_id, meta)
    found = {job.id: job.meta for job in client.list_jobs("queued")}
    assert found == {"well": {"a": 1}, "nan": None, "list": None, "bytes": None, "deep": None}


def test_jobs_are_listed_by_state(client: Client, engine: Engine) -> None:
    client.submit_many(requests(100))
    for job in engine.claim(3):
        engine.finish(job, state="failed")
    assert [job.id for job in client.list_jobs("queued", 90)] == [f"j{i}" for i in range(3, 93)]
    assert {(job.id, job.state) for job in client.list_jobs("failed")} == {(f"j{i}", "failed") for i in range(3)}
    assert client.list_jobs("delayed") == []
    for wrong, field in (
        (("dead",), "state"),
        ((b"failed",), "state"),
        (("failed", 0), "limit"),
        (("queued", 10_001), "limit"),
    ):
        with pytest.raises(InvalidRequest, match=f"^{field}: must be"):
            client.list_jobs(*wrong)


@pytest.mark.parametrize("batch", ["", "a b", "a:b", "é", "x" * 65, 5])
def test_a_batch_has_a_proper_name(client: Client, batch: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^batch: "):
        client.submit_many(requests(1), batch=batch)


def test_a_full_queue_says_which_limit_and_what_got_in(
    client: Client, queue: JobQueue, redis_client: redis.Redis
) -> None:
    redis_client.hset(queue.keys.settings, "max_queued_jobs", 300)
    sent = iter(requests(1000))
    with pytest.raises(
        QueueFull, match=r"max_queued_jobs allows, 300; 300 jobs of this call are in the queue"
    ) as caught:
        client.submit_many(sent)
    error = caught.value
    assert (error.limit, error.value, len(error.job_ids)) == ("max_queued_jobs", "300", 300)
    assert error.refused == [f"j{i}" for i in range(300, 512)]
    assert next(sent).id == "j512", "nothing more is taken"
    with pytest.raises(QueueFull, match=r"the queue has as many jobs waiting as max_queued_jobs allows, 300\. Submit"):
        client.submit("x", job_id="one-more")
    with pytest.raises(JobNotFound):
        client.get("one-more")
    redis_client.hdel(queue.keys.settings, "max_queued_jobs")
    assert len(client.submit_many(requests(1000))) == 1000


@pytest.mark.parametrize("has_forgotten", [False, True])
def test_the_second_half_of_a_batch_is_taken_while_the_server_works_on_the_first(
    client: Client, redis_client: redis.Redis, redis_url: str, queue_name: str, has_forgotten: bool
) -> None:
    if has_forgotten:
        redis_client.script_flush()
    else:
        client.submit_many(requests(1, "before"))
    with Client(redis_url, queue=queue_name) as other:

        def sent() -> Iterator[GenerationRequest]:
            yield from requests(128)
            wait_until(lambda: other.stats().queued >= 128, 20)
            yield from requests(200, "second")

        assert len(client.submit_many(sent())) == 328


def test_a_job_for_which_there_never_is_room_is_refused_and_costs_the_others_nothing(
    client: Client, queue: JobQueue, redis_client: redis.Redis
) -> None:
    redis_client.hset(queue.keys.settings, "max_queued_tokens", 50)
    told = r"^max_tokens: .* job 'large' are more tokens than the queue's limit max_queued_tokens, 50; ask for"
    large = GenerationRequest(id="large", prompt="x", sampling=SamplingParams(max_tokens=100))
    with pytest.raises(InvalidRequest, match=told):
        client.submit("x", job_id="large", max_tokens=100)
    with pytest.raises(InvalidRequest, match=told) as caught:
        client.submit_many([*requests(1, "a"), large, *requests(1, "b")])
    assert (caught.value.index, caught.value.job_ids) == (1, ["a0", "b0"])


def test_an_id_that_got_in_once_is_named_although_it_conflicts_later(
    client: Client, queue: JobQueue, redis_client: redis.Redis
) -> None:
    redis_client.hset(queue.keys.settings, "max_queued_jobs", 1)
    same, other = GenerationRequest(id="a", prompt="x"), GenerationRequest(id="a", prompt="y")
    with pytest.raises(QueueFull) as caught:
        client.submit_many([same, other, GenerationRequest(id="b", prompt="x")])
    assert (caught.value.job_ids, caught.value.refused) == (["a"], ["b"])


def test_two_producers_that_use_one_batch_name_share_the_batch(client: Client, redis_url: str, queue_name: str) -> None:
    client.submit_many(requests(3), batch="nightly")
    client.submit_many(requests(3), batch="nightly")
    with Client(redis_url, queue_name) as other:
        other.submit_many(requests(2, "other-"), batch="nightly")
        assert other.batch_status("nightly").total == 5
    with pytest.raises(BatchNotFound, match="'daily'"):
        client.batch_status("daily")


def test_many_jobs_and_whole_batches_are_cancelled_at_once(client: Client, engine: Engine) -> None:
    client.submit_many(requests(1200), batch="b")
    running = engine.claim_one()
    outcomes = client.cancel_batch("b")
    assert outcomes.pop(running.job_id) == "cancelling"
    assert set(outcomes.values()) == {"cancelled"}
    assert len(outcomes) == 1199
    assert client.cancel_many(["j5", "nobody"]) == {"j5": "cancelled", "nobody": "unknown"}
    with pytest.raises(BatchNotFound):
        client.cancel_batch("nothing")


def test_failed_jobs_are_retried_one_by_one_or_all_at_once(client: Client, engine: Engine) -> None:
    client.submit_many(requests(700))
    for job in engine.claim(700)[:600]:
        engine.finish(job, state="failed")
    assert client.retry("j0") == "j0.r1"
    with pytest.raises(CannotRedrive, match="'j650' is running"):
        client.retry("j650")
    with pytest.raises(JobNotFound):
        client.retry("nobody")
    retried = client.retry_all()
    assert retried == {f"j{i}": f"j{i}.r1" for i in range(1, 600)}
    assert client.retry_all() == {}
    assert client.stats().queued == 600


def test_the_jobs_of_a_batch_without_a_result_are_run_again(client: Client, engine: Engine) -> None:
    client.submit_many(requests(700), batch="b")
    client.submit("x", job_id="other")
    client.cancel("other")
    finished, failed, invalid, *_ = engine.claim(4)  # the fourth runs on
    engine.finish(finished)
    engine.finish(failed, state="failed")
    engine.finish(invalid, state="failed", error=JobError(kind="invalid_request", message="too long"))
    client.cancel_many([f"j{i}" for i in range(4, 700)])
    retried = client.retry_batch("b")
    assert retried == {f"j{i}": f"j{i}.r1" for i in range(1, 700) if i not in (2, 3)}
    assert retried.left_out == ["j2"]
    assert client.retry_batch("b") == retried
    status = client.batch_status("b")
    assert (status.total, status.queued, status.cancelled) == (1397, 697, 696)
    with pytest.raises(BatchNotFound):
        client.retry_batch("nothing")


def test_what_fails_again_meanwhile_is_not_retried_by_the_same_call(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit_many(requests(3))
    send_many = client._transport.send_many

    def send_and_fail(commands: Any) -> list[Any]:
        answers = send_many(commands)
        for job in engine.claim():
            engine.finish(job, state="failed")
        return answers

    monkeypatch.setattr(client._transport, "send_many", send_and_fail)
    send_and_fail([])
    assert client.retry_all() == {f"j{n}": f"j{n}.r1" for n in range(3)}
    assert client.retry_all() == {f"j{n}.r1": f"j{n}.r2" for n in range(3)}


def test_a_paused_queue_takes_jobs_in_and_gives_none_out(client: Client, engine: Engine) -> None:
    client.pause()
    client.pause()
    client.submit("x", job_id="a")
    assert engine.claim_ids() == []
    assert client.stats().is_paused
    client.resume()
    assert engine.claim_ids() == ["a"]


def test_a_client_knows_the_place_of_a_job(client: Client) -> None:
    client.submit_many(requests(10))
    place = client.position("j7")
    assert (place.state, place.num_ahead, place.eta_s) == ("queued", 7, None)


async def test_the_async_client_has_all_of_it(redis_url: str, queue_name: str, engine: Engine) -> None:
    async with AsyncClient(redis_url, queue_name) as client:
        await client.submit_many(requests(5), batch="b")
        await client.submit("x", job_id="one", batch="b", delay_s=60)
        assert (await client.batch_status("b")).total == 6
        assert (await client.position("j3")).num_ahead == 3
        engine.finish(engine.claim_one(), state="failed")
        assert await client.retry("j0") == "j0.r1"
        engine.finish(engine.claim_one(), state="failed")
        assert await client.retry_all() == {"j1": "j1.r1"}
        assert await client.retry_batch("b") == {"j0": "j0.r1", "j1": "j1.r1"}
        assert list((await client.tenants()).items()) == [("default", TenantStats(waiting_jobs=6, waiting_tokens=102))]
        await client.set_settings({"max_events": 4})
        await client.set_settings({"max_events": None, "result_ttl_ms": 60_000})
        assert await client.settings() == {"result_ttl_ms": "60000"}
        await client.pause()
        assert (await client.stats()).is_paused
        await client.resume()
        assert len(await client.cancel_batch("b")) == 8
        assert await client.cancel_many(["nobody"]) == {"nobody": "unknown"}
