from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace import AsyncClient, GenerationRequest, InvalidRequest
from results.errors import JobConflict, JobNotFound, RedisUnavailable, WaitTimeout
from results.messages import Event
from tests.results.engines import Engine


@pytest.fixture
def url_and_queue(redis_url: str, queue_name: str) -> tuple[str, str]:
    return redis_url, queue_name


async def test_the_whole_life_of_a_job(url_and_queue: tuple[str, str], engine: Engine) -> None:
    async with AsyncClient(*url_and_queue) as client:
        job_id = await client.submit("x", max_tokens=5, stream=True)
        assert (await client.get(job_id)).state == "queued"
        assert (await client.stats()).queued == 1
        waiting = asyncio.create_task(client.wait(job_id, 10))
        claimed = await asyncio.to_thread(engine.claim_one)
        await asyncio.to_thread(engine.show, claimed, 0, [1], "a")
        events = client.stream(job_id)
        first = await anext(events)
        await asyncio.to_thread(engine.finish, claimed, Event(offset=1, token_ids=[2], text="b"))
        assert [first.text, *[event.text async for event in events]] == ["a", "b", ""]
        assert (await waiting).text == "ab"
        assert [event.text async for event in client.stream(job_id, after=first.id)] == ["b", ""]


async def test_many_jobs_at_once(url_and_queue: tuple[str, str], engine: Engine) -> None:
    async with AsyncClient(*url_and_queue) as client:
        ids = await client.submit_many(GenerationRequest(prompt="x") for _ in range(600))

        async def collect() -> list[str]:
            return [job.id async for job in client.as_completed(ids, timeout_s=30)]

        collecting = asyncio.create_task(collect())
        for _ in range(3):
            for job in await asyncio.to_thread(engine.claim):
                await asyncio.to_thread(engine.finish, job)
        assert sorted(await collecting) == sorted(ids)


async def test_hundreds_can_be_waited_for_at_once(url_and_queue: tuple[str, str], engine: Engine) -> None:
    async with AsyncClient(*url_and_queue) as client:
        ids = await client.submit_many(GenerationRequest(prompt="x") for _ in range(200))
        waiting = [asyncio.create_task(client.wait(job_id, 30)) for job_id in ids]
        for job in await asyncio.to_thread(engine.claim):
            await asyncio.to_thread(engine.finish, job)
        assert [job.state for job in await asyncio.gather(*waiting)] == ["finished"] * 200


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
        with pytest.raises(RedisUnavailable, match="cannot be reached"):
            await away.submit("x")
