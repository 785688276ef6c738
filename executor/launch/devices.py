"""The GPUs of this host, found without torch, and the locks that keep two engines from the same GPU."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import subprocess
import time
from pathlib import Path

logger = logging.getLogger("millrace.executor")

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_UUID = re.compile(r"(?:GPU|MIG)-[\w/-]+")
_LIST_LIMIT_S = 60.0
_POLL_S = 1.0
_NUM_FOLDER_TRIES = 10
_FOLDER_POLL_S = 0.1


class _Locked(Exception):
    """Raised when other processes hold locks that this engine needs. Its text says which."""


def num_visible_gpus() -> int | None:
    """Return the number of GPUs that ranks on this host can use. None: there is none, and ranks run on the CPU."""
    named = os.environ.get(_VISIBLE)
    if named is not None:
        return len([name for name in named.split(",") if name.strip() and name.strip() != "-1"]) or None
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]) or None


def lock_free_gpus(number: int, folder: Path) -> None:
    """Lock `number` GPUs that no other engine has locked, all or none, and name them to the ranks in CUDA_VISIBLE_DEVICES.

    Waits until they are free. A lock is on a file in `folder` with the GPU's UUID as its name; the kernel releases it when
    this process ends, however it ends. Without GPUs, and where the environment names them by number, nothing is locked.
    Raises ValueError when there are too few GPUs or the folder cannot be used.
    """
    uuids = gpu_uuids()
    if not uuids:
        return
    if len(uuids) < number:
        raise ValueError(f"device: auto needs {number} GPUs, this host has {len(uuids)}; use smaller sizes")
    try:
        locked = _wait_for_locks(uuids, number, folder)
    except OSError as error:
        raise ValueError(f"device_locks: {folder} cannot be used: {error}; name another folder") from error
    os.environ[_VISIBLE] = ",".join(locked)
    logger.info("device: %s, locked in %s", os.environ[_VISIBLE], folder)


def gpu_uuids() -> list[str]:
    """Return the UUIDs of the GPUs, or of their MIG parts, that ranks on this host can use; none if they are not known."""
    named = os.environ.get(_VISIBLE)
    if named is not None:
        names = [name.strip() for name in named.split(",")]
        return names if all(_UUID.fullmatch(name) for name in names) else []
    try:
        # Not torch: it would make a CUDA context in this process, which takes memory of the GPU.
        ran = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_LIST_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        if num_visible_gpus():
            logger.warning("device: GPUs are used without locks, since nvidia-smi -L fails: %s", error)
        return []
    found: list[str] = _UUID.findall(ran.stdout)
    # A GPU that is divided is listed before its parts.
    followers = [*found[1:], ""]
    return [one for one, next_one in zip(found, followers, strict=True) if one[:3] == "MIG" or next_one[:3] != "MIG"]


def _wait_for_locks(uuids: list[str], number: int, folder: Path) -> list[str]:
    """Return `number` GPUs, once they are locked. Log what the engine waits for."""
    reported = ""
    while True:
        try:
            return _lock_some(uuids, number, folder)
        except _Locked as reason:
            if str(reason) != reported:
                reported = str(reason)
                state = f"{number} of {len(uuids)} GPUs; {reported}"
                logger.warning("device: waiting for %s (--device cuda uses a GPU without a lock)", state)
        time.sleep(_POLL_S)


def _lock_some(uuids: list[str], number: int, folder: Path) -> list[str]:
    """Return `number` GPUs, which are locked now. Raises `_Locked`."""
    _make(folder)
    choice = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # a FIFO of this name would let the engine hang
    try:
        _lock_folder(choice, folder)  # otherwise two engines could each take a part of what both need
        with contextlib.ExitStack() as locks:
            locked: list[str] = []
            for uuid in uuids:
                lock = _open(folder / uuid.replace("/", "_"))
                locks.callback(os.close, lock)
                if _try_lock(lock):
                    locked.append(uuid)
                if len(locked) == number:
                    locks.pop_all()  # open until this process ends
                    return locked
        raise _Locked(f"other engines hold the locks in {folder}")
    finally:
        os.close(choice)


def _lock_folder(choice: int, folder: Path) -> None:
    """Raises `_Locked` if another process has locked the folder for longer than an engine takes to choose."""
    for _ in range(_NUM_FOLDER_TRIES):
        if _try_lock(choice):
            return
        time.sleep(_FOLDER_POLL_S)
    raise _Locked(f"another process holds the lock on the folder {folder}")


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make(folder: Path) -> None:
    """Make the folder if it is missing, so that every user of this host can lock in it."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return
    folder.chmod(0o1777)


def _open(file: Path) -> int:
    """Return a descriptor of a lock file, which is made if it is missing. Raises OSError, also if it is no regular file."""
    # Every user of this host can put a link there, or a FIFO, which waits for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            lock = os.open(file, flags)  # without O_CREAT, which the kernel may refuse for another user's file
        except FileNotFoundError:
            lock = os.open(file, flags | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{file} is a symbolic link") from error
        raise
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        raise OSError(f"{file} is not a regular file")
    return lock
