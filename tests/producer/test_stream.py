from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import redis

from millrace import Client, InvalidRequest, WaitTimeout
from millrace.results.errors import ResultExpired
from millrace.results.job import StreamEvent
from millrace.results.messages import ClaimedJob, Event, JobError, Signal, ToolCall, Usage
from millrace.results.queue import JobQueue
from millrace.results.reader import MAX_ENTRIES, EventFollower
from millrace.results.transport import Call, Reply, Transport
from tests.processes import wait_until
from tests.results.chats import show_chat
from tests.results.engines import Engine


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def text_of(events: list[StreamEvent]) -> str:
    return "".join(event.text for event in events)


def result_of(
    call: Call[list[StreamEvent]], transport: Transport, answers: list[Reply] | None = None
) -> list[StreamEvent]:
    """Run a call, which has been started where `answers` are given."""
    try:
        to_send = call.send(answers) if answers else next(call)
        while True:
            to_send = call.send(transport.send_many(to_send))
    except StopIteration as end:
        events: list[StreamEvent] = end.value
        return events


def run(engine: Engine, num_events: int) -> str:
    """Run the one queued job with so many events and the rest at its end; returns the text."""
    claimed = engine.claim_one()
    for i in range(num_events):
        engine.show(claimed, i, [i], f"é{i} ")
    engine.finish(claimed, Event(offset=num_events, token_ids=[num_events], text="end"))
    return engine.queue.get(claimed.job_id).text


def test_a_stream_of_a_job_that_has_ended_is_its_text_and_its_end(client: Client, engine: Engine) -> None:
    job_id = client.submit("x")
    text = run(engine, 3)
    events = list(client.stream(job_id))
    assert text_of(events) == text == "é0 é1 é2 end"
    assert [event.offset for event in events] == [0, 1, 2, 3, 4]
    assert list(itertools.chain.from_iterable(event.token_ids for event in events)) == [0, 1, 2, 3]
    assert [event.state for event in events] == [None, None, None, None, "finished"]
    assert (events[-1].text, events[-1].token_ids) == ("", [])


def test_a_stream_whose_time_is_over_says_so(client: Client, engine: Engine, redis_client: redis.Redis) -> None:
    job_id = client.submit("x")
    run(engine, 3)
    result = engine.queue.keys.result(job_id)
    redis_client.rename(result, f"elsewhere-{result}")
    with pytest.raises(ResultExpired, match="has ended, and its result has expired"):
        list(client.stream(job_id))
    assert client.get(job_id).state == "finished"
    redis_client.rename(f"elsewhere-{result}", result)


def test_a_stream_whose_time_is_over_in_the_middle_says_so(
    client: Client, engine: Engine, redis_client: redis.Redis
) -> None:
    """And does not end as if it were complete: a slow reader has to know."""
    job_id = client.submit("x")
    run(engine, MAX_ENTRIES + 10)
    result = engine.queue.keys.result(job_id)
    events = client.stream(job_id)
    assert next(events).offset == 0
    redis_client.rename(result, f"elsewhere-{result}")
    with pytest.raises(ResultExpired, match="has ended, and its result has expired"):
        list(events)
    redis_client.rename(f"elsewhere-{result}", result)
    last = list(client.stream(job_id))[-1].id
    assert list(client.stream(job_id, after=last)) == []


def test_a_stream_of_a_job_that_nobody_watched_is_one_event_and_the_end(client: Client, engine: Engine) -> None:
    job_id = client.submit("x")
    text = run(engine, 0)
    assert [event.text for event in client.stream(job_id)] == [text, ""]


def test_a_live_stream_follows_the_job_to_its_end(client: Client, engine: Engine, pool: ThreadPoolExecutor) -> None:
    job_id = client.submit("x", stream=True)
    events = client.stream(job_id)
    first = pool.submit(next, events)
    claimed = engine.claim_one()
    engine.show(claimed, 0, [5], "a")
    assert first.result().text == "a"
    second = pool.submit(next, events)
    engine.show(claimed, 1, [6], "b")
    assert second.result().text == "b"
    rest = pool.submit(list, events)
    engine.finish(claimed, Event(offset=2, token_ids=[7], text="c"))
    assert [event.text for event in rest.result()] == ["c", ""]


