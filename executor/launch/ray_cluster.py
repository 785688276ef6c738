"""Which Ray there is to use: the cluster that is known here, or a local Ray of our own.

`python -P -m executor.ray_cluster DIRECTORY` is the reaper: a child of the process that owns a local Ray, which clears up
behind it, however that process ended. Ray's own helpers outlive a killed owner by up to a minute, and its files for ever.
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

from millrace.executor.launch.directory_reaper import temporary_directory
from millrace.executor.launch.process import PACKAGE_ROOT

logger = logging.getLogger("millrace.executor")

_LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Has a local Ray listen on 127.0.0.1 and nowhere else; must be there before `import ray`."""
_TOKEN = secrets.token_hex(32)
"""For every local Ray of this process: Ray reads it once."""
_ANSWER_LIMIT_S = 2.0
_REAPER_LIMIT_S = 30.0


def known_address() -> str | None:
    """Of the cluster that RAY_ADDRESS names, else of one that was started on this host and still answers. A cluster that
    was killed leaves its address behind, so that one is tried."""
    named = os.environ.get("RAY_ADDRESS")
    if named:
        return named
    temporary = os.environ.get("RAY_TMPDIR") or temporary_directory()
    with contextlib.suppress(OSError):
        address = Path(temporary, "ray", "ray_current_cluster").read_text().strip()
        if does_answer(address):
            return address
    return None


def does_answer(address: str) -> bool:
    """Whether somebody listens at "host:port". Ray itself takes minutes to find out that nobody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_LIMIT_S).close()
    except (OSError, ValueError):
        return False
    return True


class LocalRay:
    """Owns a Ray on this host for this process alone: on the loopback interface, with a token that only this user reads."""

    def __init__(self, num_cpus: int, num_gpus: int = 0) -> None:
        """Before `import ray`, which reads the environment."""
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self.directory = tempfile.mkdtemp(prefix="mr-ray-", dir="/tmp")  # Ray's socket paths are long already
        token = Path(self.directory, "token")
        try:
            token.touch(mode=0o600)
            token.write_text(_TOKEN)
            self._reaper = _start_reaper(self.directory)
        except BaseException:  # nobody else would sweep
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        os.environ.update(_LOOPBACK_ONLY)
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)

    def start(self) -> None:
        """Returns when it takes work."""
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
        logger.info(
            "started a local Ray in %.1f s; ranks on several hosts need RAY_ADDRESS", time.monotonic() - began_s
        )

    def stop(self) -> None:
        """Returns when no process and no file of it is left, also of one that did not start."""
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
        start_new_session=True,  # Ctrl-C is not for it: it ends after its owner
    )


def _reap(directory: str) -> None:
    """Wait for the owner to let go of our standard input, at the latest by its end; then end what is left of its Ray."""
    owner_pid = os.getppid()
    sys.stdin.read()
    while pids := users_of(directory) - {owner_pid, os.getpid()}:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(directory, ignore_errors=True)


def users_of(directory: str) -> set[int]:
    """Processes of this user that have a file in the directory open, such as their log: so have all of Ray's."""
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
