"""What is left of a test run that was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.processes import ROOT, checkout_environment, wait_until

SUITE = """
import subprocess
import sys
import time
from pathlib import Path

from tests.processes import LoggedProcess

CHILD = "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); print('started', flush=True)"


def test_starts_processes(server, tmp_path):
    command = [sys.executable, "-c", CHILD + "; time.sleep(600)"]
    with LoggedProcess(tmp_path / "log", command) as process:
        process.wait_for_log("started")
        children = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children").read_text()
        Path(__file__).with_suffix(".draft").write_text(f"{process.process.pid} {children} {server.pid}")
        Path(__file__).with_suffix(".draft").rename(Path(__file__).with_suffix(".pids"))
        time.sleep(600)
"""


def test_a_killed_test_run_leaves_no_process(tmp_path: Path) -> None:
    """Neither its child, nor a child's child in a session of its own, nor its Redis server."""
    suite, found = tmp_path / "test_suite.py", tmp_path / "test_suite.pids"
    suite.write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", f"--rootdir={tmp_path}", "-n0", str(suite)]
    with subprocess.Popen(command, cwd=ROOT, env=checkout_environment(), stdout=subprocess.DEVNULL) as run:
        wait_until(lambda: found.exists() or run.poll() is not None)
        run.kill()
    pids = [int(pid) for pid in found.read_text().split()]
    assert len(pids) == 3
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="the end of all processes")
