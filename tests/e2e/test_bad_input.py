"""Bad input gets one clear error that names the field, ends in a terminal record, and affects no other job."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from millrace import Client, GenerationRequest, SamplingParams
from millrace.producer.errors import InvalidRequest
from millrace.results.errors import JobConflict
from millrace.results.keys import QueueKeys
from millrace.results.messages import JobId, Submission
from tests.e2e.conftest import Service
from tests.e2e.engines import LIMIT_S, wait_until
from tests.results.engines import outcomes
from tests.results.full_queue import FullQueue
from tests.results.invariants import check_all_ended


@pytest.fixture
def client(shared_client: Client) -> Client:
    return shared_client


@pytest.fixture
def keys(service: Service) -> QueueKeys:
    return QueueKeys(service.queue)


# --- through the inbox ---------------------------------------------------------------------------------------------

BAD_BODIES: dict[str, tuple[str, bytes]] = {
    "not JSON": ("body", b'{"id":"ID","prompt":"x",,}'),
    "an unknown field": ("promt", b'{"id":"ID","promt":"x"}'),
    "a wrong type": ("max_tokens", b'{"id":"ID","prompt":"x","max_tokens":"8"}'),
    "a boolean for a number": ("max_tokens", b'{"id":"ID","prompt":"x","max_tokens":true}'),
    "NaN": ("temperature", b'{"id":"ID","prompt":"x","temperature":NaN}'),
    "an empty prompt": ("prompt", b'{"id":"ID","prompt":""}'),
    "no prompt": ("prompt", b'{"id":"ID"}'),
    "two prompts": ("prompt", b'{"id":"ID","prompt":"x","prompt_token_ids":[7]}'),
    "max_tokens of 0": ("max_tokens", b'{"id":"ID","prompt":"x","max_tokens":0}'),
    "negative max_tokens": ("max_tokens", b'{"id":"ID","prompt":"x","max_tokens":-1}'),
    "max_tokens of 2^63": ("max_tokens", b'{"id":"ID","prompt":"x","max_tokens":9223372036854775808}'),
    "an unknown form": ("structured_outputs", b'{"id":"ID","prompt":"x","structured_outputs":{"a":1}}'),
    "a penalty out of range": ("presence_penalty", b'{"id":"ID","prompt":"x","presence_penalty":2.5}'),
    "a bias of no token": ("logit_bias", b'{"id":"ID","prompt":"x","logit_bias":{"word":1}}'),
    "a bias outside the vocabulary": ("logit_bias", b'{"id":"ID","prompt":"x","logit_bias":{"99999":1}}'),
    "allowed ids outside the vocabulary": (
        "allowed_token_ids",
        b'{"id":"ID","prompt":"x","allowed_token_ids":[99999]}',
    ),
    "no allowed ids": ("allowed_token_ids", b'{"id":"ID","prompt":"x","allowed_token_ids":[]}'),
    "an empty bad word": ("bad_words", b'{"id":"ID","prompt":"x","bad_words":[""]}'),
    "a budget for a model that does not think": (
        "thinking_token_budget",
        b'{"id":"ID","prompt":"x","thinking_token_budget":5}',
    ),
    "several greedy texts": ("n", b'{"id":"ID","prompt":"x","n":2,"temperature":0}'),
    "too many texts": ("n", b'{"id":"ID","prompt":"x","n":65}'),
    "deep nesting": ("body", b'{"id":"ID","messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
    "deep nesting where anything goes": (
        "body",
        b'{"id":"ID","messages":[{"role":"user","content":' + b"[" * 10_000 + b"]" * 10_000 + b"}]}",
    ),
    "nesting that one parser takes and the next one does not": (
        "body",
        b'{"id":"ID","prompt":"x","meta":' + b'{"a":' * 990 + b"1" + b"}" * 990 + b"}",
    ),
    "a negative delay": ("delay_s", b'{"id":"ID","prompt":"x","delay_s":-1}'),
    "a negative deadline": ("deadline_s", b'{"id":"ID","prompt":"x","deadline_s":-1}'),
    "a deadline of 0": ("deadline_s", b'{"id":"ID","prompt":"x","deadline_s":0}'),
    "a deadline that is over before the job may begin": (
        "deadline_s",
        b'{"id":"ID","prompt":"x","deadline_s":5,"run_at":9e9}',
    ),
    "a priority between two": ("priority", b'{"id":"ID","prompt":"x","priority":0.5}'),
    "a tenant with a space": ("tenant", b'{"id":"ID","prompt":"x","tenant":"a b"}'),
    "a batch, which only a client can name": ("batch", b'{"id":"ID","prompt":"x","batch":"b"}'),
    "invalid UTF-8": ("body", b'{"id":"ID","prompt":"\xff\xfe"}'),
    "too large a payload": ("body", b'{"id":"ID","prompt":"' + b"x" * (1 << 20) + b'"}'),
    "token ids outside the vocabulary": ("prompt_token_ids", b'{"id":"ID","prompt_token_ids":[5,512]}'),
    "stop ids outside the vocabulary": ("stop_token_ids", b'{"id":"ID","prompt":"x","stop_token_ids":[512]}'),
    "a prompt longer than the context": (
        "prompt_token_ids",
        b'{"id":"ID","prompt_token_ids":' + str([7] * 1024).encode() + b"}",
    ),
    "another model": ("model", b'{"id":"ID","prompt":"x","model":"large"}'),
    "messages that the template can't render": ("messages", b'{"id":"ID","messages":[{"role":"user","content":{}}]}'),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_a_bad_entry_of_the_inbox_ends_as_a_failed_record_under_its_id(
    case: str, client: Client, keys: QueueKeys, redis_client: redis.Redis, queue_name: str
) -> None:
    field, body = BAD_BODIES[case]
    job_id = queue_name  # unique
    redis_client.xadd(keys.inbox, {"job": body.replace(b"ID", job_id.encode())})
    wait_until(lambda: redis_client.exists(keys.job(job_id)) == 1)
    job = client.wait(job_id, LIMIT_S)
    assert (job.state, job.finish_reason, job.text) == ("failed", "error", "")
    assert job.error is not None
    assert job.error.field == field, job.error
    assert field in job.error.message
    check_all_ended(redis_client, keys.queue, [job_id])


@pytest.mark.parametrize("body", [b'{"id":"has space","prompt":"x"}', b'{"id":"%s","prompt":"x"}' % (b"x" * 129), b"7"])
def test_an_entry_without_a_usable_id_is_kept_among_the_rejected(
    body: bytes, client: Client, keys: QueueKeys, redis_client: redis.Redis
) -> None:
    before = redis_client.xlen(keys.rejected)
    redis_client.xadd(keys.inbox, {"job": body})
    wait_until(lambda: redis_client.xlen(keys.rejected) == before + 1)
    assert redis_client.xlen(keys.inbox) == 0


# --- through the script --------------------------------------------------------------------------------------------


def test_a_bad_job_that_bypassed_the_clients_checks_fails_alone(
    client: Client, keys: QueueKeys, redis_client: redis.Redis, queue_name: str
) -> None:
    queue = FullQueue(redis_client, keys.queue)
    newer, corrupt, neighbour = (f"{queue_name}-{name}" for name in ("newer", "corrupt", "neighbour"))
    bodies = {
        newer: b'{"prompt":"x","new_field":1}',
        corrupt: b'{"prompt":"x"}',
        neighbour: b'{"prompt":"3 + 4 =","max_tokens":4,"temperature":0.0}',
    }
    queue.pause(True)
    submissions = [Submission(job_id=JobId(id_), body=bodies[id_], digest=id_, cost=9, seed=7) for id_ in bodies]
    assert queue.submit(submissions) == outcomes(["created"] * 3)
    redis_client.hset(keys.job(corrupt), "seed", "abc")
    queue.pause(False)
    assert client.wait(neighbour, LIMIT_S).text == " 7"
    for job_id, wrong in ((newer, "new_field"), (corrupt, "seed is b'abc'")):
        job = client.wait(job_id, LIMIT_S)
        assert (job.state, job.num_retries) == ("failed", 0)
        assert job.error is not None
        assert job.error.kind == "invalid_request"
        assert wrong in job.error.message
    assert client.get(newer).error.field == "new_field"  # type: ignore[union-attr]
    check_all_ended(redis_client, keys.queue, list(bodies))


# --- through the client --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("max_tokens", {"prompt": "x", "max_tokens": 0}),
        ("max_tokens", {"prompt": "x", "max_tokens": 2**63}),
        ("temperature", {"prompt": "x", "temperature": float("nan")}),
        ("prompt", {"prompt": ""}),
        ("prompt", {}),
        ("job_id", {"prompt": "x", "job_id": "has space"}),
        ("job_id", {"prompt": "x", "job_id": "x" * 129}),
        ("body", {"prompt": "x" * (1 << 20)}),
        ("logprobs", {"prompt": "x", "logprobs": -3}),
        ("deadline_s", {"prompt": "x", "deadline_s": -3.0}),
        ("delay_s", {"prompt": "x", "delay_s": -1.0}),
        ("priority", {"prompt": "x", "priority": 0.5}),
        ("tenant", {"prompt": "x", "tenant": "a b"}),
    ],
)
def test_the_client_refuses_before_anything_is_sent(field: str, arguments: dict[str, Any], client: Client) -> None:
    before = client.stats()
    with pytest.raises(InvalidRequest) as caught:
        client.submit(**arguments)
    assert caught.value.field == field
    after = client.stats()
    assert (after.queued, after.finished, after.failed) == (before.queued, before.finished, before.failed)


def test_an_unknown_argument_is_named(client: Client) -> None:
    with pytest.raises((InvalidRequest, TypeError), match="promt"):
        client.submit(promt="x")  # type: ignore[call-arg]


def test_the_same_id_with_the_same_body_is_the_same_job_and_with_another_a_conflict(
    client: Client, queue_name: str
) -> None:
    assert client.submit(prompt="3 + 4 =", max_tokens=4, job_id=queue_name) == queue_name
    assert client.submit(prompt="3 + 4 =", max_tokens=4, job_id=queue_name) == queue_name
    with pytest.raises(JobConflict, match=queue_name):
        client.submit(prompt="5 + 4 =", max_tokens=4, job_id=queue_name)
    assert client.wait(queue_name, LIMIT_S).attempt == 1


def test_bad_jobs_in_a_batch_cost_their_neighbours_nothing(client: Client) -> None:
    good = [GenerationRequest(prompt="3 + 4 =", sampling=SamplingParams(temperature=0.0, max_tokens=4))] * 20
    bad = [GenerationRequest(prompt_token_ids=[9999])] * 20
    mixed = [request for pair in zip(good, bad, strict=True) for request in pair]
    jobs = [client.wait(job_id, LIMIT_S) for job_id in client.submit_many(mixed)]
    assert [job.text for job in jobs[::2]] == [" 7"] * 20
    assert {job.state for job in jobs[1::2]} == {"failed"}
