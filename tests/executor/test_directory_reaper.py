"""No file of a start is left behind, whenever it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millrace.executor.directory_reaper import DirectoryReaper, PrivateDirectory
from millrace.executor.launch.process import python_path
from tests.processes import wait_until

STARTS = """
import os, signal, sys
from millrace.executor.launch.multiproc import MultiprocExecutor
from tests.executor.kinds import stub_config

def die(event, _):
    if event == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)

executor = MultiprocExecutor(stub_config(), worker_module="tests.executor.stub")
print("starting", flush=True)
sys.addaudithook(die)
executor.start()
"""


def start_in(directory: Path, dies_at: str = "") -> subprocess.Popen[bytes]:
    """Start an engine. `dies_at`: the audit event of Python at which it kills itself."""
    environment = {**os.environ, "PYTHONPATH": python_path(), "TMPDIR": str(directory)}
    process = subprocess.Popen([sys.executable, "-P", "-c", STARTS, dies_at], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"starting\n"
    return process


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.01, 0.03, 0.1, 0.3])
def test_an_engine_killed_in_its_start_leaves_no_directory(short_path: Path, delay_s: float) -> None:
    with start_in(short_path) as engine:
        time.sleep(delay_s)
        engine.send_signal(signal.SIGKILL)
    wait_until(lambda: not list(short_path.iterdir()))


@pytest.mark.parametrize("event", ["os.mkdir", "os.remove", "os.rmdir"])
def test_an_engine_killed_as_it_changes_the_first_file_leaves_none(short_path: Path, event: str) -> None:
    with start_in(short_path, dies_at=event) as engine:
        assert engine.wait(60) == -signal.SIGKILL
    wait_until(lambda: not list(short_path.iterdir()))


def test_an_engine_killed_while_its_socket_has_a_file_leaves_none(short_path: Path) -> None:
    with start_in(short_path) as engine:
        wait_until(lambda: list(short_path.glob("*/executor.sock")))
        engine.send_signal(signal.SIGKILL)
    wait_until(lambda: not list(short_path.iterdir()))


LEAVES = """
import os, subprocess, sys
from millrace.executor.directory_reaper import DirectoryReaper
reaper = DirectoryReaper(sys.argv[1])
os.mkdir(sys.argv[1])
print(subprocess.Popen(["sleep", "60"], pass_fds=(reaper.fd,), stdout=subprocess.DEVNULL).pid, flush=True)
os._exit(0)
"""


def test_a_directory_is_removed_when_its_last_holder_ends(tmp_path: Path) -> None:
    directory = tmp_path / "it's $HOME; a name"
    command = [sys.executable, "-P", "-c", LEAVES, str(directory)]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    owner = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=60, check=True)
    time.sleep(0.1)
    assert directory.exists()
    os.kill(int(owner.stdout), signal.SIGKILL)
    wait_until(lambda: not directory.exists())


def test_closing_a_reaper_removes_the_directory_though_another_process_holds_it(tmp_path: Path) -> None:
    """As a process does that this one has forked meanwhile."""
    (directory := tmp_path / "directory").mkdir()
    reaper = DirectoryReaper(str(directory))
    with subprocess.Popen(["sleep", "60"], pass_fds=(reaper.fd,)) as holder:
        reaper.close()
        assert not directory.exists()
        assert holder.poll() is None
        holder.kill()


def test_a_reaper_that_was_killed_is_closed_without_an_error(tmp_path: Path) -> None:
    reaper = DirectoryReaper(str(tmp_path / "directory"))
    reaper._shell.kill()
    reaper._shell.wait()
    reaper.close()


def test_a_directory_that_can_not_be_made_leaves_no_process(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path / "missing"))
    with pytest.raises(FileNotFoundError):
        PrivateDirectory()
    assert (
        f"{short_path}" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    )
