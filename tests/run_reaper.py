"""Kills what a test process has started, once that process itself has ended, even by SIGKILL.

`python -I tests/run_reaper.py NAME` waits for the end of its standard input, which the test process holds open. All that the
test process started has NAME in its environment, in whatever group or session it is. Shells and Ray's reaper are left: they
wait for the end of what they clean up after.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LIMIT_S = 60.0
CLEANERS = (b"sh", b"millrace.executor.launch.ray_cluster")


def started_by(name: str) -> Iterator[int]:
    """Yield the ids of this user's processes with NAME in their environment, except cleaners and zombies."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{name}=".encode() in (entry / "environ").read_bytes():
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if os.path.basename(words[0]) not in CLEANERS and not set(words) & set(CLEANERS):
                    yield int(entry.name)


def main() -> None:
    sys.stdin.buffer.read()
    deadline_s = time.monotonic() + LIMIT_S
    while (pids := list(started_by(sys.argv[1]))) and time.monotonic() < deadline_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
