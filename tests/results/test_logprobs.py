"""Log-probabilities beside the tokens: in the checkpoint, in events and behind a trimmed stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import redis

from millrace import Client
from millrace.results.logprobs import LazyJson, Logprob, encode_token, join_lines, join_tokens
from millrace.results.messages import Append, ClaimedJob, Event, NewOutput, Release, Usage
from tests.results.engines import Engine, finish_of, submit
from tests.results.full_queue import FullQueue


def line(token_id: int) -> bytes:
    return encode_token([(token_id, -token_id / 8, 2, f"t{token_id}"), (token_id + 1, -0.125, 1, None)])


def lines(*token_ids: int) -> list[bytes]:
    return [line(token_id) for token_id in token_ids]


def saved(*token_ids: int) -> LazyJson:
    return LazyJson(lambda: join_lines(lines(*token_ids)), 60)


def read(*token_ids: int) -> list[dict[int, Logprob]]:
    """What a reader gets of these tokens."""
    return [{each: Logprob(-each / 8, 2, f"t{each}"), each + 1: Logprob(-0.125, 1)} for each in token_ids]


def event(offset: int, token_ids: list[int], index: int | None = None) -> Event:
    text = "".join(map(str, token_ids))
    logprobs = LazyJson(lambda: join_tokens(lines(*token_ids)), 60)
    return Event(offset=offset, token_ids=token_ids, text=text, index=index, logprobs=logprobs)


def append(
    engine: Engine, job: ClaimedJob, offset: int, token_ids: list[int], index: int | None = None, *, shows: bool = False
) -> str:
    output = NewOutput(
        offset=offset,
        token_ids=token_ids,
        event=event(offset, token_ids, index) if shows else None,
        index=index,
        logprobs=saved(*token_ids),
    )
    write = Append(job_id=job.job_id, lease=job.lease, fingerprint=engine.fingerprint, outputs=[output])
    return engine.queue.write([write])[0]


def keys(queue: FullQueue, client: redis.Redis) -> Sequence[bytes]:
    found: Any = client.keys(queue.keys.prefix + "logprobs:*")
    return sorted(found)


def test_a_checkpoint_has_one_line_for_each_token_however_often_it_is_written(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "a")
    job = engine.claim_one()
    for offset, token_ids in ((0, [1, 2]), (0, [1, 2]), (1, [2, 3]), (0, [1]), (2, [3, 4, 5])):
        assert append(engine, job, offset, token_ids) == "ok"
    more = NewOutput(offset=4, token_ids=[5, 6], logprobs=saved(5, 6))
    release = Release(job_id=job.job_id, lease=job.lease, fingerprint=engine.fingerprint, outputs=[more])
    assert queue.write([release]) == ["ok"]
    again = engine.claim_one()
    assert (again.checkpoints[0].token_ids, again.logprobs) == ([1, 2, 3, 4, 5, 6], [lines(1, 2, 3, 4, 5, 6)])
    assert engine.finish(again, event(0, [1, 2, 3, 4, 5, 6])) == "ok"
    assert keys(queue, redis_client) == []
    output = queue.get("a").outputs[0]
    assert output.logprobs == read(1, 2, 3, 4, 5, 6)
    assert output.cumulative_logprob == pytest.approx(-21 / 8)


def test_each_candidate_has_its_own(queue: FullQueue, engine: Engine, redis_client: redis.Redis) -> None:
    submit(queue, "a", n=3)
    job = engine.claim_one()
    append(engine, job, 0, [1, 2], 0, shows=True)
    append(engine, job, 0, [5], 2)
    engine.die()
    other = Engine(queue)
    assert queue.recover()
    claimed = other.claim_one()
    assert claimed.logprobs == [lines(1, 2), [], lines(5)]
    assert [one.token_ids for one in claimed.checkpoints] == [[1, 2], [], [5]]
    other.finish(claimed, event(0, [7], 1), event(0, [5, 6], 2), reasons=["stop"] * 3)
    assert [one.logprobs for one in queue.get("a").outputs] == [read(1, 2), read(7), read(5, 6)]
    assert keys(queue, redis_client) == []


@pytest.mark.parametrize("n", [1, 2])
def test_a_trimmed_stream_keeps_them(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis, redis_url: str, n: int
) -> None:
    redis_client.hset(queue.keys.settings, "max_events", 4)
    submit(queue, "a", n=n)
    job = engine.claim_one()
    for token_id in range(7):
        append(engine, job, token_id, [token_id], None if n == 1 else 0, shows=True)
        if n == 2:
            append(engine, job, token_id, [token_id + 20], 1, shows=True)
    engine.finish(job, reasons=["stop"] * n if n > 1 else [])
    expected = [read(*range(7)), read(*range(20, 27))][:n]
    outputs = queue.get("a").outputs
    assert redis_client.hget(queue.keys.job("a"), "trimmed")
    assert [one.logprobs for one in outputs] == expected
    assert [redis_client.pttl(key) > 0 for key in keys(queue, redis_client)] == [True] * n
    with Client(redis_url, queue=queue.keys.queue) as client:
        events = [one for one in client.stream("a") if one.state is None]
    for index in range(n):
        assert [each for one in events if one.index == index for each in one.logprobs or []] == expected[index]


def test_those_of_another_model_are_dropped(queue: FullQueue, engine: Engine, redis_client: redis.Redis) -> None:
    submit(queue, "a")
    append(engine, engine.claim_one(), 0, [1, 2])
    engine.die()
    queue.recover()
    claimed = Engine(queue, fingerprint="model-b").claim_one()
    assert (claimed.checkpoints[0].token_ids, claimed.logprobs, keys(queue, redis_client)) == ([], [], [])


def test_those_of_the_prompt_and_the_time_of_the_first_token_are_in_the_terminal_entry(
    queue: FullQueue, engine: Engine
) -> None:
    submit(queue, "a")
    job = engine.claim_one()
    submit(queue, "b")
    finish = finish_of(job, Event(offset=0, token_ids=[1], text="x"), usage=Usage(prompt_tokens=3, completion_tokens=1))
    prompt = LazyJson(lambda: join_tokens([b"null", *lines(4, 5)]), 60)
    assert queue.write([msgspec.structs.replace(finish, prompt_logprobs=prompt, first_token_s=time.monotonic())]) == [
        "ok"
    ]
    done = queue.get("a")
    assert done.prompt_logprobs == [None, *read(4, 5)]
    assert done.outputs[0].logprobs is None and done.outputs[0].cumulative_logprob is None
    started, first, ended = done.timings.started_ms, done.timings.first_token_ms, done.timings.ended_ms
    assert started is not None and first is not None and ended is not None
    assert started <= first <= ended
    timings = done.timings
    parts = (timings.queued_s, timings.prefill_s, timings.decode_s)
    assert timings.total_s == (ended - timings.created_ms) / 1000 == pytest.approx(sum(part or 0 for part in parts))
    assert queue.get("b").timings.queued_s is None


def test_a_job_without_them_has_no_key_and_no_field(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "a")
    job = engine.claim_one()
    engine.show(job, 0, [1], "x")
    engine.append(job, 1, [2])
    assert keys(queue, redis_client) == []
    engine.finish(job, Event(offset=1, token_ids=[2], text="y"))
    stream: Any = redis_client.xrange(queue.keys.result("a"))
    assert not any(b"logprob" in name for _, fields in stream for name in fields)
