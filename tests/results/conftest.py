"""A queue of its own for each test, checked at the end: whatever a test did, the keys must agree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from millrace.results.transport import Transport
from tests.results.engines import Engine
from tests.results.full_queue import FullQueue
from tests.results.invariants import check_queue


@pytest.fixture
def queue(redis_client: redis.Redis, queue_name: str) -> Iterator[FullQueue]:
    yield FullQueue(redis_client, queue_name)
    check_queue(redis_client, queue_name)


@pytest.fixture
def engine(queue: FullQueue) -> Engine:
    return Engine(queue)


@pytest.fixture
def transport(redis_client: redis.Redis) -> Transport:
    """For plain commands."""
    return Transport(redis_client)
