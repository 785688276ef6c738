"""Processes of ours that tests start, watch and kill as an operator would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[1]


def wait_until(is_true: Callable[[], object], limit_s: float = 30.0, what: str = "the condition") -> None:
    """Return when it is true; fail when it is not within the time."""
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what} did not come true within {limit_s:g} s")
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """Return the processes that it has started, without directory reapers and without forks that still are to call exec."""

    def command(pid: int | str) -> bytes:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""

    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in children if command(one) != command(pid) and not command(one).startswith(b"/bin/sh")]


class LoggedProcess:
    """Owns one `python -P -m <module>` from `with` to the end of its block, and the file that takes its words."""

    def __init__(self, log: Path, module: str, arguments: Sequence[str]) -> None:
        self.log = log
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path},
                cwd="/",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        if error is not None:
            print(f"--- {self.log.name} ---\n{self.text()}")

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait_until_it_says(self, words: str, limit_s: float) -> Self:
        """Until the words stand in the log; fails when the process ends before."""
        wait_until(lambda: words in self.text() or self.has_ended, limit_s, f"{words!r} in {self.log.name}")
        assert not self.has_ended, self.text()
        return self

    def kill(self) -> None:
        """kill -9: nothing is said to anybody."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self, limit_s: float = 60.0) -> int:
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)
