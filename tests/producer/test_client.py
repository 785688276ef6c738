from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from millrace import Client, GenerationRequest, InvalidRequest, SamplingParams
from millrace.producer.submitting import command_loads
from millrace.producer.wire import parse_body, to_submission
from millrace.results import commands
from millrace.results.errors import JobConflict, JobNotFound, RedisUnavailable, WaitTimeout
from millrace.results.messages import Event
from millrace.results.queue import JobQueue
from millrace.results.reader import CompletionFollower
from tests.results.engines import Engine


def test_a_submitted_job_reaches_an_engine_as_it_was_said(client: Client, engine: Engine) -> None:
    job_id = client.submit(prompt="3 + 4 =", max_tokens=8, temperature=0, stop="\n", tenant="t", stream=True)
    claimed = engine.claim_one()
    assert claimed.job_id == job_id
    assert claimed.is_watched
    request = parse_body(claimed.body)
    assert (request.prompt, request.tenant, request.stream) == ("3 + 4 =", "t", True)
    assert request.sampling == SamplingParams(max_tokens=8, temperature=0, stop=["\n"])


def test_the_sampling_can_be_given_as_a_whole(client: Client, engine: Engine) -> None:
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=128)
    client.submit("x", sampling=sampling)
    assert parse_body(engine.claim_one().body).sampling == sampling
    with pytest.raises(InvalidRequest, match=r"^max_tokens: cannot be combined with sampling"):
        client.submit("x", sampling=sampling, max_tokens=5)


def test_a_job_can_be_given_as_tokens_or_as_a_chat(client: Client, engine: Engine) -> None:
    client.submit(prompt_token_ids=[1, 2, 3])
    client.submit(messages=[{"role": "user", "content": "hi"}])
    ids, chat = (parse_body(job.body) for job in engine.claim())
    assert ids.prompt_token_ids == [1, 2, 3]
    assert chat.messages == [{"role": "user", "content": "hi"}]


def test_the_same_id_is_the_same_job_and_another_body_is_a_conflict(client: Client) -> None:
    assert client.submit("x", job_id="a") == client.submit("x", job_id="a") == "a"
    conflict = r"^id: already taken by a job of another request \(prompt, .*\); use another id, or none: a$"
    for other in ({"prompt": "y"}, {"prompt": "x", "deadline_s": 9.0}, {"prompt": "x", "meta": {}}):
        with pytest.raises(JobConflict, match=conflict):
            client.submit(job_id="a", **other)
    assert client.stats().queued == 1


def test_many_jobs_keep_their_order_and_come_from_any_iterable(client: Client, engine: Engine) -> None:
    requests = (GenerationRequest(id=f"j{i}", prompt=f"p{i}") for i in range(1000))
    ids = client.submit_many(requests)
    assert ids == [f"j{i}" for i in range(1000)]
    assert engine.claim_ids(1000) == ids
    assert client.submit_many([]) == []


def test_one_conflict_keeps_no_other_job_out(client: Client) -> None:
    client.submit("x", job_id="j300")
    with pytest.raises(JobConflict) as caught:
        client.submit_many(GenerationRequest(id=f"j{i}", prompt="y") for i in range(600))
    assert caught.value.job_ids == ["j300"]
    assert client.stats().queued == 600


def test_the_jobs_of_a_command_are_bounded_in_number_and_in_bytes() -> None:
    small = [len(load) for load in command_loads(to_submission(GenerationRequest(prompt="x")) for _ in range(600))]
    assert small == [256, 256, 88]
    requests = (GenerationRequest(prompt="x" * 10**6) for _ in range(12))
    large = [len(load) for load in command_loads(map(to_submission, requests))]
    assert large == [5, 5, 2]


TOO_LARGE = GenerationRequest(id="large", prompt="x" * (1 << 20))


def some(num_jobs: int, *last: Any) -> list[Any]:
    return [*(GenerationRequest(id=f"j{i}", prompt="x") for i in range(num_jobs)), *last]


