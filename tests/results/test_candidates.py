"""Jobs that yield several texts: each candidate has its checkpoint and its events, and the job ends once."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from millrace.results.job import CompletionOutput
from millrace.results.messages import Checkpoint, Event, JobError, Usage
from millrace.results.scripts import script_command
from millrace.results.transport import Transport
from tests.results.engines import Engine, outcomes, submission, submit
from tests.results.full_queue import FullQueue


def test_each_candidate_has_its_own_output_and_its_own_end(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", n=3)
    claimed = engine.claim_one()
    assert engine.show(claimed, 0, [1, 2], "x", 0) == "ok"
    assert engine.show(claimed, 0, [1], "y", 2) == "ok"
    assert engine.show(claimed, 2, [3], "xx", 0) == "ok"
    job = queue.get("a")
    assert [(one.index, one.text, one.token_ids) for one in job.outputs] == [
        (0, "xxx", [1, 2, 3]),
        (1, "", []),
        (2, "y", [1]),
    ]
    assert (job.text, job.token_ids) == ("xxx", [1, 2, 3])
    assert [one.finish_reason for one in job.outputs] == [None, None, None]
    ends = [Event(offset=1, token_ids=[2], text="z", index=2), Event(offset=0, token_ids=[9, 9], text="v", index=1)]
    usage = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=4)
    assert (
        engine.finish(
            claimed,
            *ends,
            reason="length",
            reasons=["length", "stop", "length"],
            usage=usage,
            stop_reasons=[None, 9, "\n"],
        )
        == "ok"
    )
    job = queue.get("a")
    assert job.outputs == [
        CompletionOutput(index=0, text="xxx", token_ids=[1, 2, 3], finish_reason="length", content="xxx"),
        CompletionOutput(index=1, text="v", token_ids=[9, 9], finish_reason="stop", stop_reason=9, content="v"),
        CompletionOutput(index=2, text="yz", token_ids=[1, 2], finish_reason="length", stop_reason="\n", content="yz"),
    ]
    assert (job.finish_reason, job.usage) == ("length", usage)
    assert queue.stats().generated_tokens == 7


def test_a_job_with_one_candidate_has_the_same_record_and_events_as_before(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "a", n=1)
    claimed = engine.claim_one()
    engine.show(claimed, 0, [1], "x")
    engine.finish(claimed, Event(offset=1, token_ids=[2], text="y"))
    assert not redis_client.hexists(queue.keys.job("a"), "n")
    stream: Any = redis_client.xrange(queue.keys.result("a"))
    entries = [list(fields) for _, fields in stream]
    assert entries[:2] == [[b"offset", b"count", b"tokens", b"text"]] * 2
    assert b"reasons" not in entries[2]
    assert [one.text for one in queue.get("a").outputs] == ["xy"]


def test_every_candidate_goes_on_after_its_own_checkpoint(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", n=3)
    claimed = engine.claim_one()
    assert claimed.checkpoints == [Checkpoint([], 0)] * 3
    engine.append(claimed, 0, [1, 2, 3], index=0)
    engine.show(claimed, 0, [7], "y", 1)
    engine.die()
    queue.recover()
    again = Engine(queue, "heir").claim_one()
    assert again.checkpoints == [Checkpoint([1, 2, 3], 0), Checkpoint([7], 1), Checkpoint([], 0)]
    assert again.crash_count == 0, "a candidate has advanced"


def test_progress_of_any_candidate_clears_the_crashes(queue: FullQueue) -> None:
    submit(queue, "a", n=2)
    for index, expected in ((1, 0), (None, 1), (0, 0)):
        engine = Engine(queue, "mortal")
        claimed = engine.claim_one()
        if index is not None:
            engine.append(claimed, len(claimed.checkpoints[index].token_ids), [5], index=index)
        engine.die()
        queue.recover()
        heir = Engine(queue, "heir")
        claimed = heir.claim_one()
        assert claimed.crash_count == expected
        heir.release(claimed)


def test_one_write_keeps_the_output_of_all_candidates_and_known_tokens_are_skipped(
    queue: FullQueue, engine: Engine
) -> None:
    submit(queue, "a", n=2)
    claimed = engine.claim_one()
    for _ in range(2):
        engine.show(claimed, 0, [1, 2], "ab", 0)
        engine.show(claimed, 0, [3], "c", 1)
    assert engine.append(claimed, 1, [2, 4], index=0) == "ok"
    engine.release(claimed)
    assert engine.claim_one().checkpoints == [Checkpoint([1, 2, 4], 2), Checkpoint([3], 1)]


def test_a_gap_in_one_candidate_ends_nothing(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", n=2)
    claimed = engine.claim_one()
    fine, torn = Event(offset=0, token_ids=[1], text="x", index=0), Event(offset=3, token_ids=[1], text="y", index=1)
    assert engine.finish(claimed, fine, torn) == "stale"
    job = queue.get("a")
    assert (job.state, [one.text for one in job.outputs]) == ("running", ["", ""])


@pytest.mark.parametrize("state", ["cancelled", "failed"])
def test_a_job_that_ends_early_ends_all_its_candidates(queue: FullQueue, engine: Engine, state: str) -> None:
    submit(queue, "a", n=2)
    claimed = engine.claim_one()
    engine.show(claimed, 0, [1], "x", 0)
    if state == "cancelled":
        queue.cancel("a")
        engine.finish(claimed, state="cancelled", reason="cancelled", reasons=["stop", "cancelled"])
        assert [one.finish_reason for one in queue.get("a").outputs] == ["stop", "cancelled"]
    else:
        engine.finish(claimed, state="failed", reason="error", error=JobError(kind="nan_logits", message="no"))
        assert [one.finish_reason for one in queue.get("a").outputs] == ["error", "error"]
    assert [one.text for one in queue.get("a").outputs] == ["x", ""]


def test_checkpoints_of_another_model_are_dropped_together(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", n=2)
    claimed = engine.claim_one()
    engine.append(claimed, 0, [1], index=0)
    engine.append(claimed, 0, [2, 3], index=1)
    engine.release(claimed)
    other = Engine(queue, "other", fingerprint="model-b").claim_one()
    assert other.checkpoints == [Checkpoint([], 0)] * 2


def test_a_redrive_has_as_many_candidates(queue: FullQueue, engine: Engine) -> None:
    submit(queue, "a", n=3)
    engine.finish(engine.claim_one(), state="failed", error=JobError(kind="internal", message="no"))
    assert len(queue.get(queue.redrive("a")).outputs) == 3


@pytest.mark.parametrize("n", [0, 65, 1.5, "2", [2], -1])
def test_a_number_of_candidates_that_cannot_be_is_refused(transport: Transport, queue: FullQueue, n: object) -> None:
    job = submission("a")
    arguments = (
        job.job_id,
        job.digest,
        job.body,
        job.cost,
        job.seed,
        job.tenant,
        job.priority,
        "",
        json.dumps({"n": n}),
    )
    assert transport.send(script_command("submit", queue.keys.prefix, *arguments)) == [b"invalid n"]


def test_the_most_candidates_end_in_one_record(queue: FullQueue, engine: Engine) -> None:
    assert queue.submit([submission("a", n=64)]) == outcomes(["created"])
    claimed = engine.claim_one()
    events = [Event(offset=0, token_ids=[index], text=f"{index} ", index=index) for index in range(64)]
    assert engine.finish(claimed, *events, reasons=["stop"] * 64) == "ok"
    assert engine.finish(claimed, *events, reasons=["stop"] * 64) == "already"
    assert [one.text for one in queue.get("a").outputs] == [f"{index} " for index in range(64)]


def test_a_changed_number_of_candidates_is_a_corrupt_record_and_not_an_error_of_the_server(
    queue: FullQueue, engine: Engine, redis_client: redis.Redis
) -> None:
    submit(queue, "a", "b", n=2)
    redis_client.hset(queue.keys.job("a"), "n", "1e15")
    redis_client.hset(queue.keys.job("b"), "n", "many")
    a, b = engine.claim()
    assert (len(a.checkpoints), len(b.checkpoints)) == (64, 1)
    engine.finish(a)
    engine.finish(b)
    redis_client.hset(queue.keys.job("a"), "n", 2)
    redis_client.hset(queue.keys.job("b"), "n", 2)
