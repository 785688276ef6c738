from __future__ import annotations

import asyncio
import gc
import math
from contextlib import aclosing
from typing import Any

import pytest
import redis

from millrace import AsyncClient, Client, GenerationRequest, InvalidRequest, QueueFull
from millrace.results.errors import (
    BatchNotFound,
    CannotRedrive,
    JobConflict,
    JobNotFound,
    QueueError,
    RedisUnavailable,
    WaitTimeout,
)
from millrace.results.messages import Event
from millrace.results.queue import JobQueue
from tests.results.engines import Engine


@pytest.fixture
def url_and_queue(redis_url: str, queue_name: str) -> tuple[str, str]:
    return redis_url, queue_name


async def test_the_whole_life_of_a_job(url_and_queue: tuple[str, str], engine: Engine) -> None:
    async with AsyncClient(*url_and_queue) as client:
        job_id = await client.submit("x", max_tokens=5, stream=True)
        assert (await client.get(job_id)).state == "queued"
        assert (await client.stats()).queued == 1
        assert [job.state for job in await client.list_jobs("queued")] == ["queued"]
        waiting = asyncio.create_task(client.wait(job_id, 60))
        claimed = await asyncio.to_thread(engine.claim_one)
        await asyncio.to_thread(engine.show, claimed, 0, [1], "a")
        events = client.stream(job_id)
        first = await anext(events)
        await asyncio.to_thread(engine.finish, claimed, Event(offset=1, token_ids=[2], text="b"))
        assert [first.text, *[event.text async for event in events]] == ["a", "b", ""]
        assert (await waiting).text == "ab"
        assert [event.text async for event in client.stream(job_id, after=first.id)] == ["b", ""]


async def test_a_stream_can_send_keep_alive_messages(url_and_queue: tuple[str, str], engine: Engine) -> None:
    async with AsyncClient(*url_and_queue) as client:
        job_id = await client.submit("x", stream=True)
        claimed = await asyncio.to_thread(engine.claim_one)
        await asyncio.to_thread(engine.show, claimed, 0, [1], "a")
        sent: list[str] = []
        last = None
        while sent[-1:] != [""]:
            try:
                async with aclosing(client.stream(job_id, after=last, timeout_s=0.05)) as events:
                    async for event in events:
                        last = event.id
                        sent.append(event.text)
            except WaitTimeout:
                sent.append("keep alive")
                await asyncio.to_thread(engine.finish, claimed, Event(offset=1, token_ids=[2], text="b"))
        assert sent == ["a", "keep alive", "b", ""]


async def test_every_candidate_of_a_job(url_and_queue: tuple[str, str], engine: Engine) -> None:
    async with AsyncClient(*url_and_queue) as client:
        job_id = await client.submit("x", n=2)
        claimed = await asyncio.to_thread(engine.claim_one)
        ends = [Event(offset=0, token_ids=[1], text=text, index=index) for index, text in enumerate("ab")]
        await asyncio.to_thread(engine.finish, claimed, *ends, reasons=["stop", "length"])
        outputs = (await client.wait(job_id, 60)).outputs
        assert [(one.text, one.finish_reason) for one in outputs] == [("a", "stop"), ("b", "length")]
        assert [(event.index, event.text) async for event in client.stream(job_id)] == [(0, "a"), (1, "b"), (0, "")]


async def test_many_jobs_at_once(url_and_queue: tuple[str, str], engine: Engine) -> None:
    async with AsyncClient(*url_and_queue) as client:
        ids = await client.submit_many(GenerationRequest(prompt="x") for _ in range(600))

        async def collect() -> list[str]:
            return [job.id async for job in client.as_completed(ids, timeout_s=60)]

        collecting = asyncio.create_task(collect())
        for _ in range(3):
            for job in await asyncio.to_thread(engine.claim):
                await asyncio.to_thread(engine.finish, job)
        assert sorted(await collecting) == sorted(ids)


async def test_thousands_can_be_waited_for_at_once_on_few_connections(
    url_and_queue: tuple[str, str], engine: Engine, redis_client: redis.Redis
) -> None:
    before = {one["id"] for one in redis_client.client_list()}
    async with AsyncClient(*url_and_queue) as client:
        ids = await asyncio.gather(*[client.submit("x") for _ in range(1000)])
        waiting = [asyncio.create_task(client.wait(job_id, 60)) for job_id in ids]
        num_ended = 0
        while num_ended < len(ids):
            for job in await asyncio.to_thread(engine.claim):
                await asyncio.to_thread(engine.finish, job)
                num_ended += 1
            assert len({one["id"] for one in redis_client.client_list()} - before) < 80
        assert [job.state for job in await asyncio.gather(*waiting)] == ["finished"] * len(ids)


