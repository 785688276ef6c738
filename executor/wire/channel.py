"""The engine's end of the wire: one ROUTER socket for all ranks of one life of the workers.

On one host it lies in a directory that only this user can enter. Between hosts it is TCP under CURVE: only who holds the
keys of this life gets in. Either way no frame is trusted: what doesn't decode as a message of ours is dropped.
"""

from __future__ import annotations

import logging
import math
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from millrace.executor.launch.directory_reaper import PrivateDirectory
from millrace.executor.wire.messages import FromWorker, StepReply, ToWorker, decode_from_worker, encode

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

logger = logging.getLogger("millrace.executor")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A connection that sends a larger frame is closed by ZeroMQ."""
ENDING_S = 1.0
"""Connections are closed by ZeroMQ, or because a process ends; in the second case its end is mostly seen within this time.
The loss of a whole host is seen later."""

_STRANGERS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Keys(msgspec.Struct, frozen=True):
    """CURVE keys that a rank needs to get in, as Z85 text."""

    server_public: str
    public: str
    secret: str


class Channel:
    """Owns the socket between the engine and the ranks of one life, and the directory that it lives in."""

    def __init__(self, life: int, world_size: int, *, directory: str | None = None, host: str | None = None) -> None:
        """`host`: listen there on a free TCP port, with keys. Else in `directory`, or in a new private one."""
        self.life = life
        self.num_dropped = 0
        self.step_reply_bytes = 0
        """Payload of all replies to steps so far."""
        self.has_ended = False
        """Whether a watched process had ended at the last `wait`."""
        self.keys: Keys | None = None
        self._ranks = {f"{rank}.{life}".encode(): rank for rank in range(world_size)}
        self._hearts = {f"{rank}.{life}.beat".encode(): rank for rank in range(world_size)}
        self._remove_directory: Callable[[], object] | None = None
        """The one with the socket's file, until nobody looks for it any more."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._guard: ThreadAuthenticator | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._monitor = self._socket.get_monitor_socket(_STRANGERS | zmq.EVENT_DISCONNECTED)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._watched: set[int] = set()
        self._closed_s: list[float] = []
        """When connections were closed of which it is not known yet whether their process ended."""
        self._num_leaving = 0
        """Strangers that were turned away and whose connection is still to be closed."""
        self._warned_of: set[str] = set()
        if host is not None:
            self._lock_door()
        try:
            self.address = self._bind(host, directory)
        except BaseException:
            self.close()
            raise

    def _bind(self, host: str | None, directory: str | None) -> str:
        """A directory of our own is made last, when nothing but the binding can fail that would leave it behind."""
        if host is None:
            if directory is None:
                private = PrivateDirectory()
                directory, self._remove_directory = private.path, private.remove
            else:
                self._remove_directory = partial(shutil.rmtree, directory, ignore_errors=True)
            self._socket.bind(socket_address(directory))
        else:
            self._socket.bind(f"tcp://{host}:*")
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _lock_door(self) -> None:
        """CURVE with keys made for this life: the ranks know the server, and the server knows one client key."""
        server_public, server_secret = zmq.curve_keypair()
        public, secret = zmq.curve_keypair()
        self.keys = Keys(server_public.decode(), public.decode(), secret.decode())
        from zmq.auth.thread import ThreadAuthenticator

        self._guard = ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback(domain="*", credentials_provider=_OneKey(public))
        self._socket.curve_server = True
        self._socket.curve_secretkey = server_secret

    def __repr__(self) -> str:
        return f"Channel(life={self.life}, address={self.address})"

    def identity(self, rank: int) -> str:
        """What the rank calls itself: a process of an older life can't be taken for one of this life."""
        return f"{rank}.{self.life}"

    def watch(self, fd: int) -> None:
        """Let `wait` end when this descriptor becomes readable: the process behind it has ended."""
        self._watched.add(fd)
        self._poller.register(fd, zmq.POLLIN)

    def send(self, rank: int, payload: bytes) -> None:
        """Queue an encoded `ToWorker` for the rank."""
        self._socket.send_multipart([self.identity(rank).encode(), payload])

    def send_to_heartbeat(self, rank: int, message: ToWorker) -> None:
        """For the rank's heartbeat thread, which also answers while the rank is busy."""
        self._socket.send_multipart([f"{rank}.{self.life}.beat".encode(), encode(message)])

    def wait(self, timeout_s: float) -> None:
        """Until something can be received, a watched process ended, or the time is up."""
        for source, _ in self._poller.poll(math.ceil(max(0.0, timeout_s) * 1000)):
            if source in self._watched:
                self.has_ended = True
            elif source is self._monitor:
                self._notice_stranger()
        self._judge_closings()

    def receive(self) -> Iterable[tuple[int, FromWorker]]:
        """All that has arrived, as (rank, message). What isn't ours is dropped, counted, and logged the first time."""
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
                rank = self._hearts.get(identity)
            if rank is None:
                raise ValueError("of no rank of this life")
            message = decode_from_worker(payload)
            if isinstance(message, StepReply):
                self.step_reply_bytes += len(payload)
            return rank, message
        except (ValueError, msgspec.MsgspecError) as error:
            self.num_dropped += 1
            self._warn("garbage", f"dropped a message that no worker of ours sent ({error})")
            return None

    def _notice_stranger(self) -> None:
        """Of most strangers ZeroMQ tells twice, that it was turned away and then that its connection was closed. It does not
        say which two belong together: one closing is passed over for each."""
        event = recv_monitor_message(self._monitor)["event"]
        if event & _STRANGERS:
            self.num_dropped += 1
            self._num_leaving += 1
            self._warn("strangers", "a stranger tried to connect and was turned away")
        elif self._num_leaving:
            self._num_leaving -= 1
        else:
            self._closed_s.append(time.monotonic())

    def _judge_closings(self) -> None:
        """A closed connection is a matter of course when a rank has ended; else ZeroMQ may have closed it."""
        if self.has_ended:
            self._closed_s.clear()
        while self._closed_s and time.monotonic() - self._closed_s[0] > ENDING_S:
            del self._closed_s[0]
            self.num_dropped += 1
            limit_mib = MAX_MESSAGE_BYTES // 2**20
            message = "a connection was closed, and no process is known to have ended; ZeroMQ closes those"
            self._warn(
                "size", f"{message} that send a frame of more than {limit_mib} MiB, or do not speak its protocol"
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned_of:
            self._warned_of.add(kind)
            logger.warning("%s; any more of it is only counted", message)

    def forget_address(self) -> None:
        """Remove the socket's file once every rank is connected. Before that a reaper does it, should we be killed."""
        remove, self._remove_directory = self._remove_directory, None
        if remove is not None:
            remove()

    def close(self) -> None:
        """Close the socket and remove its file. Once."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()
        self.forget_address()


class _OneKey:
    """Lets one client key in."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """`key` comes as Z85 text already."""
        return secrets.compare_digest(key, self._public)


def socket_address(directory: str) -> str:
    """Where the socket in this directory is reached."""
    return f"ipc://{directory}/executor.sock"
