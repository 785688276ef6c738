"""One rank under Ray: the actor that becomes it, and the engine's hold on that actor."""

from __future__ import annotations

import importlib
import os
import socket
import threading
from typing import Any

import msgspec

from millrace.executor.launch.process import End
from millrace.executor.rank.serve import Invitation, accept
from millrace.executor.wire.channel import Channel
from millrace.executor.wire.failures import describe_exit, is_retryable_exit
from millrace.executor.wire.messages import DumpStacks

_LAST_WORD_S = 10.0
"""What Ray gets to say that a call has ended whose actor is gone."""


class RankActor:
    """What Ray starts: a process that becomes a rank. It answers with strings and numbers: Ray pickles what it carries."""

    def introduce(self) -> tuple[str, int, int]:
        """(host, a port that is free there, process id). The ranks meet at that port should this be rank 0."""
        host = importlib.import_module("ray.util").get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1], os.getpid()

    def serve(self, worker_module: str, invitation: bytes) -> int:
        """Be a rank until the end; returns the exit status that a process of its own would have."""
        create_worker = importlib.import_module(worker_module).create_worker
        return accept(msgspec.json.decode(invitation, type=Invitation), create_worker)


class RayRank:
    """One actor, and the thread that waits for the end of its never-ending call. Implements `RankHandle`."""

    def __init__(self, ray: Any, rank: int, host: str, pid: int, actor: Any, ending: Any, channel: Channel) -> None:
        """`ending`: what Ray will say of the call that lasts as long as the rank."""
        self.rank = rank
        self.host = host
        self.pid = pid
        self._ray = ray
        self._actor = actor
        self._ending = ending
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
            status = self._ray.get(self._ending)
            self._end = End(describe_exit(status), is_killed=False, is_retryable=is_retryable_exit(status))
        except self._ray.exceptions.RayTaskError as error:  # it could not even begin to be a rank
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
        self.kill()  # its rank has ended; the process that it ran in goes as well
        self._watcher.join(_LAST_WORD_S)
        if not self._watcher.is_alive():  # else it still has to write to it
            os.close(self._event_fd)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
