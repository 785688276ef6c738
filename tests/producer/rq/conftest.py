"""One gateway and one engine for tests that only use them, and RQ queues of their own for those that need more."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from rq import Queue

from tests.producer.rq.parts import EchoEngine, GatewayProcess


@pytest.fixture(scope="session")
def rq_connection(redis_url: str) -> Iterator[redis.Redis]:
    """As a producer's script opens it."""
    connection = redis.Redis.from_url(redis_url)
    yield connection
    connection.close()


@pytest.fixture
def rq_queue(rq_connection: redis.Redis) -> Queue:
    """An RQ queue of the test's own."""
    return Queue(f"rq-{uuid.uuid4().hex[:8]}", connection=rq_connection, serializer="json")


@pytest.fixture
def engine(redis_url: str, queue_name: str) -> Iterator[EchoEngine]:
    with EchoEngine(redis_url, queue_name) as running:
        yield running


@pytest.fixture
def gateway(tmp_path: Path, redis_url: str, rq_queue: Queue, queue_name: str) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path / "gateway.log", redis_url, rq_queue.name, queue_name) as process:
        yield process.wait_until_serving()


@pytest.fixture(scope="module")
def shared_engine(redis_url: str) -> Iterator[EchoEngine]:
    with EchoEngine(redis_url, f"shared-{uuid.uuid4().hex[:8]}") as running:
        yield running


@pytest.fixture(scope="module")
def shared_queue(
    tmp_path_factory: pytest.TempPathFactory, redis_url: str, rq_connection: redis.Redis, shared_engine: EchoEngine
) -> Iterator[Queue]:
    """An RQ queue with a gateway and an engine behind it, for tests that leave them as they are."""
    queue = Queue(f"shared-{uuid.uuid4().hex[:8]}", connection=rq_connection, serializer="json")
    log = tmp_path_factory.mktemp("shared") / "gateway.log"
    with GatewayProcess(log, redis_url, queue.name, shared_engine.queue.keys.queue) as process:
        process.wait_until_serving()
        yield queue
