"""Clients, and an engine that answers them without computing anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from millrace import Client
from millrace.results.queue import JobQueue
from tests.results.engines import Engine
from tests.results.invariants import check_queue


@pytest.fixture
def client(redis_url: str, queue_name: str) -> Iterator[Client]:
    with Client(redis_url, queue=queue_name) as client:
        yield client


@pytest.fixture
def queue(redis_client: redis.Redis, queue_name: str) -> Iterator[JobQueue]:
    yield JobQueue(redis_client, queue_name)
    check_queue(redis_client, queue_name)


@pytest.fixture
def engine(queue: JobQueue) -> Engine:
    return Engine(queue)
