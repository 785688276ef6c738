"""What no job, batch, engine or event can be named is told as what is not there, by both clients alike."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millrace import AsyncClient, BatchNotFound, Client, EngineNotFound, InvalidRequest, JobNotFound

Verb = Callable[[Any, Any], Any]

JOB_VERBS: dict[str, Verb] = {
    "get": lambda client, job_id: client.get(job_id),
    "wait": lambda client, job_id: client.wait(job_id, 1),
    "stream": lambda client, job_id: client.stream(job_id),
    "as_completed": lambda client, job_id: client.as_completed([job_id], 1),
    "position": lambda client, job_id: client.position(job_id),
    "cancel": lambda client, job_id: client.cancel(job_id),
    "retry": lambda client, job_id: client.retry(job_id),
    "delete": lambda client, job_id: client.delete(job_id),
}
BATCH_VERBS: dict[str, Verb] = {
    "batch_status": lambda client, batch: client.batch_status(batch),
    "cancel_batch": lambda client, batch: client.cancel_batch(batch),
    "retry_batch": lambda client, batch: client.retry_batch(batch),
    "delete_batch": lambda client, batch: client.delete_batch(batch),
}
ENGINE_VERBS: dict[str, Verb] = {
    "sleep": lambda client, engine_id: client.sleep(engine_id=engine_id),
    "reset_prefix_cache": lambda client, engine_id: client.reset_prefix_cache(engine_id=engine_id),
    "wake": lambda client, engine_id: client.wake(engine_id=engine_id),
}
KINDS = [(JOB_VERBS, "job_id", JobNotFound), (BATCH_VERBS, "batch", BatchNotFound)]
KINDS += [(ENGINE_VERBS, "engine_id", EngineNotFound)]
CASES = [(verb, field, error) for verbs, field, error in KINDS for verb in verbs.values()]
NAMES = [name for verbs, _, _ in KINDS for name in verbs]

NOBODY = ["\ud800", "\udcff", "", "nobody\n", "é", "x" * 200]
NOT_A_STRING = [5, b"bytes", ["a"], 1.5, object()]


@pytest.fixture(params=[Client, AsyncClient], ids=["sync", "async"])
def call(request: pytest.FixtureRequest, redis_url: str, queue_name: str) -> Callable[[Verb, Any], Awaitable[Any]]:
    """Runs a verb to its end, or its first element, with the one client or the other."""

    async def run(verb: Verb, value: Any) -> Any:
        if request.param is Client:
            with Client(redis_url, queue_name) as client:
                found = verb(client, value)
                return next(found) if hasattr(found, "__next__") else found
        async with AsyncClient(redis_url, queue_name) as other:
            found = verb(other, value)
            return await (anext(found) if hasattr(found, "__anext__") else found)

    return run


@pytest.mark.parametrize(("verb", "field", "error"), CASES, ids=NAMES)
async def test_a_name_that_nothing_can_have_is_not_there(
    call: Callable[[Verb, Any], Awaitable[Any]], verb: Verb, field: str, error: type[Exception]
) -> None:
    for name in NOBODY:
        with pytest.raises(error) as caught:
            await call(verb, name)
        str(caught.value).encode()  # can be printed


@pytest.mark.parametrize(("verb", "field", "error"), CASES, ids=NAMES)
async def test_what_is_not_a_string_is_named(
    call: Callable[[Verb, Any], Awaitable[Any]], verb: Verb, field: str, error: type[Exception]
) -> None:
    for value in NOT_A_STRING + ([] if field == "engine_id" else [None]):
        with pytest.raises(InvalidRequest, match=rf"^job_ids?: must be a string, got|^{field}: must be a string, got"):
            await call(verb, value)


async def test_of_many_ids_the_impossible_ones_are_unknown(call: Callable[[Verb, Any], Awaitable[Any]]) -> None:
    await call(lambda client, job_id: client.submit("x", job_id=job_id), "a")
    cancel_many: Verb = lambda client, job_ids: client.cancel_many(job_ids)  # noqa: E731
    assert list((await call(cancel_many, ["\ud800", "a", "a b", "nobody"])).items()) == [
        ("\ud800", "unknown"),
        ("a", "cancelled"),
        ("a b", "unknown"),
        ("nobody", "unknown"),
    ]
    for verb in (cancel_many, lambda client, job_ids: client.as_completed(job_ids)):
        for wrong in ("nobody", None, 5, [None], ["a", 5]):
            with pytest.raises(InvalidRequest, match=r"^job_ids: must be a "):
                await call(verb, wrong)


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, -(10**400), "5", True])
async def test_a_time_to_wait_is_a_number(call: Callable[[Verb, Any], Awaitable[Any]], value: Any) -> None:
    for verb in (
        lambda client, timeout_s: client.wait("a", timeout_s),
        lambda client, timeout_s: client.as_completed(["a"], timeout_s),
    ):
        with pytest.raises(InvalidRequest, match=r"^timeout_s: must be a number of seconds up to 1e\+10, or None"):
            await call(verb, value)


@pytest.mark.parametrize("value", ["yesterday", "1-", "٣", "\ud800", 5, "1" * 30, f"{2**64}-0", f"0-{2**64}"])
async def test_an_event_to_go_on_from_is_one(call: Callable[[Verb, Any], Awaitable[Any]], value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^after: must be "):
        await call(lambda client, after: client.stream("a", after=after), value)


@pytest.mark.parametrize("value", [0, 3, True, 1.0, "1", None])
async def test_a_level_of_sleep_is_1_or_2(call: Callable[[Verb, Any], Awaitable[Any]], value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^level: must be an integer from 1 to 2"):
        await call(lambda client, level: client.sleep(level), value)