@pytest.mark.parametrize("wrong", [{"prompt": "x"}, None, "x", TOO_LARGE], ids=["a dict", "None", "a string", "large"])
def test_a_list_with_one_bad_request_is_refused_as_a_whole(client: Client, wrong: Any) -> None:
    for requests in (some(300, wrong, *some(1)), tuple(some(300, wrong))):
        with pytest.raises(
            InvalidRequest, match=r"\(requests\[300\]; no jobs of this call are in the queue\)$"
        ) as caught:
            client.submit_many(requests)
        assert (caught.value.index, caught.value.job_ids) == (300, [])
        assert caught.value.field == ("body" if wrong is TOO_LARGE else "requests")
    assert client.stats().queued == 0


@pytest.mark.parametrize("wrong", [{"prompt": "x"}, None, "x", TOO_LARGE], ids=["a dict", "None", "a string", "large"])
def test_what_a_generator_gave_before_a_bad_request_is_in_the_queue_and_named(client: Client, wrong: Any) -> None:
    client.submit("another", job_id="j7")
    sent = iter(some(300, wrong, *some(1)))
    with pytest.raises(InvalidRequest, match=r"\(requests\[300\]; 299 jobs of this call are in the queue\)$") as caught:
        client.submit_many(sent)
    assert (caught.value.index, caught.value.job_ids) == (300, [f"j{i}" for i in range(300) if i != 7])
    assert client.stats().queued == 300
    assert next(sent).id == "j0", "nothing more is taken"


def test_what_a_generator_gave_before_it_failed_is_in_the_queue(client: Client) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "x"}] * 300
    with pytest.raises(InvalidRequest, match=r"^prompt: .*requests\[300\]; 300 jobs") as caught:
        client.submit_many(GenerationRequest(**row) for row in [*rows, {"prompt": ""}])
    assert len(caught.value.job_ids) == client.stats().queued == 300
    with pytest.raises(KeyError):
        client.submit_many(GenerationRequest(prompt=row["prompt"]) for row in [*rows, {}])
    assert client.stats().queued == 600


