"""Clients and engine services around the run's private server."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from millrace import Client
from tests.e2e.engines import TINY, EngineProcess

StartEngine = Callable[..., EngineProcess]


@pytest.fixture
def client(redis_url: str, queue_name: str) -> Iterator[Client]:
    with Client(redis_url, queue=queue_name) as client:
        yield client


@pytest.fixture
def launch(redis_url: str, queue_name: str, tmp_path: Path) -> Iterator[StartEngine]:
    """Starts engine services on the test's queue and kills what is left of them at the end. They may not serve yet."""
    numbers = itertools.count(1)
    with ExitStack() as stack:

        def build(*options: str, model: Path = TINY, url: str = redis_url) -> EngineProcess:
            log = tmp_path / f"engine-{next(numbers)}.log"
            return stack.enter_context(EngineProcess(log, url, queue_name, *options, model=model))

        yield build


@pytest.fixture
def start_engine(launch: StartEngine) -> StartEngine:
    """The same, and returns when the engine serves."""

    def build(*options: str, model: Path = TINY) -> EngineProcess:
        return launch(*options, model=model).wait_until_serving()

    return build
