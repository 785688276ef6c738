"""The channel: whose messages it accepts, and what happens to all others."""

from __future__ import annotations

import contextlib
import logging
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import create_connection

import pytest
import zmq

from millrace.executor.metrics import Recorder
from millrace.executor.wire.channel import Channel
from millrace.executor.wire.messages import (
    PROTOCOL,
    Beat,
    Call,
    FromWorker,
    Hello,
    SeqId,
    Step,
    StepId,
    StepPlan,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from tests.executor.kinds import first_step, make_mp, stub_config
from tests.processes import LIMIT_S

HELLO = Hello(pid=1, protocol=PROTOCOL)

CLOSED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""What a client sees when the channel refuses or closes its connection."""


@pytest.fixture
def connect() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """Makes clients of the channel. A client that is refused does not connect again."""
    context = zmq.Context()
    made: list[zmq.Socket[bytes]] = []

    def make(
        address: str, identity: str = "stranger", keys: tuple[bytes, bytes, bytes] | None = None
    ) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt_string(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if keys is not None:
            socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = keys
        socket.get_monitor_socket(CLOSED)
        socket.connect(address)
        made.append(socket)
        return socket

    yield make
    for socket in made:
        monitor = socket.get_monitor_socket()
        socket.disable_monitor()
        monitor.close()
        socket.close(linger=0)
    context.term()


def open_channel(*, is_remote: bool = False) -> Channel:
    return Channel(1, 1, Recorder(), host="127.0.0.1" if is_remote else None)


def receive(channel: Channel, for_s: float = LIMIT_S) -> list[tuple[int, FromWorker]]:
    """Return what arrives until the first message, or within the time."""
    deadline_s = time.monotonic() + for_s
    received: list[tuple[int, FromWorker]] = []
    while not received and time.monotonic() < deadline_s:
        channel.wait(0.05)
        received += channel.receive()
    return received


def is_closed(client: zmq.Socket[bytes]) -> bool:
    """Wait until the channel has refused or closed the client's connection. Returns whether it has in time."""
    return bool(client.get_monitor_socket().poll(int(LIMIT_S * 1000)))


def wait_for_drops(channel: Channel, num_wanted: int) -> int:
    """Wait until `num_wanted` messages are dropped, while nothing is received. Returns the number of dropped ones."""
    deadline_s = time.monotonic() + LIMIT_S
    while channel._recorder.num_stale_replies < num_wanted and time.monotonic() < deadline_s:
        assert receive(channel, 0.05) == []
    return channel._recorder.num_stale_replies


Connect = Callable[..., "zmq.Socket[bytes]"]


def test_messages_of_a_rank_and_of_its_heartbeat_arrive(connect: Connect) -> None:
    channel = open_channel()
    connect(channel.address, "0.1").send(encode(HELLO))
    assert receive(channel) == [(0, HELLO)]
    connect(channel.address, "0.1.beat").send(encode(Beat("idle", 3)))
    assert receive(channel) == [(0, Beat("idle", 3))]
    channel.close()


@pytest.mark.parametrize(
    ("identity", "frames"),
    [
        ("0.1", [b"\xc1 garbage"]),
        ("0.1", [b""]),
        ("0.1", [encode(["Hello", "not a pid"])]),
        ("0.1", [encode(["FromTheFuture", 1])]),
        ("0.1", [encode(HELLO), b"surplus"]),
        ("0.2", [encode(HELLO)]),  # another start
        ("1.1", [encode(HELLO)]),  # no such rank
        ("stranger", [encode(HELLO)]),
        ("0.1", [b"\x80\x04cos\nsystem\n."]),  # a pickle
    ],
)
def test_what_no_rank_of_ours_would_send_changes_nothing_and_is_logged_once(
    identity: str, frames: list[bytes], connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    channel = open_channel()
    socket = connect(channel.address, identity)
    with caplog.at_level(logging.WARNING, "millrace.executor"):
        socket.send_multipart(frames)
        socket.send_multipart(frames)
        assert wait_for_drops(channel, 2) == 2
    assert len(caplog.records) == 1
    channel.close()


def test_oversized_frames_cost_their_senders_the_connection(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.executor.wire.channel.MAX_MESSAGE_BYTES", 2**20)
    channel = open_channel()
    for identity in ("0.1", "stranger"):
        socket = connect(channel.address, identity)
        socket.send(b"x" * (2**20 + 1))
        assert is_closed(socket)
        assert receive(channel, 0.05) == []
    connect(channel.address, "0.1.beat").send(encode(Beat("idle", 0)))
    assert receive(channel) == [(0, Beat("idle", 0))]
    assert channel._recorder.num_stale_replies == 0
    channel.close()


def test_on_one_host_only_this_user_can_enter_the_directory_of_the_socket() -> None:
    channel = open_channel()
    directory = Path(channel.address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    channel.close()
    assert not directory.exists()


@pytest.mark.parametrize("stranger", ["a probe of the port", "no keys", "a wrong key"])
def test_between_hosts_only_a_client_with_the_keys_can_connect(stranger: str, connect: Connect) -> None:
    channel = open_channel(is_remote=True)
    assert channel.keys is not None
    server = channel.keys.server_public.encode()
    if stranger == "a probe of the port":
        host, port = channel.address.removeprefix("tcp://").split(":")
        create_connection((host, int(port))).close()
    else:
        socket = connect(channel.address, "0.1", None if stranger == "no keys" else (server, *zmq.curve_keypair()))
        with contextlib.suppress(zmq.Again):  # without waiting: the connection may have been refused already
            socket.send(encode(HELLO), zmq.NOBLOCK)
        assert is_closed(socket)
    assert receive(channel, 0.05) == []
    ours = (server, channel.keys.public.encode(), channel.keys.secret.encode())
    connect(channel.address, "0.1", ours).send(encode(Beat("idle", 3)))
    assert receive(channel) == [(0, Beat("idle", 3))]
    assert channel._recorder.num_stale_replies == 0
    channel.close()


def test_a_channel_that_can_not_bind_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.executor.socket_directory.MAX_DIRECTORY_BYTES", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(place := tmp_path / ("long" * 30)))
    place.mkdir()
    with pytest.raises(zmq.ZMQError, match="longer than 107"):
        open_channel()
    assert list(place.iterdir()) == []


def test_messages_grow_at_the_end_and_old_readers_skip_what_they_do_not_know() -> None:
    assert decode_from_worker(encode(["Beat", "step", 7, 0.5, "from a later version"])) == Beat("step", 7, 0.5)


def test_messages_survive_the_wire() -> None:
    executor = make_mp(stub_config())
    for message in (Step(1, first_step(executor)), Call(call_id=2, method="stats")):
        assert decode_to_worker(encode(message)) == message


def test_a_step_of_many_sequences_is_a_small_message() -> None:
    """256 that run, after 65,536 others, with contexts of thousands of tokens, at the moment at which each needs a block."""
    blocks = [(SeqId(70_000 + number), 65_000 + number) for number in range(256)]
    assert len(encode(Step(2**31, StepPlan(StepId(2**31), 9, 1, 256, 256, new_blocks=blocks)))) <= 2560


def test_a_step_in_which_all_rows_go_on_is_a_tiny_message() -> None:
    assert len(encode(Step(2**31, StepPlan(StepId(2**31), 9, 2, 256, 256)))) <= 64
