"""A rank that misbehaves on the wire, over the stub: `worker_module="tests.executor.rude_worker"`.

The fault is the environment's RUDE: "garbage" sends bytes that are no message before each reply, "twice" sends each reply
twice, "old" says that it speaks another protocol, "heartless" has no heartbeat, and "hang-at-spawn" and the stub's other
actions happen to rank 1 before it has said anything.
"""

from __future__ import annotations

import os
import sys

from executor import rank
from executor.heart import Heart
from executor.messages import FromWorker, Hello, encode
from executor.stub import _act, create_worker

RUDENESS = os.environ.get("RUDE", "")


class RudeLink(rank._Link):
    """Sends more than it should."""

    def send(self, message: FromWorker) -> None:
        if RUDENESS == "garbage":
            self._socket.send(b"\xc1 this is no message")
            self._socket.send_multipart([b"too", b"many", b"frames"])
        if RUDENESS == "old" and isinstance(message, Hello):
            message = Hello(pid=message.pid, protocol=0)
        self._socket.send(encode(message))
        if RUDENESS == "twice":
            self._socket.send(encode(message))


if __name__ == "__main__":
    if RUDENESS.endswith("-at-spawn") and "1.1" in sys.argv:
        _act(RUDENESS.removesuffix("-at-spawn"))
    if RUDENESS == "heartless":
        Heart._beat = lambda self: None  # type: ignore[method-assign]
    rank._Link = RudeLink  # type: ignore[misc]
    sys.exit(rank.serve_rank(create_worker))