async def test_a_bad_request_among_many_is_named_with_what_is_in_the_queue(url_and_queue: tuple[str, str]) -> None:
    requests: list[Any] = [*(GenerationRequest(id=f"j{i}", prompt="x") for i in range(300)), None]
    async with AsyncClient(*url_and_queue) as client:
        with pytest.raises(InvalidRequest, match=r"requests\[300\]; no jobs of this call"):
            await client.submit_many(requests)
        assert (await client.stats()).queued == 0
        with pytest.raises(InvalidRequest, match=r"requests\[300\]; 300 jobs of this call") as caught:
            await client.submit_many(iter(requests))
        assert len(caught.value.job_ids) == (await client.stats()).queued == 300
        with pytest.raises(InvalidRequest, match=r"^requests: must be a list"):
            await client.submit_many(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("delay_s", value) for value in (-1, -0.001, math.nan, math.inf, 10**400, "5", True)],
        *[("deadline_s", value) for value in (0, -5, math.nan, math.inf, 10**400, "soon")],
        *[("run_at", value) for value in (-1, math.nan, 1.7e12, "2030-01-31")],
        *[("priority", value) for value in (1.5, "high", True, 2**31)],
        *[("tenant", value) for value in ("", "a b", "a:jobs", "é", "\ud800", "x" * 65, 5)],
        *[("batch", value) for value in ("", "a b", "a:b", "\ud800", "x" * 65, 5)],
        ("temperature", 10**400),
        ("meta", {"a": math.nan}),
    ],
    ids=lambda value: repr(value)[:20],
)
async def test_what_cannot_be_is_refused_by_its_field_before_anything_is_sent(field: str, value: Any) -> None:
    async with AsyncClient("redis://127.0.0.1:1") as away:
        with pytest.raises(InvalidRequest, match=rf"^{field}: ") as caught:
            await away.submit("x", **{field: value})
        assert caught.value.field == field


async def test_a_job_that_has_not_ended_cannot_be_run_again(url_and_queue: tuple[str, str], engine: Engine) -> None:
    async with AsyncClient(*url_and_queue) as client:
        await client.submit("x", job_id="a")
        with pytest.raises(CannotRedrive, match="'a' is queued: only a job that has failed, expired or been cancelled"):
            await client.retry("a")
        claimed = await asyncio.to_thread(engine.claim_one)
        with pytest.raises(CannotRedrive, match="'a' is running"):
            await client.retry("a")
        await asyncio.to_thread(engine.finish, claimed)
        with pytest.raises(CannotRedrive, match="'a' is finished"):
            await client.retry("a")
        assert (await client.stats()).queued == 0


async def test_a_full_queue_says_which_limit_and_what_got_in(
    url_and_queue: tuple[str, str], queue: JobQueue, redis_client: redis.Redis
) -> None:
    redis_client.hset(queue.keys.settings, "max_queued_jobs", 2)
    async with AsyncClient(*url_and_queue) as client:
        with pytest.raises(
            QueueFull, match=r"max_queued_jobs allows, 2; 2 jobs of this call are in the queue"
        ) as caught:
            await client.submit_many(GenerationRequest(id=f"j{i}", prompt="x") for i in range(4))
        assert (caught.value.job_ids, caught.value.refused) == (["j0", "j1"], ["j2", "j3"])


async def test_a_batch_that_is_named_twice_is_one_batch_and_a_job_stays_in_its_own(
    url_and_queue: tuple[str, str],
) -> None:
    async with AsyncClient(*url_and_queue) as client:
        for job_id in ("a", "b"):
            await client.submit("x", job_id=job_id, batch="nightly")
        assert await client.submit("x", job_id="a", batch="other") == "a"
        assert (await client.get("a")).batch == "nightly"
        assert (await client.batch_status("nightly")).total == 2
        with pytest.raises(BatchNotFound):
            await client.batch_status("other")


async def test_the_errors_are_those_of_the_client(url_and_queue: tuple[str, str]) -> None:
    async with AsyncClient(*url_and_queue) as client:
        job_id = await client.submit("x", job_id="a")
        with pytest.raises(JobConflict):
            await client.submit("y", job_id="a")
        with pytest.raises(InvalidRequest, match="max_tokens"):
            await client.submit("x", max_tokens=0)
        with pytest.raises(WaitTimeout):
            await client.wait(job_id, 0.05)
        with pytest.raises(WaitTimeout):
            await anext(client.as_completed([job_id], timeout_s=0.05))
        assert await client.cancel(job_id) == "cancelled"
        for call in (client.get, client.cancel, client.wait, lambda name: anext(client.stream(name))):
            with pytest.raises(JobNotFound):
                await call("nobody")
    async with AsyncClient("redis://127.0.0.1:1") as away:
        with pytest.raises(
            RedisUnavailable, match=r"Cannot connect to Redis at redis://127\.0\.0\.1:1/0: connection refused"
        ):
            await away.submit("x")


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_second_event_loop_is_refused(url_and_queue: tuple[str, str]) -> None:
    clients = [AsyncClient(*url_and_queue)]

    async def count() -> int:
        return (await clients[0].stats()).queued

    assert asyncio.run(count()) == 0
    with pytest.raises(QueueError, match="belongs to another event loop: make one for each"):
        asyncio.run(count())
    clients.clear()
    gc.collect()  # the socket of the first loop, which nobody can close any more


def test_help_on_a_method_is_that_of_the_sync_client() -> None:
    assert AsyncClient.wait.__doc__ == Client.wait.__doc__ is not None
