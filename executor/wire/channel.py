"""The engine's end of the wire: one ROUTER socket for all ranks of one start of the workers.

On one host the socket lies in a directory that only this user can enter. Between hosts it is TCP with CURVE, and only the
holders of this start's keys can connect. Frames are not trusted in either case: what does not decode as a message of ours
is dropped.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import zmq

from millrace.executor.metrics import Recorder
from millrace.executor.socket_directory import socket_directory
from millrace.executor.wire.messages import FromWorker, StepReply, ToWorker, decode_from_worker, encode

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

logger = logging.getLogger("millrace.executor")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""ZeroMQ closes a connection that sends a larger frame."""

_HEARTBEAT = ".beat"
"""Ends the identity of a heartbeat's socket."""


class Keys(msgspec.Struct, frozen=True):
    """The CURVE keys that a rank needs to connect, as Z85 text."""

    server_public: str
    public: str
    secret: str


class Channel:
    """Owns the socket between the engine and the ranks of one start, and the directory of the socket."""

    def __init__(
        self,
        start_id: int,
        world_size: int,
        recorder: Recorder,
        *,
        directory: str | None = None,
        host: str | None = None,
    ) -> None:
        """`start_id`: differs between the starts of one executor. `recorder`: counts replies to steps and what is dropped.
        `host`: listen there on a free TCP port, with keys. Else listen in `directory`, or in a new private one."""
        self.start_id = start_id
        self._recorder = recorder
        self.has_ended = False
        """Whether a watched process had ended at the last `wait`."""
        self.keys: Keys | None = None
        sockets = ((rank, suffix) for rank in range(world_size) for suffix in ("", _HEARTBEAT))
        self._ranks = {f"{self.identity(rank)}{suffix}".encode(): rank for rank, suffix in sockets}
        """By identity: of each rank the main socket and the heartbeat's."""
        self._directory: str | None = None
        """Set while the socket has a file."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._authenticator: ThreadAuthenticator | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._watched: set[int] = set()
        self._has_warned = False
        if host is not None:
            self._enable_curve()
        try:
            self.address = self._bind(host, directory)
        except BaseException:
            self.close()
            raise

    def _bind(self, host: str | None, directory: str | None) -> str:
        if host is not None:
            self._socket.bind(f"tcp://{host}:*")
        else:
            # Set before the directory is made: `close` removes it, also where a signal ends the start.
            self._directory = directory or str(socket_directory(f"millrace-{secrets.token_hex(6)}"))
            if directory is None:
                os.mkdir(self._directory, 0o700)
            self._socket.bind(socket_address(self._directory))
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _enable_curve(self) -> None:
        """Make the keys of this start. The ranks know the server's key, and the server accepts one client key."""
        server_public, server_secret = zmq.curve_keypair()
        public, secret = zmq.curve_keypair()
        self.keys = Keys(server_public.decode(), public.decode(), secret.decode())
        from zmq.auth.thread import ThreadAuthenticator

        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=_OneKey(public))
        self._socket.curve_server = True
        self._socket.curve_secretkey = server_secret

    def identity(self, rank: int) -> str:
        """Return the socket identity of the rank. It differs from that of the same rank of an earlier start."""
        return f"{rank}.{self.start_id}"

    def watch(self, fd: int) -> None:
        """Let `wait` return when this descriptor becomes readable: the process behind it has ended."""
        self._watched.add(fd)
        self._poller.register(fd, zmq.POLLIN)

    def send(self, rank: int, payload: bytes) -> None:
        """Queue an encoded `ToWorker` for the rank."""
        self._socket.send_multipart([self.identity(rank).encode(), payload])

    def send_to_heartbeat(self, rank: int, message: ToWorker) -> None:
        """Queue a message for the rank's heartbeat thread, which answers while the rank is busy."""
        self._socket.send_multipart([f"{self.identity(rank)}{_HEARTBEAT}".encode(), encode(message)])

    def wait(self, timeout_s: float) -> None:
        """Block until something can be received, a watched process has ended, or the timeout has passed."""
        for source, _ in self._poller.poll(math.ceil(max(0.0, timeout_s) * 1000)):
            self.has_ended |= source in self._watched

    def wait_for_message(self, timeout_s: float) -> None:
        """Block until something can be received, or the timeout has passed."""
        self._socket.poll(math.ceil(timeout_s * 1000))

    def receive(self) -> Iterable[tuple[int, FromWorker]]:
        """Yield all messages that have arrived, as (rank, message). Drops and counts what is not a message of ours."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            message = self._decode(frames)
            if message is not None:
                yield message

    def _decode(self, frames: list[bytes]) -> tuple[int, FromWorker] | None:
        try:
            identity, payload = frames
            rank = self._ranks.get(identity)
            if rank is None:
                raise ValueError("its sender is no rank of this start")
            message = decode_from_worker(payload)
            if isinstance(message, StepReply):
                self._recorder.reply_bytes += len(payload)
            return rank, message
        except (ValueError, msgspec.MsgspecError) as error:
            self._recorder.num_stale_replies += 1
            if not self._has_warned:
                self._has_warned = True
                logger.warning("dropped a message that no worker of ours sent (%s); later ones are only counted", error)
            return None

    def remove_socket_file(self) -> None:
        """Remove the directory of the socket once every rank is connected. If this process is killed before, it stays."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def close(self) -> None:
        """Close the socket and remove its file. Call it once."""
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        self.remove_socket_file()


class _OneKey:
    """Accepts one client key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """`key`: as Z85 text."""
        return secrets.compare_digest(key, self._public)


def socket_address(directory: str) -> str:
    """Return the ZeroMQ address of the socket in this directory."""
    return f"ipc://{directory}/executor.sock"


def free_port(host: str) -> int:
    """Return a TCP port that is free on this host at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
