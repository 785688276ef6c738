"""The GPUs of this host, found without torch, and the locks that keep two engines from the same GPU."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import subprocess
import time
from pathlib import Path

logger = logging.getLogger("millrace.executor")

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_UUID = re.compile(r"(?:GPU|MIG)-[\w/-]+")
_LIST_LIMIT_S = 60.0
_POLL_S = 1.0


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
        locked = _lock_some(uuids, number, folder)
        if not locked:
            state = f"{number} of {len(uuids)} GPUs; other engines hold the locks in {folder}"
            logger.warning("device: waiting for %s (--device cuda uses a GPU without a lock)", state)
        while not locked:
            time.sleep(_POLL_S)
            locked = _lock_some(uuids, number, folder)
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


def _lock_some(uuids: list[str], number: int, folder: Path) -> list[str]:
    """Return `number` GPUs, which are locked now, or none."""
    _make(folder)
    choice = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(choice, fcntl.LOCK_EX)  # otherwise two engines could each take a part of what both need
        locks: dict[str, int] = {}
        for uuid in uuids:
            lock = _open(folder / uuid.replace("/", "_"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            locks[uuid] = lock
            if len(locks) == number:
                return list(locks)  # open until this process ends
        for lock in locks.values():
            os.close(lock)
        return []
    finally:
        os.close(choice)


def _make(folder: Path) -> None:
    """Make the folder if it is missing, so that every user of this host can lock in it."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return
    folder.chmod(0o1777)


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY)  # without O_CREAT, which the kernel may refuse for another user's file
    except FileNotFoundError:
        return os.open(file, os.O_RDONLY | os.O_CREAT, 0o644)
