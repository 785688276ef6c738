"""The life of one rank's process: start, notice its end, stop it for good."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from millrace.executor.rank.serve import DUMP_SIGNAL
from millrace.executor.wire.failures import describe_exit, is_retryable_exit

logger = logging.getLogger("millrace.executor")

_KILLED_S = 30.0
"""What the kernel gets to take a killed process away; a device driver may hold it for a while."""

PACKAGE_ROOT = str(Path(__file__).absolute().parents[3])
"""Where `import millrace` finds this package. Links stay: a checkout has this folder at its top, too."""


class End(msgspec.Struct, frozen=True):
    """How a rank ended."""

    reason: str
    is_killed: bool
    """By a signal: nothing that the rank did or said by itself."""
    is_retryable: bool


class RankHandle(Protocol):
    """One rank as its executor holds it, wherever it runs."""

    rank: int

    @property
    def pid(self) -> int:
        """Of its process, on its own host."""

    def fileno(self) -> int:
        """A descriptor that is readable once the rank has ended."""

    def end(self) -> End | None:
        """How it ended; None while it runs."""

    def dump_stacks(self) -> None:
        """Have the stack of every thread written to its log or the engine's, if it still can."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within the time."""

    def terminate(self) -> None:
        """Ask it to end, with SIGTERM."""

    def kill(self) -> None:
        """End it, with SIGKILL."""

    def close(self) -> None:
        """Give back what holds it, once it has ended."""


def dump_all(handles: Sequence[RankHandle], wait: Callable[[], None]) -> None:
    """Have all of them write their stacks, those too that wait for a stuck one: one after the other, since they share a
    log. `wait` gives each its time."""
    for handle in handles:
        logger.error("rank %d, whose stacks are:", handle.rank)
        handle.dump_stacks()
        wait()


def stop_all(handles: Sequence[RankHandle], grace_s: float) -> None:
    """Make sure that they are gone: wait for their own end, then TERM, then KILL, all at the same time."""
    for handle in _still_there(handles, grace_s):
        handle.terminate()
    for handle in _still_there(handles, grace_s):
        handle.kill()
    close_all(handles)


def _still_there(handles: Sequence[RankHandle], grace_s: float) -> list[RankHandle]:
    deadline_s = time.monotonic() + grace_s
    return [handle for handle in handles if not handle.wait(max(0.0, deadline_s - time.monotonic()))]


def close_all(handles: Sequence[RankHandle]) -> None:
    """Wait for the end of ranks that were killed."""
    for handle in handles:
        if not handle.wait(_KILLED_S):
            logger.error("%r does not end, though it was killed", handle)
        handle.close()


class WorkerProcess:
    """Owns one rank's process on this host. Start it from a thread that lives as long as the worker shall: the kernel
    kills the worker when that thread ends. Implements `RankHandle`."""

    def __init__(
        self,
        rank: int,
        worker_module: str,
        address: str,
        identity: str,
        log_level: str,
        environment: dict[str, str] | None = None,
    ) -> None:
        """`environment`: variables for this rank, besides those of this process."""
        self.rank = rank
        options = ["--address", address, "--identity", identity, "--log-level", log_level]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", worker_module, *options, "--parent-pid", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {}), "PYTHONPATH": python_path()},
            start_new_session=True,  # Ctrl-C in a terminal is the engine's business
        )
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:  # no descriptor is left: nobody would hold the process
            self._process.kill()
            self._process.wait()
            raise

    def __repr__(self) -> str:
        return f"WorkerProcess(rank={self.rank}, pid={self.pid})"

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._pidfd

    def end(self) -> End | None:
        status = self._process.poll()
        if status is None:
            return None
        return End(describe_exit(status), status < 0, is_retryable_exit(status))

    def dump_stacks(self) -> None:
        self._signal(DUMP_SIGNAL)

    def wait(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        os.close(self._pidfd)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


def python_path() -> str:
    """A rank imports our packages from where this one lies, also without an installation."""
    known = os.environ.get("PYTHONPATH", "")
    paths = [PACKAGE_ROOT, *(path for path in known.split(os.pathsep) if path)]
    return os.pathsep.join(dict.fromkeys(paths))
