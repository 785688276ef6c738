"""What every test may use: one private server for the whole run, and a queue of its own for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
import redis

from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""For this process and all that it starts, before torch is there to read it: tiny models gain nothing from a second thread,
and the threads of several processes on few cores wait for each other."""


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """A private server. Tests that need another configuration, or stop it, start their own."""
    with EmbeddedServer() as running:
        yield running


@pytest.fixture(scope="session")
def redis_url(server: EmbeddedServer) -> str:
    return server.url


@pytest.fixture
def queue_name() -> str:
    """Unique, so that tests share the server and nobody has to flush it."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    client = connect(redis_url)
    yield client
    client.close()