def test_reading_live_tells_the_engine_once_and_its_heartbeats_from_then_on(
    client: Client, engine: Engine, queue: JobQueue, pool: ThreadPoolExecutor
) -> None:
    job_id = client.submit("x")
    claimed = engine.claim_one()
    assert not claimed.is_watched
    readers = [pool.submit(list, client.stream(job_id)) for _ in range(2)]
    assert queue.wait_for_signal(engine.id, 5, include_wake=False) == Signal(kind="watch", job_id=claimed.job_id)
    assert engine.beat().watched == [job_id]
    assert queue.wait_for_signal(engine.id, 0.05, include_wake=False) is None
    engine.finish(claimed, Event(offset=0, token_ids=[1], text="x"))
    assert [text_of(reader.result()) for reader in readers] == ["x", "x"]


def test_a_job_that_is_watched_before_it_runs_is_claimed_as_watched(
    client: Client, engine: Engine, queue: JobQueue, redis_client: redis.Redis, pool: ThreadPoolExecutor
) -> None:
    job_id = client.submit("x")
    reader = pool.submit(list, client.stream(job_id))
    while not redis_client.exists(queue.keys.prefix + "watched:" + job_id):
        pass
    claimed = engine.claim_one()
    assert claimed.is_watched
    engine.finish(claimed)
    assert [event.state for event in reader.result()] == ["finished"]


def test_reading_what_has_ended_watches_nothing(
    client: Client, engine: Engine, queue: JobQueue, redis_client: redis.Redis
) -> None:
    job_id = client.submit("x")
    run(engine, 1)
    list(client.stream(job_id))
    assert not redis_client.exists(queue.keys.prefix + "watched:" + job_id)


def test_a_stream_can_be_resumed_after_each_of_its_events(client: Client, engine: Engine) -> None:
    job_id = client.submit("x")
    run(engine, 5)
    events = list(client.stream(job_id))
    for i, event in enumerate(events):
        assert list(client.stream(job_id, after=event.id)) == events[i + 1 :]


@pytest.mark.parametrize("after", ["", "0"])
def test_the_beginning_can_be_named(client: Client, engine: Engine, after: str) -> None:
    job_id = client.submit("x")
    text = run(engine, 2)
    assert text_of(list(client.stream(job_id, after=after))) == text


def test_what_is_no_event_cannot_be_resumed_after(client: Client) -> None:
    job_id = client.submit("x")
    with pytest.raises(InvalidRequest, match=r"^after: must be the id of an event, .*'yesterday'"):
        next(client.stream(job_id, after="yesterday"))


def test_the_last_event_has_what_the_end_of_the_job_says(client: Client, engine: Engine) -> None:
    client.submit("x", job_id="finished")
    engine.finish(engine.claim_one(), Event(offset=0, token_ids=[1], text="a"), reason="length")
    client.submit("x", job_id="failed")
    engine.finish(engine.claim_one(), state="failed", reason="error", error=JobError(kind="crashed", message="no luck"))
    client.submit("x", job_id="cancelled")
    client.cancel("cancelled")
    for job_id in ("finished", "failed", "cancelled"):
        *events, last = client.stream(job_id)
        job = client.get(job_id)
        assert (last.state, last.finish_reason, last.usage, last.error) == (
            job_id, job.finish_reason, job.usage, job.error
        )  # fmt: skip
        assert not any(event.finish_reason or event.usage or event.error for event in events)
    assert next(client.stream("failed")).to_dict()["error"] == {"kind": "crashed", "message": "no luck"}
    assert next(client.stream("cancelled")).usage is None
    assert list(client.stream("finished"))[-1].usage == Usage(prompt_tokens=2, completion_tokens=1)


