"""Processes of ours that tests start, watch and kill as an operator would."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = frozenset(link.name for link in (ROOT / "millrace").iterdir() if link.is_symlink())
"""The folders at the top of the tree that are packages of `millrace`."""


LIMIT_S = 240.0
"""For what should happen soon: no test waits as long unless it fails, or the machine is very busy."""


def wait_until(is_true: Callable[[], object], limit_s: float = LIMIT_S, what: str = "the condition") -> None:
    """Return once the condition is true; fail after the limit."""
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what} did not come true within {limit_s:g} s")
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """Return the ids of its child processes, except directory reapers, zombies and forks before their exec."""

    def command(pid: int | str) -> bytes:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""

    commands = {child: command(child) for child in all_children_of(pid)}
    return [child for child, text in commands.items() if text not in (b"", command(pid)) and text[:7] != b"/bin/sh"]


def all_children_of(pid: int) -> list[int]:
    """Return the ids of the child processes that its threads have started."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
            found += map(int, path.read_text().split())
    return found


def environment_of(pid: int) -> dict[str, str]:
    """Return the variables with which a process was started."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries) if name}


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command `python -P -m MODULE ...`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def checkout_environment() -> dict[str, str]:
    """Return this process's environment with the checkout first on PYTHONPATH."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


class LoggedProcess:
    """Owns one process, which is killed at the end of the `with` block, and the file with its output."""

    def __init__(
        self, log: Path, command: Sequence[str], environment: Mapping[str, str] | None = None, cwd: Path = Path("/")
    ) -> None:
        """`environment`: of the process; by default the test's own with the checkout on its path."""
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=checkout_environment() if environment is None else environment,
                cwd=cwd,
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
        """Return the log so far."""
        return self.log.read_text()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait_for_log(self, text: str, limit_s: float = LIMIT_S) -> Self:
        """Return once the log contains the text; fail if the process ends before."""
        try:
            wait_until(lambda: text in self.text() or self.has_ended, limit_s, f"{text!r} in {self.log.name}")
        except AssertionError as error:
            raise AssertionError(f"{error}; the log:\n{self.text()}") from None
        assert not self.has_ended, self.text()
        return self

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self, limit_s: float = LIMIT_S) -> int:
        """Send SIGTERM; return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)
