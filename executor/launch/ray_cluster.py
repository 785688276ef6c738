"""Finds a running Ray cluster, or starts a local Ray.

`python -P -m millrace.executor.launch.ray_cluster DIRECTORY` is the reaper of a local Ray: a child of the process that
owns the Ray. When that process ends, even by SIGKILL, the reaper ends Ray's processes and removes its files. By
themselves Ray's processes would outlive a killed owner by up to a minute, and its files would stay.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from millrace.executor.launch.process import PACKAGE_ROOT

logger = logging.getLogger("millrace.executor")

_LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Lets a local Ray listen on 127.0.0.1 only. Has to be set before `import ray`."""
_TOKEN = secrets.token_hex(32)
"""The same for every local Ray of this process, since Ray reads it once."""
_ANSWER_LIMIT_S = 2.0
_REAPER_LIMIT_S = 30.0


def is_joined() -> bool:
    """Whether this process has joined a cluster."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def known_address() -> str | None:
    """Return the address of the cluster that RAY_ADDRESS names, else of one that was started on this host and answers:
    the address file of a killed cluster stays."""
    named = os.environ.get("RAY_ADDRESS")
    if named:
        return named
    temporary = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    with contextlib.suppress(OSError):
        address = Path(temporary, "ray", "ray_current_cluster").read_text().strip()
        if does_answer(address):
            return address
    return None


def does_answer(address: str) -> bool:
    """Whether a server listens at "host:port". Ray itself needs minutes to find that out."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_LIMIT_S).close()
    except (OSError, ValueError):
        return False
    return True


class LocalRay:
    """Owns a Ray on this host for this process: on the loopback interface, with a token that only this user can read."""

    def __init__(self, num_cpus: int, num_gpus: int = 0) -> None:
        """Call it before `import ray`, which reads the environment."""
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self.directory = tempfile.mkdtemp(prefix="mr-ray-", dir="/tmp")  # Ray's socket paths are long already
        token = Path(self.directory, "token")
        try:
            token.touch(mode=0o600)
            token.write_text(_TOKEN)
            self._reaper = _start_reaper(self.directory)
        except BaseException:  # there is no reaper yet
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        os.environ.update(_LOOPBACK_ONLY)
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)

    def start(self) -> None:
        """Start Ray, and return when it is ready."""
        began_s = time.monotonic()
        importlib.import_module("ray").init(
            address="local",
            num_cpus=self._num_cpus,
            num_gpus=self._num_gpus,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=80 << 20,
            _temp_dir=self.directory,
        )
        logger.info("started a local Ray in %.1f s; set RAY_ADDRESS to use a cluster", time.monotonic() - began_s)

    def stop(self) -> None:
        """Return when no process and no file of it is left, even if `start` failed."""
        importlib.import_module("ray").shutdown()
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        self._reaper.wait(_REAPER_LIMIT_S)
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)


# --- the reaper ---


def _start_reaper(directory: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "millrace.executor.launch.ray_cluster", directory],
        stdin=subprocess.PIPE,
        cwd=PACKAGE_ROOT,
        env={**os.environ, "PYTHONPATH": PACKAGE_ROOT},
        start_new_session=True,  # Ctrl-C must not end it before its owner
    )


def _reap(directory: str) -> None:
    """Wait until the owner closes our standard input, at the latest by its end. Then end what is left of its Ray."""
    owner_pid = os.getppid()
    sys.stdin.read()
    while pids := users_of(directory) - {owner_pid, os.getpid()}:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(directory, ignore_errors=True)


def users_of(directory: str) -> set[int]:
    """Return this user's processes with an open file in the directory. All of Ray's processes have one: their log."""
    pids = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and any(_is_within(link, directory) for link in (entry / "fd").iterdir()):
                pids.add(int(entry.name))
    return pids


def _is_within(link: Path, directory: str) -> bool:
    return os.readlink(link).startswith(directory + os.sep)


if __name__ == "__main__":
    _reap(sys.argv[1])
