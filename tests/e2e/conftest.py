"""Clients and engine services on the run's private server: one that tests share, and others for one test."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from millrace import Client
from tests.e2e.engines import LIMIT_S, TINY, EngineProcess

StartEngine = Callable[..., EngineProcess]
SERVED_MODEL = "tiny"


@pytest.fixture
def client(redis_url: str, queue_name: str) -> Iterator[Client]:
    with Client(redis_url, queue=queue_name) as client:
        yield client


class Service(NamedTuple):
    """An engine that tests share, and its queue. A test leaves both as it has found them."""

    engine: EngineProcess
    queue: str


@pytest.fixture(scope="package")
def service(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One engine for all tests that need no engine of their own."""
    queue = f"shared-{uuid.uuid4().hex[:12]}"
    log = tmp_path_factory.mktemp("service") / "engine.log"
    options = ("--served-model-name", SERVED_MODEL, "--metrics-port", "0")
    with EngineProcess(log, redis_url, queue, *options) as engine:
        yield Service(engine.wait_until_serving(), queue)
        assert (engine.terminate(), "Traceback" in engine.text()) == (0, False), engine.text()


@pytest.fixture
def shared_client(service: Service, redis_url: str) -> Iterator[Client]:
    """A client of the shared engine, which must serve the next job whatever the test did."""
    with Client(redis_url, queue=service.queue) as client:
        yield client
        assert client.wait(client.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0), LIMIT_S).text == " 7"


@pytest.fixture
def launch(redis_url: str, queue_name: str, tmp_path: Path) -> Iterator[StartEngine]:
    """Return a function that starts engines on the test's queue; at the end they are killed. They may not serve yet."""
    numbers = itertools.count(1)
    with ExitStack() as stack:

        def build(*options: str, model: Path = TINY, url: str = redis_url) -> EngineProcess:
            log = tmp_path / f"engine-{next(numbers)}.log"
            return stack.enter_context(EngineProcess(log, url, queue_name, *options, model=model))

        yield build


@pytest.fixture
def start_engine(launch: StartEngine) -> StartEngine:
    """Return a function that starts an engine on the test's queue and waits until it serves."""

    def build(*options: str, model: Path = TINY) -> EngineProcess:
        return launch(*options, model=model).wait_until_serving()

    return build