# --- time limits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [0, 0.1])
def test_a_stream_gives_up_when_no_event_comes_and_says_why(client: Client, queue: JobQueue, timeout_s: float) -> None:
    job_id = client.submit("x")
    with pytest.raises(WaitTimeout) as caught:
        next(client.stream(job_id, timeout_s=timeout_s))
    name = queue.keys.queue
    assert caught.value.job_id == job_id
    assert str(caught.value) == (
        f"no event of job {job_id!r} has come within {timeout_s} s: queued, no engine has ever served queue {name!r}: "
        f"`millrace queues` lists the queues of the server, `millrace serve --queue {name}` starts an engine. "
        "Then call stream again, `after` the last event"
    )


def test_the_time_limit_of_a_stream_begins_when_the_next_event_is_wanted(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s)
    monkeypatch.setattr("millrace.results.waiting.time", clock)
    job_id = client.submit("x", stream=True)
    claimed = engine.claim_one()
    engine.show(claimed, 0, [0], "a")
    events = client.stream(job_id, timeout_s=0.1)
    last = next(events)
    late_s = 1000.0  # the caller takes its time
    began_s = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"has come within 0\.1 s: running\. Work continues; call stream again"):
        next(events)
    assert time.monotonic() - began_s > 0.05
    engine.finish(claimed, Event(offset=1, token_ids=[1], text="b"))
    assert [event.text for event in client.stream(job_id, after=last.id, timeout_s=0)] == ["b", ""]


