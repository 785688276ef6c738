"""The heartbeat thread of a rank."""

from __future__ import annotations

import pytest
import zmq

from millrace.executor.rank.heartbeat import Heartbeat
from tests.processes import wait_until


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_heartbeat_that_fails_does_not_block_the_end_of_its_process() -> None:
    context = zmq.Context()
    engine, socket = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    engine.bind("inproc://heartbeat")
    socket.connect("inproc://heartbeat")
    heartbeat = Heartbeat(socket)
    engine.send(b"\xc1 this is no message")
    wait_until(lambda: socket.closed, what="the end of the heartbeat")
    heartbeat._thread.join()  # its error is reported behind the end of the socket: here, and not in the next test
    engine.close(linger=0)
    context.term()
