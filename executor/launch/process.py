"""The process of a rank: start it, notice its end, stop it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec

from millrace.executor.environment import without_secrets
from millrace.executor.rank.serve import DUMP_SIGNAL
from millrace.executor.wire.channel import Channel
from millrace.executor.wire.failures import describe_exit, is_retryable_exit

logger = logging.getLogger("millrace.executor")

_KILLED_S = 30.0
"""For the kernel to end a killed process; a device driver may delay that."""

PACKAGE_ROOT = str(Path(__file__).absolute().parents[3])
"""The folder from which `import millrace` works. Links are not resolved: a checkout also has this folder at its top."""


class End(msgspec.Struct, frozen=True):
    """How a rank ended."""

    reason: str
    is_killed: bool
    """By a signal, and not by the rank itself."""
    is_retryable: bool


class RankHandle(Protocol):
    """One rank as its executor sees it, on whatever host it runs."""

    rank: int

    @property
    def pid(self) -> int:
        """Process id, on the rank's host."""

    def fileno(self) -> int:
        """Return a descriptor that is readable once the rank has ended."""

    def end(self) -> End | None:
        """Return how it ended, None while it runs."""

    def dump_stacks(self) -> None:
        """Let the rank write the stack of every thread to its log or to the engine's, if it still can."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end. Returns whether it has ended in time."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def close(self) -> None:
        """Release the descriptor and what else belongs to the handle, once the rank has ended."""


def dump_all(handles: Sequence[RankHandle], channel: Channel, limit_s: float, receive_all: Callable[[], None]) -> None:
    """Let all ranks write their stacks, since others may wait for a stuck one. They share a log, so one writes after the
    other, for `limit_s` each. `receive_all` logs the stacks that have arrived over the channel."""
    for handle in handles:
        logger.error("stacks of rank %d:", handle.rank)
        handle.dump_stacks()
        deadline_s = time.monotonic() + limit_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            channel.wait(left_s)
            receive_all()


def stop_all(handles: Sequence[RankHandle], grace_s: float) -> None:
    """End and close all ranks at once: wait `grace_s` for their own end, then SIGTERM, wait again, then SIGKILL."""
    for handle in _still_running(handles, grace_s):
        handle.terminate()
    kill_all(_still_running(handles, grace_s))
    close_all(handles)


def _still_running(handles: Sequence[RankHandle], grace_s: float) -> list[RankHandle]:
    deadline_s = time.monotonic() + grace_s
    return [handle for handle in handles if not handle.wait(max(0.0, deadline_s - time.monotonic()))]


def kill_all(handles: Sequence[RankHandle]) -> None:
    for handle in handles:
        handle.kill()


def close_all(handles: Sequence[RankHandle]) -> None:
    """Wait for the end of ranks that were killed, and close them."""
    for handle in handles:
        if not handle.wait(_KILLED_S):
            logger.error("%r was killed and has not ended within %g s", handle, _KILLED_S)
        handle.close()


class LocalRank:
    """Owns a descriptor of a rank's process on this host."""

    def __init__(self, rank: int, pid: int) -> None:
        """Raises ProcessLookupError when there is no such process, and OSError when no descriptor is free."""
        self.rank = rank
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, pid={self.pid})"

    def fileno(self) -> int:
        return self._pidfd

    def dump_stacks(self) -> None:
        self._signal(DUMP_SIGNAL)

    def wait(self, timeout_s: float) -> bool:
        return bool(self._poll.poll(math.ceil(timeout_s * 1000)))

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        os.close(self._pidfd)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)


_Child: TypeAlias = "subprocess.Popen[bytes]"


class _Starter(threading.Thread):
    """Starts child processes, and lives as long as this process: the kernel kills a rank when the thread ends that started
    it, and a program may make its `LLM` in a thread that ends."""

    def __init__(self) -> None:
        super().__init__(name="worker-starter", daemon=True)
        self._asked = queue.SimpleQueue[tuple[Callable[[], _Child], Future[_Child]]]()

    def run(self) -> None:
        while True:
            start, started = self._asked.get()
            try:
                started.set_result(start())
            except BaseException as error:
                started.set_exception(error)

    def call(self, start: Callable[[], _Child]) -> _Child:
        started = Future[_Child]()
        self._asked.put((start, started))
        try:
            return started.result()
        except BaseException:  # if it is an interruption, nobody owns the process that begins now
            started.add_done_callback(_kill_child)
            raise


def _kill_child(started: Future[_Child]) -> None:
    if started.exception() is None:
        started.result().kill()


@cache
def _starter(_pid: int) -> _Starter:
    """Return the one of this process. A fork of it has no threads, so it gets one of its own."""
    starter = _Starter()
    starter.start()
    return starter


class WorkerProcess(LocalRank):
    """Owns a rank's process, a child of this one. The kernel kills it when this process ends. A `RankHandle`."""

    def __init__(
        self,
        rank: int,
        worker_module: str,
        address: str,
        identity: str,
        log_level: str,
        environment: dict[str, str] | None = None,
    ) -> None:
        """`environment`: variables for this rank, in addition to those of this process that are no secrets."""
        options = ["--address", address, "--identity", identity, "--log-level", log_level]
        command = [sys.executable, "-P", "-m", worker_module, *options, "--parent-pid", str(os.getpid())]
        variables = {**without_secrets(os.environ), **(environment or {}), "PYTHONPATH": python_path()}
        # The engine handles Ctrl-C in a terminal, so the rank has a session of its own.
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": variables, "start_new_session": True}
        # What the caller has closed may not become a rank's first socket.
        how |= {name: subprocess.DEVNULL for name in ("stdout", "stderr") if getattr(sys, name) is None}
        self._process = _starter(os.getpid()).call(lambda: subprocess.Popen(command, **how))
        try:
            super().__init__(rank, self._process.pid)
        except OSError:  # no descriptor is free: nothing else would end the process
            self._process.kill()
            self._process.wait()
            raise

    def end(self) -> End | None:
        status = self._process.poll()
        if status is None:
            return None
        return End(describe_exit(status), status < 0, is_retryable_exit(status))

    def close(self) -> None:
        self._process.poll()  # no zombie is left
        super().close()


def python_path() -> str:
    """Return PYTHONPATH for a rank, so that it imports this copy of the package, installed or not."""
    known = os.environ.get("PYTHONPATH", "")
    paths = [PACKAGE_ROOT, *(path for path in known.split(os.pathsep) if path)]
    return os.pathsep.join(dict.fromkeys(paths))
