"""Bad input gets one clear error that names the field, ends in a terminal record, and affects no other job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from millrace import Client, GenerationRequest, SamplingParams
from millrace.embedded import EmbeddedServer
from millrace.producer.errors import InvalidRequest
from millrace.results.errors import JobConflict
from millrace.results.keys import QueueKeys
from millrace.results.messages import JobId, Submission
from tests.e2e.conftest import Service
from tests.e2e.engines import LIMIT_S, ROOT, TINY, wait_until
from tests.results.full_queue import FullQueue
from tests.results.invariants import check_all_ended
from tests.worker.models import make_model


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
    "a field that does not work yet": ("presence_penalty", b'{"id":"ID","prompt":"x","presence_penalty":0.5}'),
    "deep nesting": ("messages", b'{"id":"ID","messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
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
    assert queue.submit(submissions) == ["created"] * 3
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
        ("id", {"prompt": "x", "job_id": "has space"}),
        ("id", {"prompt": "x", "job_id": "x" * 129}),
        ("body", {"prompt": "x" * (1 << 20)}),
        ("logprobs", {"prompt": "x", "logprobs": 3}),
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


# --- at the start --------------------------------------------------------------------------------------------------


def serve(*options: str, cwd: Path | None = None) -> tuple[int, str]:
    """Return the exit status and stderr of an engine service that must not start."""
    command = [sys.executable, "-P", "-m", "millrace", "serve", "--device", "cpu", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, cwd=cwd, check=False
    )
    return ended.returncode, ended.stderr.strip()


def missing(path: Path) -> str:
    return str(path / "nowhere")


def truncated(path: Path) -> str:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return str(path)


def pickled(path: Path) -> str:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    return str(path)


def needs_remote_code(path: Path) -> str:
    change_config(path, model_type="homegrown", auto_map={"AutoModelForCausalLM": "modeling.Homegrown"})
    return str(path)


def unsupported(path: Path) -> str:
    change_config(path, model_type="t5", architectures=["T5ForConditionalGeneration"])
    return str(path)


def change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("damage", [missing, truncated, pickled, needs_remote_code, unsupported])
def test_a_model_that_cannot_be_served_ends_the_start_with_one_sentence(
    damage: Callable[[Path], str], redis_url: str, tmp_path: Path
) -> None:
    make_model("llama", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    status, error = serve("--model", damage(tmp_path), "--redis", redis_url, "--log-level", "ERROR")
    assert status == 2
    assert "Traceback" not in error
    assert error.splitlines()[-1].startswith("millrace serve: ")
    assert str(tmp_path) in error or "homegrown" in error or "t5" in error.lower()


def test_too_little_memory_for_one_sequence_is_one_sentence(redis_url: str) -> None:
    status, error = serve("--model", str(TINY), "--redis", redis_url, "--kv-cache-memory", "1")
    assert status == 2
    assert "Traceback" not in error
    assert error.splitlines()[-1].endswith("give the pool more memory (kv_cache_memory, gpu_memory_utilization)")


def test_without_redis_there_is_one_sentence() -> None:
    status, error = serve("--model", str(TINY), "--redis", "redis://127.0.0.1:1/0")
    assert status == 4
    assert "Traceback" not in error
    assert "Cannot connect to Redis" in error


def test_a_server_that_evicts_is_refused_by_name_of_the_setting() -> None:
    with EmbeddedServer(options={"maxmemory-policy": "allkeys-lru"}) as server:
        status, error = serve("--model", str(TINY), "--redis", server.url)
    assert status == 4
    assert "maxmemory-policy" in error
    assert "noeviction" in error


@pytest.mark.parametrize(("option", "value"), [("kv_cache_memory", "much"), ("queue", "a b"), ("log_level", "loud")])
def test_a_bad_option_is_named(option: str, value: str, redis_url: str, tmp_path: Path) -> None:
    (file := tmp_path / "engine.toml").write_text(f'{option} = "{value}"\n')
    status, error = serve("--model", str(TINY), "--redis", redis_url, "--config", str(file))
    assert status == 2
    assert option in error
    assert "Traceback" not in error
