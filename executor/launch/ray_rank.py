"""One rank under Ray: the actor that becomes the rank, and the engine's handle of it."""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

import msgspec

from millrace.executor.launch.process import End
from millrace.executor.rank.serve import RankOptions, run_rank
from millrace.executor.wire.channel import Channel, free_port
from millrace.executor.wire.failures import describe_exit, is_retryable_exit
from millrace.executor.wire.messages import DumpStacks

_END_NOTICE_S = 10.0
"""For Ray to report the end of a call after its actor was killed."""


class RankActor:
    """The process that becomes a rank. Ray pickles arguments and results, so these are strings, bytes and numbers."""

    def locate(self) -> tuple[str, int, int]:
        """Return (host, free port, process id). If this becomes rank 0, the ranks use the port as their rendezvous."""
        host = importlib.import_module("ray.util").get_node_ip_address()
        return host, free_port(host), os.getpid()

    def serve(self, worker_module: str, options: bytes) -> int:
        """Be a rank until it ends. Returns the exit status that a rank in its own process would have."""
        create_worker = importlib.import_module(worker_module).create_worker
        return run_rank(msgspec.json.decode(options, type=RankOptions), create_worker)


class RayRank:
    """Owns one actor, and the thread that waits for the end of its `serve`. Implements `RankHandle`."""

    def __init__(
        self, ray: Any, rank: int, host: str, pid: int, actor: Any, exit_status: Any, channel: Channel
    ) -> None:
        """`exit_status`: Ray's reference to the result of `serve`."""
        self.rank = rank
        self.host = host
        self.pid = pid
        self._ray = ray
        self._actor = actor
        self._exit_status = exit_status
        self._channel = channel
        self._end: End | None = None
        self._has_ended = threading.Event()
        self._event_fd = os.eventfd(0)
        self._watcher = threading.Thread(target=self._watch, name=f"ray-rank-{rank}", daemon=True)
        self._watcher.start()

    def __repr__(self) -> str:
        return f"RayRank(rank={self.rank}, pid={self.pid} on {self.host}, end={self._end})"

    def _watch(self) -> None:
        try:
            status = self._ray.get(self._exit_status)
            self._end = End(describe_exit(status), is_killed=False, is_retryable=is_retryable_exit(status))
        except self._ray.exceptions.RayTaskError as error:  # `serve` failed before the rank ran
            self._end = End(_first_line(error.cause), is_killed=False, is_retryable=False)
        except Exception as error:  # the actor, its node or Ray itself is gone
            self._end = End(f"lost by Ray: {_first_line(error)}", is_killed=True, is_retryable=True)
        self._has_ended.set()
        os.eventfd_write(self._event_fd, 1)

    def fileno(self) -> int:
        return self._event_fd

    def end(self) -> End | None:
        return self._end

    def dump_stacks(self) -> None:
        self._channel.send_to_heartbeat(self.rank, DumpStacks())

    def wait(self, timeout_s: float) -> bool:
        return self._has_ended.wait(timeout_s)

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def close(self) -> None:
        self.kill()  # the rank has ended, but not the actor's process
        self._watcher.join(_END_NOTICE_S)
        if not self._watcher.is_alive():  # else it still writes to the descriptor
            os.close(self._event_fd)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
