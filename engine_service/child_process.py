"""A process that answers an engine's questions, so that no question can hang the engine or take its memory.

Messages are JSON behind their length in 4 bytes: like a request, they may have integers of more than 64 bits. The process
ends when the engine closes the socket.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys

import msgspec

from millrace.executor.environment import without_secrets

_LENGTH = struct.Struct("<I")


class ChildProcess:
    """Owns one process and the socket to it."""

    def __init__(self, module: str, first: msgspec.Struct, wait_s: float) -> None:
        """The process runs the main program of `module`, which begins with `open_channel`. `first`: its first message, for
        which there are `wait_s` if it is longer than the socket's buffer."""
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(wait_s)
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-P", "-m", module, str(fd)]
            # Its input is hostile, so a bug in a parser must not reach the engine's logins.
            environment = without_secrets(os.environ)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[fd])
        send(self._channel, first)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: msgspec.Struct, wait_s: float) -> bytes | None:
        """Return the answer. None: the process has ended. Raises `TimeoutError` if it neither ends nor answers."""
        self._channel.settimeout(wait_s)
        try:
            send(self._channel, question)
            return receive(self._channel)
        except ConnectionError:
            return None

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


def open_channel() -> socket.socket:
    """Return the socket to the engine. For the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine
    return socket.socket(fileno=int(sys.argv[1]))


def limit_memory(num_bytes: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def send(channel: socket.socket, message: msgspec.Struct) -> None:
    raw = msgspec.json.encode(message)
    channel.sendall(_LENGTH.pack(len(raw)) + raw)


def receive(channel: socket.socket) -> bytes | None:
    """Return the next message, or None at the end."""
    header = _read(channel, _LENGTH.size)
    return _read(channel, _LENGTH.unpack(header)[0]) if header else None


def _read(channel: socket.socket, num_bytes: int) -> bytes | None:
    raw = bytearray()
    while len(raw) < num_bytes:
        piece = channel.recv(num_bytes - len(raw))
        if not piece:
            return None
        raw += piece
    return bytes(raw)
