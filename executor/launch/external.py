"""`ExternalLauncherExecutor`: torchrun starts the ranks, watches them, and restarts the whole group.

    torchrun --nproc-per-node 2 --max-restarts 3 --no-python millrace serve --executor external ...

Each process that torchrun starts is `millrace serve`, finds torchrun's variables, and becomes a rank. Before that, rank 0
starts the engine service as its child. The service holds no device:

    torchrun -+- rank 0 --- engine service      connects to the ranks in a directory that only this user can enter
              '- rank 1

They end together. When a rank ends, the service gives its jobs back to the queue and ends. When the service ends, rank 0
ends with its exit status, and the others with 0. A rank that has failed or was shut down waits for that; a rank that does
not respond is killed by the service. torchrun then restarts the group, up to --max-restarts times (by default never), and
the new service continues the jobs after their last tokens. When torchrun itself ends, all processes end.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from millrace.executor.environment import without_secrets
from millrace.executor.errors import StartError
from millrace.executor.launch.process import End, LocalRank, RankHandle, close_all, python_path
from millrace.executor.rank.serve import die_with_parent
from millrace.executor.remote import RemoteExecutor
from millrace.executor.socket_directory import socket_directory
from millrace.executor.wire.channel import Channel, socket_address

logger = logging.getLogger("millrace.executor")

RENDEZVOUS_DIR = "MILLRACE_EXTERNAL_DIRECTORY"
"""Set for the service by rank 0: the directory of the socket and of the pid files."""
PARENT = "MILLRACE_EXTERNAL_PARENT"
"""Set for the service by rank 0: the process id of rank 0."""

COMMAND_LINE = "torchrun --nproc-per-node N --max-restarts 3 --no-python millrace serve --executor external ..."

_TORCHRUN_PREFIX = "TORCHELASTIC_"
_TORCHRUN_NAMES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    }
)
_RENDEZVOUS_LIMIT_S = 60.0
_POLL_EVERY_S = 0.02
_SERVICE = "engine-service"
"""Name of the service's pid file."""
_START_ID = 1
"""A service starts its ranks once: for another start torchrun makes a new service too."""


class ExternalLauncherExecutor(RemoteExecutor):
    """Owns the channel to ranks that torchrun starts and ends."""

    name = "external"
    can_restart = False

    def _open_channel(self) -> Channel:
        if self._num_starts > 1:
            raise StartError("spawn", 0, "only torchrun can restart the ranks; set --max-restarts", is_retryable=False)
        directory = os.environ.get(RENDEZVOUS_DIR)
        if directory is None:
            message = f"executor external is for `millrace serve` under torchrun: {COMMAND_LINE}"
            raise StartError("spawn", 0, message, is_retryable=False)
        return Channel(_START_ID, self.world_size, self._recorder, directory=directory)

    def _launch(self, channel: Channel) -> list[ExternalRank]:
        directory = Path(os.environ[RENDEZVOUS_DIR])
        deadline_s = time.monotonic() + self._limits.phase_s["spawn"]
        ranks: list[ExternalRank] = []
        for rank in range(self.world_size):
            while not (pid_file := _pid_file(directory, rank)).exists():
                if _has_lost_rank_0():
                    raise StartError("spawn", 0, "its process has ended", is_retryable=True)
                if time.monotonic() > deadline_s:
                    raise StartError("spawn", rank, "torchrun did not start it", is_retryable=True)
                time.sleep(_POLL_EVERY_S)
            ranks.append(ExternalRank(rank, int(pid_file.read_text())))
        return ranks

    def _release_handles(self) -> Sequence[RankHandle]:
        """Kill ranks that do not respond: they would never end. Return none of the others: they end after this process,
        so that torchrun sees how this process ended, and not that ranks were killed."""
        handles = super()._release_handles()
        silent = list(handles)
        try:
            self._wait_for_heartbeats(silent)
        finally:  # a second signal may have ended the wait
            for handle in silent:
                logger.error("rank %d does not respond and is killed", handle.rank)
                handle.kill()
            close_all(silent)
            for handle in handles:
                if handle not in silent:
                    handle.close()
        return ()

    def _wait_for_heartbeats(self, silent: list[RankHandle]) -> None:
        """Remove the ranks from `silent` that end or send a message from now on. Blocks until all have, mostly for a second,
        or until the limit. A rank that computes or waits for another has a heartbeat, but during its start not always."""
        limit_s = self._limits.busy_heartbeat_s if self._watchdog is None else self._limits.shutdown_s
        deadline_s = time.monotonic() + limit_s
        self._receive_senders()  # drop what was sent before
        while silent and time.monotonic() < deadline_s:
            time.sleep(_POLL_EVERY_S)
            senders = self._receive_senders()
            silent[:] = [handle for handle in silent if handle.rank not in senders and not handle.wait(0)]

    def _receive_senders(self) -> set[int]:
        """Drop all messages that have arrived, and return the ranks that sent them."""
        return set() if self._channel is None else {rank for rank, _ in self._channel.receive()}

    def _kill_stuck(self) -> None:
        """Kill ranks without a heartbeat. Others, which may wait for those, end after this process."""
        assert self._watchdog is not None
        now_s = time.monotonic()
        for handle in self._handles:
            if self._watchdog.silence_s(handle.rank, now_s) > self._limits.shutdown_s:
                handle.kill()


