"""`millrace demo` from end to end, in a process of its own: it ends well and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.millrace.cli.command import environment
from tests.processes import LIMIT_S, wait_until

DEMO = (sys.executable, "-P", "-m", "millrace", "demo")


class Traces:
    """Owns a mark in the environment and a folder for temporary files, which all processes of one demo inherit."""

    def __init__(self, folder: Path) -> None:
        self._mark = f"MILLRACE_TEST_MARK={uuid.uuid4().hex}"
        self._folder = folder

    def environment(self) -> dict[str, str]:
        name, _, value = self._mark.partition("=")
        return environment(**{name: value, "TMPDIR": str(self._folder)})

    def processes(self) -> dict[int, str]:
        """The command lines of the processes that live, by id."""
        marked = [path.parent for path in Path("/proc").glob("[0-9]*/environ") if self._is_marked(path)]
        return {int(process.name): _command_line(process) for process in marked}

    def left_behind(self) -> list[str]:
        return [*self.processes().values(), *(str(path) for path in self._folder.rglob("*"))]

    def _is_marked(self, environ: Path) -> bool:
        try:
            return self._mark.encode() in environ.read_bytes()
        except OSError:
            return False


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return "a process that has just ended"


@pytest.fixture
def traces() -> Iterator[Traces]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:  # short: the path of a socket has 107 bytes
        found = Traces(Path(folder))
        yield found
        for process in found.processes():
            os.kill(process, signal.SIGKILL)


def assert_nothing_is_left(traces: Traces) -> None:
    wait_until(lambda: traces.left_behind() == [], what="an end without traces")


def test_it_shows_progress_and_right_sums_and_leaves_nothing(traces: Traces) -> None:
    ran = subprocess.run(DEMO, env=traces.environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == ""
    assert re.search(r"queued \d+  running \d+  finished \d+/48", ran.stdout)
    assert "48 of 48 jobs finished" in ran.stdout
    right = re.search(r"(\d+) of 40 sums are right", ran.stdout)
    assert right
    assert int(right[1]) >= 38
    assert_nothing_is_left(traces)


def test_a_model_that_is_not_there_ends_it_with_the_words_of_the_engine(
    traces: Traces, redis_url: str, redis_client: redis.Redis
) -> None:
    command = (*DEMO, "--model", "/nowhere/model", "--redis", redis_url)
    ran = subprocess.run(command, env=traces.environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 2
    assert "the engine ended with status" in ran.stderr
    assert "/nowhere/model" in ran.stderr
    assert redis_client.keys("millrace:{demo-*") == []
    assert_nothing_is_left(traces)


def test_sigterm_ends_it_and_everything_that_it_started(traces: Traces) -> None:
    with subprocess.Popen(DEMO, env=traces.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as demo:
        wait_until(lambda: any("-m millrace.worker" in line for line in traces.processes().values()))
        demo.terminate()
        _, words = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 130
    assert words == b""
    assert_nothing_is_left(traces)
