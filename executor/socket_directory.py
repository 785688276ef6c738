"""The directories of unix sockets."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MAX_DIRECTORY_BYTES = 107 - len("/executor.sock")
"""The path of a unix socket has at most 107 bytes."""


def socket_directory(name: str) -> Path:
    """Return a path with this name for the directory of a socket: in the directory for temporary files, or in /tmp if it
    would be too long."""
    path = Path(tempfile.gettempdir(), name)
    return path if len(os.fsencode(path)) <= MAX_DIRECTORY_BYTES else Path("/tmp", name)