def test_readers_log_once_together_why_nothing_comes_and_that_it_is_over(
    client: Client,
    engine: Engine,
    pool: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that begins later. The engine dies in the middle of the job, and another one continues it."""
    monkeypatch.setattr("millrace.results.waiting.BLOCK_LIMIT_S", 0.02)  # instead of 5 s
    job_id = client.submit("x")
    engine.claim_one()
    engine.die()
    streaming, waiting = pool.submit(list, client.stream(job_id)), pool.submit(client.wait, job_id)
    wait_until(lambda: len(caplog.messages) == 1)
    with pytest.raises(WaitTimeout):
        client.wait(job_id, 0.2)
    monkeypatch.setattr("millrace.results.waiting.LOG_INTERVAL_S", 0.0)
    with pytest.raises(WaitTimeout):
        client.wait(job_id, 0.2)
    monkeypatch.setattr("millrace.results.waiting.LOG_INTERVAL_S", 60.0)
    name = engine.queue.keys.queue
    assert (
        caplog.messages
        == [f"jobs wait: no engine serves queue {name!r} now: `millrace serve --queue {name}` starts one"] * 2
    )
    other = Engine(engine.queue)
    wait_until(lambda: len(caplog.messages) == 3)
    assert caplog.messages[2] == f"engines claim jobs of queue {name!r} again"
    engine.queue.recover()
    other.finish(other.claim_one())
    assert streaming.result()[-1].state == waiting.result().state == "finished"
    assert len(caplog.messages) == 3


# --- streams that lose their oldest entries ------------------------------------------------------------------------


@pytest.fixture
def short_streams(queue: JobQueue, redis_client: redis.Redis) -> None:
    redis_client.hset(queue.keys.settings, "max_events", 10)


@pytest.mark.usefixtures("short_streams")
def test_a_trimmed_stream_still_reads_as_the_whole_text(client: Client, engine: Engine) -> None:
    job_id = client.submit("x")
    text = run(engine, 50)
    events = list(client.stream(job_id))
    assert text_of(events) == text
    assert list(itertools.chain.from_iterable(event.token_ids for event in events)) == list(range(51))
    assert not any(event.is_restart for event in events)
    assert list(client.stream(job_id, after=events[0].id)) == events[1:]


@pytest.mark.usefixtures("short_streams")
def test_a_trimmed_stream_whose_time_is_over_says_so(client: Client, engine: Engine, redis_client: redis.Redis) -> None:
    job_id = client.submit("x")
    run(engine, 50)
    place = next(iter(client.stream(job_id))).id
    keys = engine.queue.keys
    parts = [keys.result(job_id), f"{keys.prefix}tokens:{job_id}", f"{keys.prefix}text:{job_id}"]
    for part in parts:
        redis_client.rename(part, f"elsewhere-{part}")
    for after in (None, place):
        with pytest.raises(ResultExpired):
            list(client.stream(job_id, after=after))
    for part in parts:
        redis_client.rename(f"elsewhere-{part}", part)


@pytest.mark.usefixtures("short_streams")
def test_a_reader_that_is_too_slow_is_given_what_it_missed(client: Client, engine: Engine) -> None:
    job_id = client.submit("x", stream=True)
    claimed = engine.claim_one()
    engine.show(claimed, 0, [0], "é0 ")
    events = client.stream(job_id)
    read = [next(events)]
    for i in range(1, 60):
        engine.show(claimed, i, [i], f"é{i} ")
    engine.finish(claimed, Event(offset=60, token_ids=[60], text="end"))
    read += events
    assert text_of(read) == client.get(job_id).text
    assert [event.offset for event in read] == sorted({event.offset for event in read})
    assert not any(event.is_restart for event in read)


@pytest.mark.usefixtures("short_streams")
def test_a_reader_that_resumes_after_what_is_gone_is_told_to_start_over(client: Client, engine: Engine) -> None:
    job_id = client.submit("x", stream=True)
    claimed = engine.claim_one()
    engine.show(claimed, 0, [0], "é0 ")
    events = client.stream(job_id)
    place = next(events).id
    for i in range(1, 60):
        engine.show(claimed, i, [i], f"é{i} ")
    engine.finish(claimed)
    resumed = list(client.stream(job_id, after=place))
    assert [event.is_restart for event in resumed] == [True] + [False] * (len(resumed) - 1)
    assert text_of(resumed) == client.get(job_id).text
    assert resumed[0].offset == 0


@pytest.mark.usefixtures("short_streams")
def test_what_a_stream_loses_while_a_reader_resumes_is_told(
    client: Client, engine: Engine, redis_client: redis.Redis
) -> None:
    job_id = client.submit("x", stream=True)
    claimed = engine.claim_one()
    engine.show(claimed, 0, [0], "é0 ")
    place = next(client.stream(job_id)).id
    transport = Transport(redis_client)
    follower = EventFollower(engine.queue.keys, job_id, place)
    call = follower.next_events()
    watched = transport.send_many(next(call))  # a look at what has been trimmed so far
    for i in range(1, 60):
        engine.show(claimed, i, [i], f"é{i} ")
    engine.finish(claimed)
    events = result_of(call, transport, watched)
    while found := result_of(follower.next_events(), transport):
        events += found
    assert events[0].is_restart
    assert text_of(events) == client.get(job_id).text


@pytest.mark.parametrize("num_before", [0, 7])
@pytest.mark.parametrize("num_candidates", [1, 2])
def test_the_parts_of_a_chat_are_whole_wherever_a_reader_is_when_events_are_trimmed(
    client: Client, engine: Engine, redis_client: redis.Redis, num_before: int, num_candidates: int
) -> None:
    """Also where the first trimmed events have no parts, since all was content so far."""
    redis_client.hset(engine.queue.keys.settings, "max_events", 4)
    job_id = client.submit("x", stream=True, n=num_candidates)
    claimed = engine.claim_one()
    index = num_candidates - 1 or None
    for number in range(num_before):
        engine.show(claimed, number, [number], f"é{number} ", index)
    readers, read = [], []
    for number in range(9):
        show_chat(engine, claimed, [number], index, first=num_before)
        readers.append(client.stream(job_id))
        read.append([next(readers[-1])])  # the rest when more has been trimmed
    engine.finish(claimed)
    output = client.get(job_id).outputs[num_candidates - 1]
    before = "".join(f"é{number} " for number in range(num_before))
    assert (output.content, output.reasoning) == (before + "é5 é6 é8 ", "é0 é1 é2 é3 ")
    assert [call.function.arguments for call in output.tool_calls] == ['{"a": "é\\n"}']
    for reader, events in zip(readers, read, strict=True):
        events += reader
        assert not any(event.is_restart for event in events)
        assert parts_of(events) == (output.text, output.content, output.reasoning, output.tool_calls)
    restarted = list(client.stream(job_id, after="0-1"))
    assert restarted[0].is_restart
    assert parts_of(restarted) == parts_of(read[0])


def parts_of(events: list[StreamEvent]) -> tuple[str, str, str, list[ToolCall]]:
    return (
        text_of(events),
        "".join(event.content or "" for event in events),
        "".join(event.reasoning or "" for event in events),
        [call for event in events for call in event.tool_calls],
    )


# --- several candidates ----------------------------------------------------------------------------------------------


def texts_of(events: list[StreamEvent], num_candidates: int) -> list[str]:
    """Joins the texts as a reader does that obeys `is_restart`."""
    starts = [i for i, event in enumerate(events) if event.is_restart]
    events = events[starts[-1] if starts else 0 :]
    return [text_of([event for event in events if event.index == index]) for index in range(num_candidates)]


def show_candidate(engine: Engine, claimed: ClaimedJob, index: int, offsets: Iterable[int]) -> None:
    for offset in offsets:
        engine.show(claimed, offset, [offset], f"{index}é{offset} ", index)


def test_a_stream_has_the_events_of_all_candidates(client: Client, engine: Engine) -> None:
    job_id = client.submit("x", n=2, stream=True)
    claimed = engine.claim_one()
    show_candidate(engine, claimed, 0, range(2))
    show_candidate(engine, claimed, 1, range(3))
    show_candidate(engine, claimed, 0, range(2, 3))
    engine.finish(claimed, Event(offset=3, token_ids=[3], text="end", index=1), reasons=["stop", "length"])
    events = list(client.stream(job_id))
    assert [(event.index, event.offset) for event in events] == [
        *((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2), (1, 3), (0, 7))
    ]
    assert texts_of(events, 2) == [output.text for output in client.get(job_id).outputs]
    assert [event.finish_reasons for event in events[-2:]] == [[], ["stop", "length"]]
    for i, event in enumerate(events):
        assert list(client.stream(job_id, after=event.id)) == events[i + 1 :]


@pytest.mark.usefixtures("short_streams")
@pytest.mark.parametrize("is_all_of_one_gone", [False, True])
def test_a_slow_reader_of_several_candidates_is_given_what_it_missed_of_each(
    client: Client, engine: Engine, is_all_of_one_gone: bool
) -> None:
    """Also of a candidate whose events have all been trimmed, where those of the others have no gap."""
    job_id = client.submit("x", n=3, stream=True)
    claimed = engine.claim_one()
    show_candidate(engine, claimed, 0, range(1))
    events = client.stream(job_id)
    read = [next(events)]
    if is_all_of_one_gone:
        show_candidate(engine, claimed, 1, range(5))
        show_candidate(engine, claimed, 0, range(1, 6))
    else:
        for offset in range(30):
            show_candidate(engine, claimed, 2, [offset])
            show_candidate(engine, claimed, 0, [offset + 1])
    engine.finish(claimed)
    read += events
    assert texts_of(read, 3) == [output.text for output in client.get(job_id).outputs]
    assert not any(event.is_restart for event in read)
    assert sum(len(event.token_ids) for event in read) == read[-1].offset
    for event in read:
        texts = texts_of(read[: read.index(event) + 1] + list(client.stream(job_id, after=event.id)), 3)
        assert texts == texts_of(read, 3), "resumed"


@pytest.mark.usefixtures("short_streams")
def test_a_reader_of_several_candidates_that_resumes_after_what_is_gone_starts_over(
    client: Client, engine: Engine
) -> None:
    job_id = client.submit("x", n=2, stream=True)
    claimed = engine.claim_one()
    show_candidate(engine, claimed, 1, range(1))
    place = next(client.stream(job_id)).id
    show_candidate(engine, claimed, 0, range(30))
    show_candidate(engine, claimed, 1, range(1, 30))
    engine.finish(claimed)
    resumed = list(client.stream(job_id, after=place))
    assert [event.is_restart for event in resumed] == [True] + [False] * (len(resumed) - 1)
    assert texts_of(resumed, 2) == [output.text for output in client.get(job_id).outputs]
