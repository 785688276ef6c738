"""RQ in front, a real model behind: nothing in between is a double."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from rq import Queue
from rq.command import send_stop_job_command
from rq.serializers import JSONSerializer

from millrace import Client
from tests.e2e.engines import ROOT, EngineProcess
from tests.processes import wait_until
from tests.producer.rq.parts import GatewayProcess, status_of, value_of, wait_for

QUEUE = "rq-end-to-end"


@pytest.fixture(scope="module")
def generate(tmp_path_factory: pytest.TempPathFactory, redis_url: str, rq_connection: redis.Redis) -> Iterator[Queue]:
    """RQ's queue "generate", with a gateway and an engine service behind it."""
    folder = tmp_path_factory.mktemp(QUEUE)
    with (
        EngineProcess(folder / "engine.log", redis_url, QUEUE) as engine,
        GatewayProcess(folder / "gateway.log", redis_url, "generate", QUEUE) as gateway,
    ):
        gateway.wait_until_serving()
        engine.wait_until_serving()
        yield Queue("generate", connection=rq_connection, serializer="json")


def test_a_sum_is_right(generate: Queue, redis_url: str) -> None:
    job = generate.enqueue("millrace.generate", prompt="3 + 4 =", max_tokens=8, temperature=0.0)
    wait_for("finished", job)
    value = value_of(job)
    assert (value["text"], value["finish_reason"]) == (" 7", "stop")
    assert value["usage"]["completion_tokens"] == len(value["token_ids"])
    with Client(redis_url, queue=QUEUE) as client:
        assert client.get(job.id).text == value["text"]


def test_a_chat_is_answered(generate: Queue) -> None:
    messages = [{"role": "user", "content": "What is 20 + 22?"}]
    job = generate.enqueue("millrace.generate", messages=messages, max_tokens=16, temperature=0.0)
    wait_for("finished", job)
    assert value_of(job)["text"].strip() == "20 + 22 = 42"


def test_log_probabilities_come_back(generate: Queue) -> None:
    job = generate.enqueue("millrace.generate", "3 + 4 =", max_tokens=3, logprobs=1, prompt_logprobs=0)
    wait_for("finished", job)
    value = value_of(job)
    assert len(value["logprobs"]) == len(value["token_ids"])
    assert len(value["prompt_logprobs"]) == value["usage"]["prompt_tokens"]
    assert "content" not in value


def test_a_structured_output_has_its_form(generate: Queue) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    job = generate.enqueue("millrace.generate", prompt="3 + 4 =", max_tokens=32, structured_outputs={"json": schema})
    bad = generate.enqueue("millrace.generate", prompt="3 + 4 =", structured_outputs={"json": {"type": "objct"}})
    wait_for("finished", job)
    assert json.loads(value_of(job)["text"])["n"] in (1, 2)
    wait_for("failed", bad)
    result = bad.latest_result()
    assert result is not None
    assert str(result.exc_string).startswith("failed: invalid_request: structured_outputs: json: ")


def test_what_only_the_model_can_refuse_fails_with_its_reason(generate: Queue) -> None:
    job = generate.enqueue("millrace.generate", "word " * 2000, max_tokens=8)
    wait_for("failed", job)
    result = job.latest_result()
    assert result is not None
    assert str(result.exc_string).startswith("failed: invalid_request: prompt")


def test_a_long_generation_is_stopped(generate: Queue) -> None:
    options = {"ignore_eos": True, "stream": True}
    # So many tokens take the engine many times as long as the request to stop needs, on any machine.
    long = generate.enqueue("millrace.generate", "A story about a fox:", max_tokens=900, n=64, **options)
    others = [generate.enqueue("millrace.generate", "3 + 4 =", max_tokens=50, **options) for _ in range(4)]
    wait_for("started", long)
    send_stop_job_command(generate.connection, long.id, serializer=JSONSerializer)
    wait_until(lambda: status_of(long) in ("stopped", "finished"), what="the end of the long one")
    assert status_of(long) == "stopped"
    wait_for("finished", *others)
    assert generate.started_job_registry.count == 0


def test_the_example_runs(generate: Queue, redis_url: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "rq_producer.py")],
        env={**os.environ, "REDIS_URL": redis_url},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 + 4 = 7 " in ran.stdout
    assert "20 + 22 = 42 " in ran.stdout
