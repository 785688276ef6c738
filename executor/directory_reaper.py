"""Directories that are removed when their owner ends, even by SIGKILL: a shell waits for that end."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

MAX_DIRECTORY_BYTES = 107 - len("/executor.sock")
"""The path of a unix socket has at most 107 bytes."""
_REAP = 'read -r line; rm -rf -- "$0"'  # waits for one line, or for the end of input when no process holds the pipe


class DirectoryReaper:
    """Owns a shell that removes a directory once no process holds `fd`. The directory need not exist yet."""

    def __init__(self, directory: str) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _REAP, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C must not end it before its owner
        )
        assert self._shell.stdin is not None
        self._pipe = self._shell.stdin

    @property
    def fd(self) -> int:
        """The pipe. Pass it to the processes that use the directory too; it is not inherited otherwise."""
        return self._pipe.fileno()

    def close(self) -> None:
        """Remove the directory now, even if another process holds `fd`. Blocks until it is removed. Call it once."""
        with contextlib.suppress(BrokenPipeError):  # the shell was killed
            self._pipe.write(b"\n")
            self._pipe.close()
        self._shell.wait()


class PrivateDirectory:
    """Owns a new directory that only this user can enter. Its path is short enough for a unix socket in it."""

    def __init__(self) -> None:
        self.path = str(socket_directory(f"millrace-{secrets.token_hex(6)}"))
        self._reaper = DirectoryReaper(self.path)  # before there is a directory to remove
        try:
            os.mkdir(self.path, 0o700)
        except BaseException:
            self._reaper.close()
            raise

    def remove(self) -> None:
        """Call it once."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._reaper.close()


def socket_directory(name: str) -> Path:
    """Return a path with this name for the directory of a socket: in `temporary_directory()`, or in /tmp if it would be too
    long."""
    path = temporary_directory() / name
    return path if len(os.fsencode(path)) <= MAX_DIRECTORY_BYTES else Path("/tmp", name)


def temporary_directory() -> Path:
    """Return the directory for temporary files that `tempfile.gettempdir` would return, without writing to it."""
    # gettempdir creates a trial file. If the process is killed before it removes that file, the file stays.
    if tempfile.tempdir is not None:
        return Path(tempfile.tempdir)
    candidates = [*(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")), "/tmp", "/var/tmp"]
    usable = (path for path in candidates if path and os.access(path, os.W_OK | os.X_OK))
    return Path(next(usable, "/tmp")).absolute()
