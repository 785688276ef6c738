"""What every test may use: a private server for each test process, and a queue of its own for each test."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, settings

from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from tests.processes import FOLDERS, ROOT

# For this process and all that it starts, before torch reads it: tiny models gain nothing from a second thread, and the
# threads of several processes on few cores wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

GROUPS = (
    (re.compile(r"/e2e/test_(one_job|lifecycle|bad_input|metric_names)\.py"), "the engine that tests share"),
    (re.compile(r"/test_ray\.py|[\[-]ray[\]-]"), "the local Ray that tests share"),
    (re.compile(r"/deploy/test_(wheel|image)\.py"), "the wheel that tests share"),
)
"""Tests of several files that share what takes long to start: a pattern of their ids, and the name of the group."""

LONGEST = tuple(
    f"tests/{name}.py"
    for name in (
        "worker/test_interpreted",
        "test_benchmarks",
        "worker/test_triton",
        "executor/test_faults",
        "e2e/test_chat",
    )
)
"""The files whose tests take longest. They come first, or one test process would work alone at the end."""

# A slow machine is no failure: the time limit of a test is the only one.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of test processes for `-n auto`: two for each core, since tests mostly wait."""
    return min(8, 2 * len(os.sched_getaffinity(0)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Send the tests of a file to one test process, as `--dist loadfile` does, and those of some files together."""
    from xdist.scheduler import LoadFileScheduling

    if config.getoption("dist") != "loadfile":
        return None
    scheduling = LoadFileScheduling(config, log)
    file_of = scheduling._split_scope

    def group_of(test_id: str) -> str:
        return next((name for pattern, name in GROUPS if pattern.search(test_id)), file_of(test_id))

    scheduling._split_scope = group_of
    return scheduling


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collections, and keep what exists then out of all later ones: with torch, transformers and
    thousands of tests these are a million objects, and none of them is garbage before the end of the run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """End the run behind a test after which the GPU refuses all work of this process: the other tests would fail too."""
    report = yield
    if report.failed and "gpu" in item.keywords and _is_device_lost():
        item.session.shouldstop = "the GPU is lost for this process"
    return report


def _is_device_lost() -> bool:
    import torch

    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.fixture(scope="session", autouse=True)
def _leaves_no_process() -> Iterator[None]:
    """When this test process ends, even by SIGKILL, all that it has started ends: engines, workers, and what they start."""
    name = f"MILLRACE_TEST_RUN_{uuid.uuid4().hex}"
    command = [sys.executable, "-I", str(ROOT / "tests/run_reaper.py"), name]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    os.environ[name] = "1"  # inherited by what is started from now on
    yield
    del os.environ[name]
    reaper.communicate()


@pytest.fixture(scope="session", autouse=True)
def _no_module_has_two_names() -> Iterator[None]:
    """Fail at the end of the run if a folder was imported without `millrace.` in front."""
    yield
    assert [name for name in sys.modules if name.partition(".")[0] in FOLDERS] == []


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
    """A unique name, so that tests share the server and nobody has to flush it."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    client = connect(redis_url)
    yield client
    client.close()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A new directory whose path leaves room for a unix socket's, which has 107 bytes; `tmp_path` may be too long."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)
