from __future__ import annotations

import msgspec
import redis

from millrace.results.messages import Checkpoint, Event, JobError, Lease, Usage, Write
from tests.results.engines import Engine, append_of, finish_of, listed, submit
from tests.results.full_queue import FullQueue


def test_a_checkpoint_survives_its_engine(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    job = engine.claim_one()
    assert engine.append(job, 0, [1, 2**31 - 1]) == "ok"
    assert engine.append(job, 2, [3]) == "ok"
    engine.release(job)
    assert engine.claim_one().checkpoints[0].token_ids == [1, 2**31 - 1, 3]


def test_a_checkpoint_alone_shows_nothing(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    engine.append(engine.claim_one(), 0, [1, 2])
    job = queue.get("a")
    assert (job.state, job.token_ids, job.text) == ("running", [], "")


def test_an_event_shows_tokens_and_text_at_once(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    claimed = engine.claim_one()
    assert engine.show(claimed, 0, [1, 2], "héllo") == "ok"
    job = queue.get("a")
    assert (job.token_ids, job.text) == ([1, 2], "héllo")


def test_the_result_of_a_short_job_takes_what_its_entries_need_and_expires(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "a", "b")
    for claimed in engine.claim(2):
        engine.show(claimed, 0, [1, 2], "x")
        redis_client.xadd(f"{queue.keys.prefix}copy", {"of": "another stream"})  # what a refused RENAME leaves
        assert engine.finish(claimed) == "ok"
        result = queue.keys.result(claimed.job_id)
        num_bytes = redis_client.memory_usage(result)
        assert num_bytes is not None and num_bytes < 1000
        assert 0 < redis_client.pttl(result) <= 86_400_000
        assert queue.get(claimed.job_id).text == "x"
    assert not redis_client.exists(f"{queue.keys.prefix}copy")


def test_repeating_an_append_changes_nothing(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    claimed = engine.claim_one()
    for _ in range(3):
        assert engine.show(claimed, 0, [1, 2], "x") == "ok"
    assert engine.append(claimed, 1, [2, 3, 4]) == "ok", "tokens that are there already are skipped"
    engine.release(claimed)
    again = engine.claim_one()
    assert again.checkpoints == [Checkpoint([1, 2, 3, 4], 2)]
    assert queue.get("a").text == "x"


def test_an_event_can_show_less_than_the_checkpoint_holds(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    claimed = engine.claim_one()
    assert engine.append(claimed, 0, [1, 2, 3], Event(offset=0, token_ids=[1], text="x")) == "ok"
    assert engine.append(claimed, 3, [4], Event(offset=1, token_ids=[2, 3, 4], text="yz")) == "ok"
    assert queue.get("a").text == "xyz"


def test_what_the_server_has_lost_makes_later_writes_stale(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "a")
    claimed = engine.claim_one()
    assert engine.append(claimed, 5, [1]) == "stale"
    assert engine.finish(claimed, Event(offset=5, token_ids=[1], text="x")) == "stale"
    assert queue.get("a").state == "running"


def test_finishing_shows_the_rest_and_ends_the_record(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "a")
    claimed = engine.claim_one()
    engine.show(claimed, 0, [1], "x")
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    assert engine.finish(claimed, Event(offset=1, token_ids=[2], text="y"), usage=usage) == "ok"
    job = queue.get("a")
    assert (job.state, job.text, job.token_ids, job.finish_reason) == ("finished", "xy", [1, 2], "stop")
    assert (job.usage, job.error, job.attempt, job.is_done) == (usage, None, 1, True)
    assert job.timings.started_ms is not None
    assert job.timings.ended_ms is not None
    assert job.timings.created_ms <= job.timings.started_ms <= job.timings.ended_ms
    assert not redis_client.exists(f"{queue.keys.prefix}tokens:a", f"{queue.keys.prefix}leases:{engine.id}")
    stats = queue.stats()
    assert (stats.running, stats.finished, stats.generated_tokens) == (0, 1, 2)


def test_finishing_again_is_already_done(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    claimed = engine.claim_one()
    event = Event(offset=0, token_ids=[1], text="x")
    assert [engine.finish(claimed, event) for _ in range(3)] == ["ok", "already", "already"]
    assert queue.get("a").text == "x"
    assert queue.stats().finished == 1


def test_a_job_can_end_without_any_output(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    engine.finish(engine.claim_one())
    job = queue.get("a")
    assert (job.state, job.text, job.token_ids) == ("finished", "", [])


def test_a_failed_job_tells_why_and_keeps_its_text(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    claimed = engine.claim_one()
    error = JobError(kind="invalid_request", message="prompt: too long, by far: é", field="prompt")
    event = Event(offset=0, token_ids=[1], text="x")
    engine.finish(claimed, event, state="failed", reason="error", error=error)
    job = queue.get("a")
    assert (job.state, job.finish_reason, job.error, job.text) == ("failed", "error", error, "x")
    assert listed(queue, "failed") == ["a"]


def test_a_lease_that_was_given_back_writes_nothing(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    old = engine.claim_one()
    engine.release(old, 0, [1])
    assert [engine.append(old, 1, [2]), engine.release(old), engine.finish(old)] == ["stale"] * 3
    other = Engine(queue, "other")
    new = other.claim_one()
    assert [engine.show(old, 1, [2], "x"), engine.release(old, 1, [2]), engine.finish(old)] == ["stale"] * 3
    assert new.checkpoints[0].token_ids == [1]
    other.finish(new)
    assert engine.finish(old) == "stale", "the end is another's"


def test_a_write_without_any_lease_is_stale(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    claimed = engine.claim_one()
    forged = [Lease(0), Lease(claimed.lease + 1)]
    writes = [msgspec.structs.replace(append_of(claimed, 0, [1]), lease=lease) for lease in forged]
    assert queue.write(writes) == ["stale", "stale"]


def test_release_puts_a_job_in_front_and_does_not_count_the_attempt(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", "b")
    a = engine.claim_one()
    assert engine.release(a, 0, [5, 6]) == "ok"
    again = engine.claim_one()
    assert (again.job_id, again.attempt, again.checkpoints[0].token_ids) == ("a", 1, [5, 6])


def test_release_can_put_a_job_off(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    engine.release(engine.claim_one(), delay_ms=60_000)
    assert queue.get("a").state == "delayed"
    assert queue.stats().delayed == 1
    assert engine.claim_ids() == []


def test_a_delayed_job_is_queued_when_its_time_has_come(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", "b")
    engine.release(engine.claim_one(), delay_ms=1)
    got: list[str] = []
    while len(got) < 2:
        got += engine.claim_ids()
    assert sorted(got) == ["a", "b"]


def test_a_heartbeat_also_queues_what_is_due_and_wakes_an_engine(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a")
    engine.release(engine.claim_one(), delay_ms=1)
    queue.wait_for_signal(engine.id, 0.01, include_wake=True)
    while queue.stats().delayed:
        engine.beat()
    assert queue.wait_for_signal(engine.id, 1, include_wake=True) == "wake"


def test_several_writes_of_one_job_take_effect_in_order(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", "b")
    a, b = engine.claim()
    writes: list[Write] = [
        append_of(a, 0, [1]),
        finish_of(b),
        append_of(a, 1, [2], Event(offset=0, token_ids=[1, 2], text="xy")),
        finish_of(a, Event(offset=2, token_ids=[3], text="z")),
        finish_of(a),
    ]
    assert queue.write(writes) == ["ok", "ok", "ok", "ok", "already"]
    assert queue.get("a").text == "xyz"


def test_a_write_that_is_itself_at_fault_spoils_no_other(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "a", "b", "c")
    a, b, c = engine.claim()
    redis_client.set(queue.keys.result("b"), "not a stream")
    beyond = append_of(a, 0, [1], Event(offset=0, token_ids=[1, 2], text="xy"))
    unpackable = append_of(a, 0, [-1])
    outcomes = queue.write([unpackable, beyond, finish_of(b, Event(offset=0, token_ids=[1], text="x")), finish_of(c)])
    assert [outcome.split(":")[0] for outcome in outcomes] == ["error", "error", "error", "ok"]
    redis_client.delete(queue.keys.result("b"))
    assert engine.finish(a) == "ok"


def test_results_expire_and_the_time_can_be_set(queue: FullQueue, engine: Engine, redis_client: redis.Redis) -> None:
    submit(queue, "a", "b")
    a, b = engine.claim()
    event = Event(offset=0, token_ids=[1], text="x")
    engine.finish(a, event)
    keys = [queue.keys.job("a"), queue.keys.body("a"), queue.keys.result("a")]
    assert all(86_000 < redis_client.ttl(key) <= 86_400 for key in keys)
    redis_client.hset(queue.keys.settings, "result_ttl_ms", 5000)
    engine.finish(b, event)
    assert all(0 < redis_client.ttl(key.replace(":a", ":b")) <= 5 for key in keys)


def test_a_long_stream_is_bounded_and_loses_no_text(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    redis_client.hset(queue.keys.settings, "max_events", 10)
    submit(queue, "a")
    claimed = engine.claim_one()
    for i in range(95):
        engine.show(claimed, i, [i], f"é{i} ")
        assert redis_client.xlen(queue.keys.result("a")) <= 10
    text = "".join(f"é{i} " for i in range(95))
    assert (queue.get("a").text, queue.get("a").token_ids) == (text, list(range(95)))
    usage = Usage(prompt_tokens=1, completion_tokens=96)
    engine.finish(claimed, Event(offset=95, token_ids=[95], text="end"), usage=usage)
    job = queue.get("a")
    assert (job.text, job.token_ids) == (text + "end", list(range(96)))
    assert redis_client.ttl(f"{queue.keys.prefix}tokens:a") > 0
