"""The stub with errors on the wire: `worker_module="tests.executor.rude_worker"`.

The environment variable RUDE has the name of the error:

    garbage             sends bytes that are no message before each reply
    crowd               the same during a step; other clients send too large frames, or messages of another start
    twice               sends each reply twice
    <invalid reply>     one of `INVALID_REPLIES`, if the file named by RUDE_ONCE does not exist; makes the file
    old                 announces another protocol
    heartless           has no heartbeat
    curious             samples its device memory after each step
    <action>-at-spawn   an action of the stub, on rank 1, before its first message
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import zmq
from msgspec.structs import replace

from millrace.executor.rank import serve as rank
from millrace.executor.rank.heartbeat import Heartbeat
from millrace.executor.rank.serve import RankOptions
from millrace.executor.wire.messages import (
    NO_TOKEN,
    FromWorker,
    Hello,
    Reply,
    RowFailure,
    SeqId,
    Step,
    StepId,
    StepReply,
    StepResult,
    ToWorker,
    encode,
)
from tests.executor.faulty_stub import act, create_worker

RUDENESS = os.environ.get("RUDE", "")

LARGEST_FRAME = 2**20
"""The limit of the channel in the tests of "crowd"."""


def _with_result(**changes: object) -> Callable[[StepReply], FromWorker]:
    def change(reply: StepReply) -> FromWorker:
        assert isinstance(reply.result, StepResult)
        return replace(reply, result=replace(reply.result, **changes))

    return change


INVALID_REPLIES: dict[str, Callable[[StepReply], FromWorker]] = {
    "empty": lambda reply: StepReply(reply.call_id),
    "no-step": lambda reply: Reply(call_id=reply.call_id, result=[1, 2, 3]),
    "too-few-tokens": _with_result(token_ids=[]),
    "too-many-tokens": _with_result(token_ids=[1, 1]),
    "no-failure": _with_result(token_ids=[NO_TOKEN]),
    "no-failed-row": _with_result(failures=[RowFailure(SeqId(1), "nan_logits", "")]),
    "another-step": _with_result(step_id=StepId(99)),
    "another-epoch": _with_result(epoch=99),
}


class RudeConnection(rank._Connection):
    """Sends what it should not."""

    def __init__(self, options: RankOptions) -> None:
        super().__init__(options)
        names = ("stranger", "a stranger too", "0.99") if RUDENESS == "crowd" else ()
        self._others = [self._connect_as(name, options.address) for name in names]

    def _connect_as(self, name: str, address: str) -> zmq.Socket[bytes]:
        """Connect, and wait for it: the file of the address is removed soon after the rank's Hello."""
        other = self._context.socket(zmq.DEALER)
        other.setsockopt_string(zmq.IDENTITY, name)
        monitor = other.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        other.connect(address)
        monitor.recv_multipart()
        other.disable_monitor()
        monitor.close()
        return other

    def send(self, message: FromWorker) -> None:
        if RUDENESS == "garbage":
            self._send_garbage()
        if RUDENESS == "old" and isinstance(message, Hello):
            message = Hello(pid=message.pid, protocol=0)
        if isinstance(message, StepReply) and RUDENESS in INVALID_REPLIES and self._is_first_time():
            message = INVALID_REPLIES[RUDENESS](message)
        if isinstance(message, Reply) and RUDENESS == "step-for-call":
            self._socket.send(encode(StepReply(message.call_id)))
        self._socket.send(encode(message))
        if RUDENESS == "twice":
            self._socket.send(encode(message))

    def recv(self) -> ToWorker:
        message = super().recv()
        if RUDENESS == "crowd" and isinstance(message, Step):
            self._send_garbage()
            *strangers, earlier_rank = self._others
            for stranger in strangers:
                stranger.send(bytes(LARGEST_FRAME + 1))
            earlier_rank.send(encode(StepReply(message.call_id)))
        return message

    def close(self) -> None:
        for other in self._others:
            other.close(linger=0)
        super().close()

    def _send_garbage(self) -> None:
        self._socket.send(b"\xc1 this is no message")
        self._socket.send_multipart([b"too", b"many", b"frames"])

    def _is_first_time(self) -> bool:
        done = Path(os.environ["RUDE_ONCE"])
        if done.exists():
            return False
        done.touch()
        return True


if __name__ == "__main__":
    if RUDENESS.endswith("-at-spawn") and "1.1" in sys.argv:
        act(RUDENESS.removesuffix("-at-spawn"))
    if RUDENESS == "heartless":
        Heartbeat._beat = lambda self: None  # type: ignore[method-assign]
    if RUDENESS == "curious":
        rank._SAMPLE_EVERY_S = 0.0
    rank._Connection = RudeConnection  # type: ignore[misc]
    sys.exit(rank.serve_rank(create_worker))
