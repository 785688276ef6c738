"""A rank's heartbeat: a thread that tells the engine that the process lives, and how far it is."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import shutil
import tempfile
import threading

import zmq

from millrace.executor.wire.messages import Beat, DumpStacks, Stacks, decode_to_worker, encode

logger = logging.getLogger("millrace.worker")

BEAT_EVERY_MS = 1000


class Heartbeat:
    """Owns the heartbeat's socket and thread. The rank's main thread sets `phase` and what it knows of the device, the
    heartbeat reads."""

    def __init__(
        self, socket: zmq.Socket[bytes], engine_pid: int | None = None, rendezvous_dir: str | None = None
    ) -> None:
        """`engine_pid`: this process ends when the engine does, as it did where the engine is its child, and removes the
        `rendezvous_dir` that an engine that failed early has left."""
        self.phase = "spawn"
        self.device_bytes: int | None = None
        self.device_utilization: float | None = None
        self._socket = socket
        self._rendezvous_dir = rendezvous_dir
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._engine = _open_engine(engine_pid) if engine_pid is not None else None
        if self._engine is not None:
            self._poller.register(self._engine, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def wait_for_engine(self) -> None:
        """Where this process ends with it: does not return."""
        if self._engine is not None:
            self._thread.join()

    def _run(self) -> None:
        """Until the context is terminated, which waits for this socket however the thread ends."""
        try:
            while True:
                self._beat()
                for source, _ in self._poller.poll(BEAT_EVERY_MS):
                    if source == self._engine:
                        self._follow_engine()
                    else:
                        self._handle()
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(linger=0)

    def _beat(self) -> None:
        with contextlib.suppress(zmq.Again):  # nobody reads them just now
            self._socket.send(encode(Beat(self.phase, self.device_bytes, self.device_utilization)), zmq.DONTWAIT)

    def _handle(self) -> None:
        if isinstance(decode_to_worker(self._socket.recv()), DumpStacks):
            with tempfile.TemporaryFile() as file, contextlib.suppress(zmq.Again):
                faulthandler.dump_traceback(file)
                file.seek(0)
                self._socket.send(encode(Stacks(file.read().decode())), zmq.DONTWAIT)

    def _follow_engine(self) -> None:
        """Without an engine a rank is of no use; how the engine ended is how the group ended."""
        assert self._engine is not None
        status = _exit_status(self._engine)
        if self._rendezvous_dir is not None:
            shutil.rmtree(self._rendezvous_dir, ignore_errors=True)
        os._exit(status)


def _open_engine(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended before this rank has begun
        os._exit(0)


def _exit_status(pidfd: int) -> int:
    """Of a process that has ended, as a shell has it. 0 for somebody else's child: its parent tells."""
    try:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:
        return 0
    assert ended is not None
    is_exit = ended.si_code == os.CLD_EXITED
    logger.info("the engine has ended, %s %d", "exit status" if is_exit else "signal", ended.si_status)
    return ended.si_status if is_exit else 128 + ended.si_status
