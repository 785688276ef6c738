"""A directory that is gone when its owner is, even by SIGKILL: a shell waits for that, and sweeps."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

MAX_DIRECTORY_BYTES = 107 - len("/executor.sock")
"""A unix socket's path may have 107 bytes."""
_REAP = 'read -r line; rm -rf -- "$0"'  # until it is told, or its input ends with the last that holds the other end


class DirectoryReaper:
    """Owns a shell that removes a directory, which may come into being later, as soon as nobody holds `fd` any more."""

    def __init__(self, directory: str) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _REAP, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C is not for it: it ends after its owner
        )
        assert self._shell.stdin is not None
        self._pipe = self._shell.stdin

    @property
    def fd(self) -> int:
        """For processes that shall hold it too; others do not inherit it."""
        return self._pipe.fileno()

    def close(self) -> None:
        """Have it swept now, whoever else holds `fd`, also unasked: a process that was forked meanwhile. Returns when the
        directory has been removed. Once."""
        with contextlib.suppress(BrokenPipeError):  # the shell was killed
            self._pipe.write(b"\n")
            self._pipe.close()
        self._shell.wait()


class PrivateDirectory:
    """Owns a new directory that only this user can enter, with a path short enough for a unix socket in it."""

    def __init__(self) -> None:
        name = f"millrace-{secrets.token_hex(6)}"
        path = Path(tempfile.gettempdir(), name)
        self.path = str(path if len(os.fsencode(path)) <= MAX_DIRECTORY_BYTES else Path("/tmp", name))
        self._reaper = DirectoryReaper(self.path)  # before there is anything to sweep
        try:
            os.mkdir(self.path, 0o700)
        except BaseException:
            self._reaper.close()
            raise

    def remove(self) -> None:
        """Once."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._reaper.close()
