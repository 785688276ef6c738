from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from millrace.producer import GenerationRequest, SamplingParams
from millrace.producer.wire import to_submission
from millrace.results.errors import QueueError
from millrace.results.messages import Checkpoint, Submission
from millrace.results.scripts import Argument, script_command
from millrace.results.transport import Transport
from tests.results.engines import Engine, outcomes, submission, submit
from tests.results.full_queue import FullQueue
from tests.results.invariants import check_queue


def test_a_new_job_is_queued_with_what_the_queue_has_to_know(queue: FullQueue, engine: Engine) -> None:
    job = submission("a", body=b'{"prompt":"x"}', cost=12, seed=2**63 - 1, is_streamed=True)
    assert queue.submit([job]) == outcomes(["created"])
    assert queue.get("a").state == "queued"
    claimed = engine.claim_one()
    assert (claimed.body, claimed.cost, claimed.seed) == (b'{"prompt":"x"}', 12, 2**63 - 1)
    assert (claimed.attempt, claimed.crash_count, claimed.checkpoints) == (1, 0, [Checkpoint([], 0)])
    assert claimed.is_watched


def test_the_same_job_again_is_the_same_job_at_every_stage(queue: FullQueue, engine: Engine) -> None:
    job = submission("a")
    assert queue.submit([job, job]) == outcomes(["created", "exists"])
    claimed = engine.claim_one()
    assert queue.submit([job]) == outcomes(["exists"])
    engine.finish(claimed)
    assert queue.submit([job]) == outcomes(["exists"])
    assert queue.stats().queued == 0


def test_an_id_with_another_body_is_a_conflict_and_changes_nothing(queue: FullQueue, engine: Engine) -> None:
    other = submission("a", body=b'{"prompt":"other"}')
    assert queue.submit([submission("a"), other, submission("b")]) == outcomes(["created", "conflict", "created"])
    assert [job.body for job in engine.claim()] == [b'{"prompt":"hi"}'] * 2


def test_an_empty_submission_is_nothing(queue: FullQueue) -> None:
    assert queue.submit([]) == []


def test_the_wake_list_stays_short(queue: FullQueue, redis_client: redis.Redis) -> None:
    queue.submit([submission() for _ in range(500)])
    assert redis_client.llen(queue.keys.wake) == 64


def test_bodies_of_any_bytes_come_back_as_they_were(queue: FullQueue, engine: Engine) -> None:
    body = bytes(range(256)) * 100
    submit(queue, "a", body=body)
    assert engine.claim_one().body == body


def test_records_stay_small(queue: FullQueue, redis_client: redis.Redis) -> None:
    """In the compact form of Redis a record takes a third of the memory."""
    job = Submission(job_id=submission().job_id, body=b"{}", digest="f" * 64, cost=2**31, seed=2**63 - 1)
    queue.submit([job])
    assert redis_client.object("encoding", queue.keys.job(job.job_id)) in (b"listpack", b"ziplist")


# --- from clients in other languages ------------------------------------------------------------------------------