class ExternalRank(LocalRank):
    """A rank on this host that is not our child. Implements `RankHandle`."""

    def __init__(self, rank: int, pid: int) -> None:
        try:
            super().__init__(rank, pid)
        except ProcessLookupError as error:
            raise StartError("spawn", rank, "its process has ended", is_retryable=True) from error

    def end(self) -> End | None:
        if not self.wait(0):
            return None
        reason = "its process has ended, see the log of torchrun, which restarts the group with --max-restarts"
        return End(reason, is_killed=False, is_retryable=True)


# --- in the processes that torchrun starts ---


def is_torchrun_rank(environment: Mapping[str, str]) -> bool:
    """Whether torchrun started this process, and it has not become a rank yet."""
    return "TORCHELASTIC_RUN_ID" in environment and "RANK" in environment


def become_rank(
    service_command: Sequence[str], *, worker_module: str = "millrace.worker", log_level: str = "INFO"
) -> NoReturn:
    """Replace this process with the rank whose number torchrun gave it. Rank 0 starts the service with `service_command`.
    Raises ValueError when the ranks are on several hosts, and when torchrun has ended already."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != int(os.environ.get("LOCAL_WORLD_SIZE", world_size)):
        raise ValueError("executor: external runs ranks on one host only; use ray for several hosts")
    parent_pid = os.getppid()
    directory = _rendezvous_dir(os.environ, parent_pid)
    if _is_orphan(parent_pid):
        raise ValueError("executor: torchrun has ended, so this rank ends too")
    environment = {name: value for name, value in os.environ.items() if not _is_torchrun_variable(name)}
    environment["PYTHONPATH"] = python_path()
    options = ["--address", socket_address(str(directory)), "--identity", f"{rank}.{_START_ID}"]
    options += ["--parent-pid", str(parent_pid), "--log-level", log_level]
    if rank == 0:
        reaper_pipe = _make_directory(directory)
        ours = {RENDEZVOUS_DIR: str(directory), PARENT: str(os.getpid())}
        service = subprocess.Popen(
            service_command, stdin=subprocess.DEVNULL, env={**environment, **ours}, pass_fds=(reaper_pipe,)
        )
        _publish_pid(directory / _SERVICE, service.pid)
    options += ["--engine-pid", _wait_for_pid(directory / _SERVICE)]
    _publish_pid(_pid_file(directory, rank), os.getpid())
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", worker_module, *options], without_secrets(environment))


def die_with_rank_0() -> None:
    """Let the kernel send the service SIGTERM when rank 0 ends, so that it gives its jobs back at once. Does nothing in
    another process. Call it after the ranks have started: a failed start ends rank 0, and has to report the reason."""
    parent_pid = os.environ.get(PARENT)
    if parent_pid is not None:
        die_with_parent(int(parent_pid), signal.SIGTERM)


def _has_lost_rank_0() -> bool:
    return PARENT in os.environ and os.getppid() != int(os.environ[PARENT])


def _is_orphan(parent_pid: int) -> bool:
    """Whether torchrun has ended, so that process 1 is the parent. A Python as process 1 is torchrun in a container."""
    return parent_pid == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes()


def _is_torchrun_variable(name: str) -> bool:
    """Whether this is a variable of torchrun. With those torch.distributed would use torchrun's store instead of ours."""
    return name in _TORCHRUN_NAMES or name.startswith(_TORCHRUN_PREFIX)


def _rendezvous_dir(environment: Mapping[str, str], parent_pid: int) -> Path:
    """Return the directory of this start of the group, the same for all ranks and different from that of any other start.
    Each rank has to be a direct child of torchrun: a script between the two has to `exec`."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    key = ":".join([str(parent_pid), *(environment.get(name, "") for name in names)])
    return socket_directory(f"millrace-{hashlib.sha256(key.encode()).hexdigest()[:16]}")


def _make_directory(directory: Path) -> int:
    """Make the directory, and remove what a killed group left in it. Returns a pipe for the service: a shell removes the
    directory when no process holds it any more. Raises ValueError when the directory is another user's."""
    # torchrun sends SIGTERM to rank 0 and the service at once. Before the service has opened its socket, which may take
    # minutes while it downloads a model, neither of them removes the directory.
    if directory.exists():
        _check_owner(directory)
        shutil.rmtree(directory)
    command = ["/bin/sh", "-c", 'read -r line; rm -rf -- "$0"', str(directory)]
    reader, writer = os.pipe()
    null = subprocess.DEVNULL
    subprocess.Popen(command, stdin=reader, stdout=null, stderr=null, cwd="/", start_new_session=True)
    os.close(reader)
    directory.mkdir(mode=0o700)
    return writer


def _publish_pid(pid_file: Path, pid: int) -> None:
    """Write the file in one step, so that no reader sees a part of it."""
    draft = pid_file.with_suffix(".draft")
    draft.write_text(str(pid))
    draft.rename(pid_file)


def _wait_for_pid(pid_file: Path) -> str:
    """Wait for the file, and return its content."""
    deadline_s = time.monotonic() + _RENDEZVOUS_LIMIT_S
    while not pid_file.exists():
        if time.monotonic() > deadline_s:
            raise ValueError(f"executor: rank 0 did not make {pid_file.parent} within {_RENDEZVOUS_LIMIT_S:g} s")
        time.sleep(_POLL_EVERY_S)
    _check_owner(pid_file.parent)
    return pid_file.read_text()


def _pid_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}"


def _check_owner(directory: Path) -> None:
    status = directory.lstat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700 or not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"executor: {directory} does not belong to this user alone; remove it")