@pytest.mark.parametrize("requests", [None, 5, "x", GenerationRequest(prompt="x")])
def test_what_is_not_requests_at_all_is_refused(client: Client, requests: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^requests: must be a list or another iterable, got"):
        client.submit_many(requests)


def test_one_bad_request_alone_needs_no_index(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"shorten the prompt$") as caught:
        client.submit("x" * (1 << 20))
    assert caught.value.index is None


def test_bad_requests_never_reach_the_server(queue_name: str) -> None:
    client = Client("redis://127.0.0.1:1", queue=queue_name)
    wrong: dict[str, Any] = {"max_tokens": 0, "foo": 1, "deadline_s": -5, "id": "a"}
    for field, value in wrong.items():
        with pytest.raises(InvalidRequest) as caught:
            client.submit("x", **{field: value})
        assert caught.value.field == field
    with pytest.raises(InvalidRequest, match=r"^job_id: must match ") as caught:
        client.submit("x", job_id="a b")
    assert caught.value.field == "job_id"
    with pytest.raises(InvalidRequest, match=r"there are .*; did you mean max_queued_jobs\?$"):
        client.set_settings({"max_queued_job": 5})


def test_bad_queues_and_servers_that_are_away_are_told_clearly() -> None:
    with pytest.raises(InvalidRequest, match="queue"):
        Client("redis://localhost", queue="a{b}")
    with pytest.raises(RedisUnavailable, match="not a Redis URL"):
        Client("localhost")
    with pytest.raises(
        RedisUnavailable,
        match=r"^Cannot connect to Redis at redis://127\.0\.0\.1:1/0: connection refused\. "
        "Start a Redis there, or check --redis or",
    ):
        Client("redis://127.0.0.1:1").submit("x")


def test_unknown_jobs_are_not_found(client: Client) -> None:
    for call in (client.get, client.cancel, client.wait, lambda job_id: next(client.stream(job_id))):
        with pytest.raises(JobNotFound, match="'nobody'"):
            call("nobody")
    with pytest.raises(JobNotFound, match="'nobody'"):
        list(client.as_completed([client.submit("x"), "nobody"]))


def test_a_job_shows_where_it_is(client: Client, engine: Engine) -> None:
    job_id = client.submit("x")
    assert client.get(job_id).state == "queued"
    claimed = engine.claim_one()
    engine.show(claimed, 0, [1], "so ")
    running = client.get(job_id)
    assert (running.state, running.text, running.is_done) == ("running", "so ", False)
    engine.finish(claimed, Event(offset=1, token_ids=[2], text="far"))
    done = client.get(job_id)
    assert (done.id, done.state, done.text, done.token_ids, done.is_done) == (
        job_id,
        "finished",
        "so far",
        [1, 2],
        True,
    )


def test_a_cancelled_job_is_cancelled(client: Client) -> None:
    job_id = client.submit("x")
    assert client.cancel(job_id) == "cancelled"
    assert client.wait(job_id, 60).state == "cancelled"


# --- wait ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def test_wait_returns_when_the_job_ends(client: Client, engine: Engine, pool: ThreadPoolExecutor) -> None:
    job_id = client.submit("x")
    waiting = pool.submit(client.wait, job_id, 60)
    claimed = engine.claim_one()
    for i in range(5):
        engine.show(claimed, i, [i], "x")
    engine.finish(claimed)
    assert waiting.result().text == "xxxxx"
    assert client.wait(job_id, 0).text == "xxxxx"


def test_wait_gives_up_when_its_time_is_up_and_the_job_goes_on(client: Client) -> None:
    job_id = client.submit("x")
    began_s = time.monotonic()
    with pytest.raises(WaitTimeout, match=job_id):
        client.wait(job_id, 0.2)
    assert time.monotonic() - began_s > 0.15
    assert client.get(job_id).state == "queued"
    with pytest.raises(TimeoutError):
        client.wait(job_id, 0)


def test_waiting_does_not_poll(client: Client, redis_client: redis.Redis, pool: ThreadPoolExecutor) -> None:
    job_id = client.submit("x")

    def num_commands_of(timeout_s: float) -> int:
        before = redis_client.info("stats")["total_commands_processed"]
        with pytest.raises(WaitTimeout):
            client.wait(job_id, timeout_s)
        return int(redis_client.info("stats")["total_commands_processed"] - before)

    num_of_short = num_commands_of(0.1)
    assert num_commands_of(1.0) - num_of_short < 3
    assert num_of_short < 40, "two scripts find out why the job has not ended"


def test_one_client_serves_many_threads(client: Client, engine: Engine, pool: ThreadPoolExecutor) -> None:
    ids = list(pool.map(lambda i: client.submit(f"p{i}"), range(32)))
    waiting = [pool.submit(client.wait, job_id, 60) for job_id in ids[:12]]
    for claimed in engine.claim():
        engine.finish(claimed, Event(offset=0, token_ids=[1], text=claimed.job_id))
    assert [future.result().text for future in waiting] == ids[:12]


# --- as_completed --------------------------------------------------------------------------------------------------


def finish_all(engine: Engine, num_jobs: int) -> None:
    while num_jobs > 0:
        claimed = engine.claim(min(256, num_jobs))
        for job in claimed:
            engine.finish(job, Event(offset=0, token_ids=[1], text=job.job_id))
        num_jobs -= len(claimed)


def test_thousands_of_jobs_come_back_as_they_end(client: Client, queue: JobQueue, redis_client: redis.Redis) -> None:
    ids = client.submit_many(GenerationRequest(prompt="x") for _ in range(5000))
    finish_all(Engine(queue), 1000)
    others = threading.Thread(target=finish_all, args=(Engine(queue), 4000))
    others.start()
    before = redis_client.info("stats")["total_connections_received"]
    jobs = list(client.as_completed([*ids, *ids[:10]], timeout_s=60))
    others.join()
    assert sorted(job.id for job in jobs) == sorted(ids)
    assert all(job.text == job.id for job in jobs)
    assert redis_client.info("stats")["total_connections_received"] - before < 5


def test_as_completed_yields_what_is_there_before_it_gives_up(client: Client, engine: Engine) -> None:
    done, open_ = client.submit("x"), client.submit("y")
    engine.finish(engine.claim_one())
    completed = client.as_completed([done, open_], timeout_s=0.2)
    assert next(completed).id == done
    with pytest.raises(WaitTimeout, match=r"^only 1 of 2 jobs have ended within 0\.2 s\. Work continues"):
        next(completed)


def test_as_completed_of_nothing_is_nothing(client: Client) -> None:
    assert list(client.as_completed([])) == []


def test_an_end_that_the_feed_has_lost_is_found_by_the_next_sweep(
    client: Client, engine: Engine, redis_client: redis.Redis, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.results.reader.REREAD_INTERVAL_S", 0.05)
    monkeypatch.setattr("millrace.results.waiting.BLOCK_LIMIT_S", 0.05)
    job_id = client.submit("x")
    completed = client.as_completed([job_id], timeout_s=60)
    waiting = ThreadPoolExecutor(1).submit(next, completed)
    engine.finish(engine.claim_one())
    redis_client.xtrim(queue.keys.done, maxlen=0)
    assert waiting.result().id == job_id
    redis_client.xadd(queue.keys.done, {"id": job_id, "state": "finished"})


def test_all_states_are_read_again_where_the_feed_may_have_lost_unread_ends(
    client: Client, engine: Engine, redis_client: redis.Redis, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.results.reader.MAX_ENTRIES", 2)
    monkeypatch.setattr("millrace.results.reader.MAX_STATES", 3)
    ids = client.submit_many(GenerationRequest(prompt="x") for _ in range(9))
    engine.finish(engine.claim_one())
    completed = client.as_completed(ids, timeout_s=20)
    assert next(completed).id == ids[0]
    for job in engine.claim(8):
        engine.finish(job)
    redis_client.xtrim(queue.keys.done, maxlen=2)
    assert sorted(job.id for job in completed) == sorted(ids[1:])


def test_a_reader_at_rest_reads_few_states_in_turn(
    client: Client, engine: Engine, redis_client: redis.Redis, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.results.reader.MAX_STATES", 4)
    ids = client.submit_many(GenerationRequest(prompt="x") for _ in range(10))
    follower = CompletionFollower(queue.keys, ids[:8], None)
    states = [Counter[str]() for _ in range(6)]
    for number, read in enumerate(states):
        if number == 4:
            follower.add(ids[8:])
        call = follower.next_ended(0.01)
        sent = next(call)
        while sent[0] == commands.last_entry(queue.keys.done):
            sent = call.send(client._transport.send_many(sent))
        read.update(str(one[1]).rpartition(":")[2] for one in sent if one[0] == "HGET")
        with pytest.raises(StopIteration):
            call.send(client._transport.send_many(sent))
        if number == 2:
            monkeypatch.setattr("millrace.results.reader.REREAD_INTERVAL_S", 0.0)
            follower._next_reread_s = 0.0
    first, last = Counter(ids[:4]), Counter(ids[4:8])
    assert states[:4] == [first, last, Counter(), first]
    assert states[4] == Counter(ids[8:])
    assert states[5] == last


def test_records_that_expire_while_they_are_waited_for_are_not_found(
    client: Client,
    engine: Engine,
    redis_client: redis.Redis,
    queue: JobQueue,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("millrace.results.waiting.BLOCK_LIMIT_S", 0.05)
    job_id = client.submit("x")
    waiting = pool.submit(client.wait, job_id, 60)
    redis_client.delete(queue.keys.job(job_id))
    with pytest.raises(JobNotFound):
        waiting.result()
    assert engine.claim_ids() == []


def test_submitting_again_returns_the_states_of_known_jobs(client: Client, engine: Engine) -> None:
    requests = [GenerationRequest(id=job_id, prompt="x") for job_id in ("a", "b", "c")]
    assert client.submit_many(requests[:2]).known == {}
    engine.finish(engine.claim_one())
    submitted = client.submit_many(requests)
    assert submitted == ["a", "b", "c"]
    assert submitted.known == {"a": "finished", "b": "queued"}
