"""No file of a start is left behind when a signal ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millrace.executor.launch.process import python_path
from tests.processes import wait_until

STARTS = """
import os, signal, sys, tempfile
from millrace.executor.launch.multiproc import MultiprocExecutor
from tests.executor.kinds import stub_config

def interrupt(event, _):
    if event == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGTERM)

def stop(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
executor = MultiprocExecutor(stub_config(), worker_module="tests.executor.stub")
tempfile.gettempdir()  # the first call makes a file for a moment, which is not ours
try:
    print("starting", flush=True)
    sys.addaudithook(interrupt)
    executor.begin_start()
    executor.start()
    signal.pause()
finally:
    executor.shutdown()
"""


def start_in(directory: Path, stops_at: str = "") -> subprocess.Popen[bytes]:
    """Start an engine that ends in order after SIGTERM. `stops_at`: the audit event of Python at which it sends itself that
    signal."""
    environment = {**os.environ, "PYTHONPATH": python_path(), "TMPDIR": str(directory)}
    process = subprocess.Popen([sys.executable, "-P", "-c", STARTS, stops_at], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"starting\n"
    return process


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0])
def test_an_engine_that_is_stopped_in_its_start_leaves_no_directory(short_path: Path, delay_s: float) -> None:
    with start_in(short_path) as engine:
        time.sleep(delay_s)
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(60) == 0
    assert list(short_path.iterdir()) == []


@pytest.mark.parametrize("event", ["os.mkdir", "os.remove", "os.rmdir"])
def test_an_engine_that_is_stopped_as_it_changes_the_first_file_leaves_none(short_path: Path, event: str) -> None:
    with start_in(short_path, stops_at=event) as engine:
        assert engine.wait(60) == 0
    assert list(short_path.iterdir()) == []


def test_an_engine_that_is_stopped_while_its_socket_has_a_file_leaves_none(short_path: Path) -> None:
    with start_in(short_path) as engine:
        wait_until(lambda: list(short_path.glob("*/executor.sock")))
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(60) == 0
    assert list(short_path.iterdir()) == []


def test_an_engine_that_is_killed_after_its_start_leaves_no_directory(short_path: Path) -> None:
    with start_in(short_path) as engine:
        wait_until(lambda: list(short_path.glob("*/executor.sock")))
        wait_until(lambda: not list(short_path.iterdir()))
        engine.kill()
    assert list(short_path.iterdir()) == []
