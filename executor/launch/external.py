"""`ExternalLauncherExecutor`: torchrun starts the ranks, watches them, and starts the whole group again.

    torchrun --nproc-per-node 2 --max-restarts 3 --no-python millrace serve --executor external ...

Each process that torchrun starts is `millrace serve`, finds torchrun's variables, and becomes a rank. Before it does, rank 0
starts the engine service as its child, which holds no device:

    torchrun -+- rank 0 --- engine service      meets the ranks in a directory that only this user can enter
              '- rank 1

The lives are tied: when a rank ends, the service gives its jobs back to the queue and ends; when the service ends, rank 0
ends as it did, and the others with 0. Ranks that have failed or were told to go wait for that; those that stand still the
service kills. torchrun then starts the group again, up to --max-restarts times (by default never), and the new service goes
on with the jobs' tokens so far. When torchrun itself ends, all of them do.
"""

from __future__ import annotations

import hashlib
import logging
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from millrace.executor.errors import StartError
from millrace.executor.launch.directory_reaper import DirectoryReaper, temporary_directory
from millrace.executor.launch.process import End, RankHandle, close_all, python_path
from millrace.executor.rank.serve import DUMP_SIGNAL, die_with_parent
from millrace.executor.remote import RemoteExecutor
from millrace.executor.wire.channel import Channel, socket_address
from millrace.executor.wire.messages import ModelFacts

logger = logging.getLogger("millrace.executor")

RENDEZVOUS_DIR = "MILLRACE_EXTERNAL_DIRECTORY"
"""Set for the service by rank 0: the directory where it meets the ranks."""
PARENT = "MILLRACE_EXTERNAL_PARENT"
"""Set with it: process id of rank 0."""

COMMAND_LINE = "torchrun --nproc-per-node N --max-restarts 3 --no-python millrace serve --executor external ..."

_TORCHRUN_PREFIX = "TORCHELASTIC_"
_TORCHRUN_NAMES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    }
)
_RENDEZVOUS_LIMIT_S = 60.0
_LISTEN_EVERY_S = 0.02
_SERVICE = "engine-service"
"""Name of the note that says which process the service is."""
_LIFE = 1
"""torchrun makes new processes for a new life, the service's among them."""


class ExternalLauncherExecutor(RemoteExecutor):
    """Owns the service's end of the wire to ranks that somebody else starts and ends."""

    name = "external"
    can_restart = False

    def _open_channel(self) -> Channel:
        directory = os.environ.get(RENDEZVOUS_DIR)
        if directory is None:
            message = f"executor external is for `millrace serve` under torchrun: {COMMAND_LINE}"
            raise StartError("spawn", 0, message, is_retryable=False)
        return Channel(_LIFE, self.world_size, directory=directory)

    def _launch(self, channel: Channel) -> list[ExternalRank]:
        directory = Path(os.environ[RENDEZVOUS_DIR])
        deadline_s = time.monotonic() + self._limits.phase_s["spawn"]
        ranks: list[ExternalRank] = []
        for rank in range(self.world_size):
            while not (note := _note(directory, rank)).exists():
                if _has_lost_rank_0():
                    raise StartError("spawn", 0, "its process has ended", is_retryable=True)
                if time.monotonic() > deadline_s:
                    raise StartError("spawn", rank, "torchrun did not start it", is_retryable=True)
                time.sleep(0.02)
            ranks.append(ExternalRank(rank, int(note.read_text())))
        return ranks

    def _start_workers(self) -> list[ModelFacts]:
        if self._num_starts > 1:
            message = "only torchrun can start the ranks again, and does with --max-restarts"
            raise StartError("spawn", 0, message, is_retryable=False)
        return super()._start_workers()

    def _let_go(self) -> Sequence[RankHandle]:
        """None: a rank that does not stand still ends after this process, so that torchrun sees how this one has ended, and
        not that ranks were killed. One that does would never end, and is killed here."""
        handles = super()._let_go()
        silent = list(handles)
        try:
            self._wait_for_life(silent)
        finally:  # a second signal may have ended the wait
            for handle in silent:
                logger.error("rank %d stands still, and is killed", handle.rank)
                handle.kill()
            close_all(silent)
            for handle in handles:
                if handle not in silent:
                    handle.close()
        return ()

    def _wait_for_life(self, silent: list[RankHandle]) -> None:
        """Take those out that end or give a sign of life from now on. Blocks until all have, a second mostly: a rank that
        computes or waits for another has its heartbeat, but not always while it starts."""
        limit_s = self._limits.busy_heartbeat_s if self._watchdog is None else self._limits.shutdown_s
        deadline_s = time.monotonic() + limit_s
        self._hear()  # what was sent before
        while silent and time.monotonic() < deadline_s:
            time.sleep(_LISTEN_EVERY_S)
            heard = self._hear()
            silent[:] = [handle for handle in silent if handle.rank not in heard and not handle.wait(0)]

    def _hear(self) -> set[int]:
        """The ranks of which something has come."""
        return set() if self._channel is None else {rank for rank, _ in self._channel.receive()}

    def _kill_stuck(self) -> None:
        """Those without a heartbeat. One that waits for them, or is in a step that does not end, ends after this process."""
        assert self._watchdog is not None
        now_s = time.monotonic()
        for handle in self._handles:
            if self._watchdog.silence_s(handle.rank, now_s) > self._limits.shutdown_s:
                handle.kill()


