"""Executors with the stub worker, which end with the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.executor.base import Executor
from tests.executor.kinds import KINDS, STUB, Make, SharedRay, stub_config


@pytest.fixture(scope="session", autouse=True)
def _ray_ends_with_the_run() -> Iterator[None]:
    yield
    SharedRay.stop()


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Make executors of the kind that the test is parametrized with, or `mp`, and shut them down at the end."""
    made: list[Executor] = []
    kind, sizes = KINDS[getattr(request, "param", "mp")]

    def make_one(faults: str = "", limits: object = None, **options: object) -> Executor:
        config = stub_config(faults, **{**sizes, **options})
        made.append(kind(config, worker_module=STUB, limits=limits))  # type: ignore[arg-type]
        return made[-1]

    yield make_one
    for executor in made:
        executor.shutdown()
