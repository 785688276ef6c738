"""The heartbeat of a rank: a thread that reports to the engine that the process is alive, and what it does."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import shutil
import threading

import zmq

from millrace.executor.wire.messages import Beat, DumpStacks, Stacks, decode_to_worker, encode

logger = logging.getLogger("millrace.worker")

BEAT_EVERY_MS = 1000


class Heartbeat:
    """Owns the heartbeat's socket and thread. The main thread sets `phase` and the device fields, the thread reads them."""

    def __init__(
        self, socket: zmq.Socket[bytes], engine_pid: int | None = None, rendezvous_dir: str | None = None
    ) -> None:
        """`engine_pid`: this process ends when the engine ends, with its exit status if the engine is its child. It then
        removes `rendezvous_dir`, which an engine that failed or was killed early leaves behind."""
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
        """Block until this process ends with the engine, if it has an `engine_pid`. Else return at once."""
        if self._engine is not None:
            self._thread.join()

    def _run(self) -> None:
        """Send heartbeats until the context is terminated. That waits until this closes the socket, also after an error."""
        try:
            while True:
                self._beat()
                for source, _ in self._poller.poll(BEAT_EVERY_MS):
                    if source == self._engine:
                        self._end_with_engine()
                    else:
                        self._send_stacks()
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(linger=0)

    def _beat(self) -> None:
        with contextlib.suppress(zmq.Again):  # the queue is full: the engine does not read
            self._socket.send(encode(Beat(self.phase, self.device_bytes, self.device_utilization)), zmq.DONTWAIT)

    def _send_stacks(self) -> None:
        if isinstance(decode_to_worker(self._socket.recv()), DumpStacks):
            with open(os.memfd_create("stacks"), "w+b") as file, contextlib.suppress(zmq.Again):
                faulthandler.dump_traceback(file)
                file.seek(0)
                self._socket.send(encode(Stacks(file.read().decode())), zmq.DONTWAIT)

    def _end_with_engine(self) -> None:
        assert self._engine is not None
        status = _exit_status(self._engine)
        if self._rendezvous_dir is not None:
            shutil.rmtree(self._rendezvous_dir, ignore_errors=True)
        os._exit(status)


def _open_engine(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended already
        os._exit(0)


def _exit_status(pidfd: int) -> int:
    """Return the exit status of a process that has ended, as a shell does. 0 if it is not a child of this process."""
    try:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:
        return 0
    assert ended is not None
    is_exit = ended.si_code == os.CLD_EXITED
    logger.info("the engine has ended, %s %d", "exit status" if is_exit else "signal", ended.si_status)
    return ended.si_status if is_exit else 128 + ended.si_status