class ExternalRank:
    """A rank on this host that is not our child: it can be watched and signalled. Implements `RankHandle`."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise StartError("spawn", rank, "its process has ended", is_retryable=True) from error

    def __repr__(self) -> str:
        return f"ExternalRank(rank={self.rank}, pid={self.pid})"

    def fileno(self) -> int:
        return self._pidfd

    def end(self) -> End | None:
        if not self.wait(0):
            return None
        reason = "its process has ended, and torchrun knows how; with --max-restarts it starts the group again"
        return End(reason, is_killed=False, is_retryable=True)

    def dump_stacks(self) -> None:
        self._signal(DUMP_SIGNAL)

    def wait(self, timeout_s: float) -> bool:
        return bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        os.close(self._pidfd)

    def _signal(self, number: signal.Signals) -> None:
        if not self.wait(0):
            signal.pidfd_send_signal(self._pidfd, number)


# --- in the processes that torchrun starts ---


def is_torchrun_rank(environment: Mapping[str, str]) -> bool:
    """Whether torchrun started this process and it has not become what it shall be yet."""
    return "TORCHELASTIC_RUN_ID" in environment and "RANK" in environment


def become_rank(
    service_command: Sequence[str], *, worker_module: str = "millrace.worker", log_level: str = "INFO"
) -> NoReturn:
    """Replace this process with the rank that torchrun numbered it. Rank 0 starts the service with `service_command`.

    Raises ValueError when the ranks are spread over several hosts, and when torchrun has ended already.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != int(os.environ.get("LOCAL_WORLD_SIZE", world_size)):
        raise ValueError("executor: external runs the ranks of one host; for several hosts take ray")
    parent_pid = os.getppid()
    directory = _rendezvous_dir(os.environ, parent_pid)
    if _is_orphan(parent_pid):
        raise ValueError("executor: torchrun has ended, and so do its ranks")
    environment = {name: value for name, value in os.environ.items() if not _is_torchruns(name)}
    environment["PYTHONPATH"] = python_path()
    options = ["--address", socket_address(str(directory)), "--identity", f"{rank}.{_LIFE}"]
    options += ["--parent-pid", str(parent_pid), "--log-level", log_level]
    if rank == 0:
        reaper = _make_private(directory)
        ours = {RENDEZVOUS_DIR: str(directory), PARENT: str(os.getpid())}
        service = subprocess.Popen(
            service_command, stdin=subprocess.DEVNULL, env={**environment, **ours}, pass_fds=(reaper.fd,)
        )
        _publish_pid(directory / _SERVICE, service.pid)
    options += ["--engine-pid", _wait_for_pid(directory / _SERVICE)]
    _publish_pid(_note(directory, rank), os.getpid())
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", worker_module, *options], environment)


def die_with_rank_0() -> None:
    """For the service: SIGTERM when rank 0 ends, so that the jobs go back to the queue at once. Else does nothing.

    Not before the ranks are up: a start that fails ends them, and has to say why afterwards.
    """
    parent_pid = os.environ.get(PARENT)
    if parent_pid is not None:
        die_with_parent(int(parent_pid), signal.SIGTERM)


def _has_lost_rank_0() -> bool:
    return PARENT in os.environ and os.getppid() != int(os.environ[PARENT])


def _is_orphan(parent_pid: int) -> bool:
    """Whether torchrun ended before this process could tie its life to it. In a container torchrun may be process 1 itself,
    but that is a Python then."""
    return parent_pid == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes()


def _is_torchruns(name: str) -> bool:
    """Variables that would make torch.distributed look for torchrun's store instead of ours."""
    return name in _TORCHRUN_NAMES or name.startswith(_TORCHRUN_PREFIX)


def _rendezvous_dir(environment: Mapping[str, str], parent_pid: int) -> Path:
    """The same for all ranks of one start of the group, and for no other. Each of them has to be torchrun's own child: a
    script between the two has to `exec`."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    told = ":".join([str(parent_pid), *(environment.get(name, "") for name in names)])
    parent = temporary_directory()
    name = f"millrace-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    return (parent if len(str(parent)) < 40 else Path("/tmp")) / name


def _make_private(directory: Path) -> DirectoryReaper:
    """Make it anew, to be swept by a reaper that this process does not keep over `exec`: the service has to hold it. What a
    killed group left there is removed. Raises ValueError when it is somebody else's."""
    if directory.exists():
        _check_ours(directory)
        shutil.rmtree(directory)
    reaper = DirectoryReaper(str(directory))
    directory.mkdir(mode=0o700)
    return reaper


def _publish_pid(note: Path, pid: int) -> None:
    """Tell the others which process this is."""
    draft = note.with_suffix(".draft")
    draft.write_text(str(pid))
    draft.rename(note)


def _wait_for_pid(note: Path) -> str:
    """What rank 0 has left."""
    deadline_s = time.monotonic() + _RENDEZVOUS_LIMIT_S
    while not note.exists():
        if time.monotonic() > deadline_s:
            raise ValueError(f"executor: rank 0 did not make {note.parent} within {_RENDEZVOUS_LIMIT_S:g} s")
        time.sleep(0.02)
    _check_ours(note.parent)
    return note.read_text()


def _note(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}"


def _check_ours(directory: Path) -> None:
    status = directory.lstat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700 or not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"executor: {directory} is not this user's own; remove it")