JOB: dict[str, Argument] = {
    "id": "bad",
    "digest": "d",
    "body": b'{"prompt":"x"}',
    "cost": 10,
    "seed": 7,
    "tenant": "default",
    "priority": 0,
    "stream": "",
    "options": "",
}
WRONG: list[tuple[str, list[Argument]]] = [
    ("id", ["", "a b", "a/b", "a\n", b"\xff", "x" * 129]),
    ("cost", ["", "x", "1.5", "-1", "1e3", "nan", "0x10", "1" * 13]),
    ("seed", ["", "abc", "1.5", "--1", "-", "2^63", str(2**63), str(-(2**63) - 1), "1" * 5000]),
    ("tenant", ["", "a b", "x" * 65, b"\xc3\xa9"]),
    ("priority", ["", "abc", "nan", "inf", "0.5", "1e3", str(2**31), str(-(2**31) - 1)]),
    ("options", ["5", "null", '"x"', "{", "reply_error", "[" * 2000, "[1]", '{"a b": 1}']),
]
WRONG_OPTIONS: list[tuple[str, list[Any]]] = [
    ("delay_ms", [-1, 1.5, "5", True, [], 10**14]),
    ("run_at_ms", ["soon", -1, False, {}]),
    ("deadline_ms", [0, -1, 0.5, "5"]),
    ("max_retries", [-1, 101, 1.5, "2"]),
    ("meta", [{"a": 1}, 5, "", "5", "{", "{reply_error}", json.dumps({"a": "x" * 16384})]),
    ("batch", ["", "a b", 5, "x" * 65, {}]),
]
CASES = [(name, value, {**JOB, name: value}) for name, values in WRONG for value in values]
CASES += [
    (name, value, {**JOB, "options": json.dumps({name: value})}) for name, values in WRONG_OPTIONS for value in values
]
CASES += [
    ("delay_s", "unknown", {**JOB, "options": '{"delay_s":5}'}),
    ("deadline_ms", "over before delay_ms", {**JOB, "options": '{"deadline_ms":5000,"delay_ms":5000}'}),
    ("deadline_ms", "over before run_at_ms", {**JOB, "options": '{"deadline_ms":5000,"run_at_ms":9000000000000}'}),
]


@pytest.mark.parametrize(
    ("field", "job"), [pytest.param(field, job, id=f"{field} {value!r:.20}") for field, value, job in CASES]
)
def test_what_no_job_can_have_is_refused_by_name_and_leaves_nothing_behind(
    field: str, job: dict[str, Argument], queue: FullQueue, engine: Engine, transport: Transport
) -> None:
    neighbour = {**JOB, "id": "good"}
    command = script_command("submit", queue.keys.prefix, *job.values(), *neighbour.values())
    assert transport.send(command) == [f"invalid {field}".encode(), b"created"]
    assert check_queue(queue._client, queue.keys.queue) == {"good": "queued"}
    assert engine.claim_ids() == ["good"]
    submit(queue, "bad")


def test_a_null_is_an_option_that_is_not_given(queue: FullQueue, engine: Engine, transport: Transport) -> None:
    names = [name for name, _ in WRONG_OPTIONS]
    job = {**JOB, "options": json.dumps(dict.fromkeys(names))}
    assert transport.send(script_command("submit", queue.keys.prefix, *job.values())) == [b"created"]
    assert engine.claim_ids() == ["bad"]


def test_values_that_are_left_out_take_no_job_in(queue: FullQueue, transport: Transport) -> None:
    values = [*JOB.values(), *list(JOB.values())[:-1]]
    with pytest.raises(QueueError, match="9 values, got 17"):
        transport.send(script_command("submit", queue.keys.prefix, *values))
    assert check_queue(queue._client, queue.keys.queue) == {}


@pytest.mark.parametrize(
    "extreme",
    [
        {"id": "x" * 128, "tenant": "y" * 64, "priority": -(2**31), "seed": -(2**63), "deadline_s": 1e10},
        {"id": "A.z_9-", "priority": 2**31 - 1, "seed": 2**63 - 1, "max_tokens": 2**31 - 1, "deadline_s": 1e-9},
        {"id": "-", "delay_s": 1e10, "max_retries": 100, "meta": {"a": "x" * 16376}},
        {"id": "0", "run_at": 1e10, "max_retries": 0, "meta": {}, "priority": -1, "seed": 0},
        {"id": "1", "run_at": 0.0, "deadline_s": 5.0, "meta": {"é": [None, {"a": 1e300}]}},
    ],
)
def test_all_that_a_request_may_have_is_taken(extreme: dict[str, Any], queue: FullQueue) -> None:
    sampling = SamplingParams(**{name: extreme.pop(name) for name in ("seed", "max_tokens") if name in extreme})
    request = GenerationRequest(prompt="x", sampling=sampling, **extreme)
    assert queue.submit([to_submission(request, batch="b" * 64)]) == outcomes(["created"])
    assert queue.get(extreme["id"]).meta == extreme.get("meta")
