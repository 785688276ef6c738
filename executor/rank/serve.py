"""The process of one rank: takes orders from the engine over ZeroMQ and gives them to a `Worker`.

Hello ->            the process is up
      <- Boot       what to become
Phase ->  ...       each phase as it begins
      <- Go         before load_model, when ranks have to queue for it
Ready ->            or StartFailed
      <- Step/Call  one at a time, in order
Reply ->            one for each

Beside it, from a thread and a socket of its own, a heartbeat.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import zmq

from millrace.executor.rank.heartbeat import Heartbeat
from millrace.executor.rank.worker import Worker
from millrace.executor.wire.channel import Keys
from millrace.executor.wire.failures import EXIT_DEVICE_LOST, exit_status, needs_traceback, to_failure
from millrace.executor.wire.messages import (
    PROTOCOL,
    WORKER_METHODS,
    Boot,
    Call,
    Failure,
    FromWorker,
    Go,
    Hello,
    Phase,
    Ready,
    Reply,
    StartFailed,
    Step,
    StepPlan,
    StepReply,
    ToWorker,
    WorkerConfig,
    decode_to_worker,
    encode,
    output_rank,
)

CreateWorker: TypeAlias = Callable[[int, int, int, WorkerConfig, str], Worker]

logger = logging.getLogger("millrace.worker")

DUMP_SIGNAL = signal.SIGUSR1
"""Has a rank write the stack of every thread to its standard error, also when the interpreter is stuck."""

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 10.0
"""How often a rank that runs steps looks how much of its device it holds and uses."""

_SPIN_S = 200e-6
"""How long a rank looks for its next order before it sleeps: between two steps an order comes sooner than an idle core
wakes up."""


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has to know to become a rank."""

    address: str
    identity: str
    log_level: str = "INFO"
    keys: Keys | None = None
    """Set where the address is reached over a network."""
    engine_pid: int | None = None
    """Set when this process is to end with the engine's, which is on this host."""


def serve_rank(create_worker: CreateWorker, argv: list[str] | None = None) -> int:
    """Be one rank until the engine says `shutdown` or dies. Returns the exit status of the process."""
    options = _parse(argv)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches a rank that torchrun started: no traceback for it
    die_with_parent(options.parent_pid)
    invitation = Invitation(
        address=options.address,
        identity=options.identity,
        log_level=options.log_level,
        engine_pid=options.engine_pid,
    )
    return accept(invitation, create_worker)


def accept(invitation: Invitation, create_worker: CreateWorker) -> int:
    """`serve_rank` for a process that exists already and is watched by somebody else."""
    logging.basicConfig(level=invitation.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    link = _Link(invitation)
    try:
        status = _serve(link, create_worker)
        link.heartbeat.wait_for_engine()
        return status
    finally:
        link.close()


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal when the thread that started it ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def _serve(link: _Link, create_worker: CreateWorker) -> int:
    link.send(Hello(pid=os.getpid(), protocol=PROTOCOL))
    boot = link.recv()
    assert isinstance(boot, Boot), boot
    started = _start(link, create_worker, boot)
    if isinstance(started, Failure):
        return exit_status(started)
    try:
        return _answer_calls(link, started, boot)
    finally:
        try:
            started.shutdown()
        except Exception:  # such as a lost device's; the exit status is to say how it came to this
            logger.exception("the worker did not end in order")


def _start(link: _Link, create_worker: CreateWorker, boot: Boot) -> Worker | Failure:
    phase = "import"

    def enter(name: str) -> None:
        nonlocal phase
        phase = link.heartbeat.phase = name
        link.send(Phase(name=name))
        if name == "load_model" and boot.has_to_queue:
            assert isinstance(link.recv(), Go)

    try:
        enter(phase)
        worker = create_worker(boot.rank, boot.world_size, boot.epoch, boot.config, boot.rendezvous)
        facts = worker.start(enter)
    except Exception as error:
        failure = to_failure(error)
        link.send(StartFailed(phase=phase, failure=failure))
        return failure
    link.send(Ready(facts=facts))
    return worker


def _answer_calls(link: _Link, worker: Worker, boot: Boot) -> int:
    """Until `shutdown` or until the device is lost. Returns the exit status."""
    heartbeat, is_output = link.heartbeat, boot.rank == output_rank(boot.config)
    look_at_s = 0.0
    while True:
        heartbeat.phase = "idle"
        match link.recv():
            case Step(call_id, plan):
                heartbeat.phase = "step"
                reply = _run_step(worker, call_id, plan, is_output=is_output)
                link.send(reply)
                if reply.failure is not None and reply.failure.cause == "device_lost":
                    return EXIT_DEVICE_LOST
            case Call(method="shutdown", call_id=call_id):
                link.send(Reply(call_id=call_id))
                return 0
            case Call() as call:
                heartbeat.phase = call.method
                link.send(_run_call(worker, call))
                look_at_s = 0.0
            case unexpected:
                logger.error("ignored an unexpected message: %r", unexpected)
        if time.monotonic() >= look_at_s:
            _look(worker, heartbeat)
            look_at_s = time.monotonic() + _LOOK_EVERY_S


def _run_step(worker: Worker, call_id: int, plan: StepPlan, *, is_output: bool) -> StepReply:
    try:
        result = worker.execute_model(plan)
        return StepReply(call_id, result=result if is_output else None)
    except Exception as error:
        return StepReply(call_id, failure=_logged(error, "a step"))


def _run_call(worker: Worker, call: Call) -> Reply:
    try:
        if call.method not in WORKER_METHODS:
            raise ValueError(f"unknown method {call.method!r}")
        result = getattr(worker, call.method)(*call.args, **call.kwargs)
        return Reply(call_id=call.call_id, result=result)
    except Exception as error:
        return Reply(call_id=call.call_id, failure=_logged(error, call.method))


def _logged(error: Exception, what: str) -> Failure:
    failure = to_failure(error)
    if needs_traceback(failure):
        logger.error("%s failed", what, exc_info=error)
    return failure


def _look(worker: Worker, heartbeat: Heartbeat) -> None:
    """How much of the device it holds and uses. When it can't tell, what it told last stays: nobody has asked."""
    try:
        figures = worker.stats()
        heartbeat.device_bytes = figures.get("device_bytes")
        heartbeat.device_utilization = figures.get("device_utilization")
    except Exception:
        logger.exception("the worker can't tell its figures")


class _Link:
    """Owns the rank's socket, and the heartbeat beside it."""

    def __init__(self, invitation: Invitation) -> None:
        self._context = zmq.Context()
        self._socket = self._connect(invitation, invitation.identity)
        self._socket.setsockopt(zmq.LINGER, 1000)
        socket = self._connect(invitation, f"{invitation.identity}.beat")
        rendezvous_dir = os.path.dirname(invitation.address.removeprefix("ipc://"))
        self.heartbeat = Heartbeat(socket, invitation.engine_pid, rendezvous_dir if invitation.engine_pid else None)

    def _connect(self, invitation: Invitation, identity: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt_string(zmq.IDENTITY, identity)
        if invitation.keys is not None:
            socket.curve_serverkey = invitation.keys.server_public.encode()
            socket.curve_publickey = invitation.keys.public.encode()
            socket.curve_secretkey = invitation.keys.secret.encode()
        socket.connect(invitation.address)
        return socket

    def send(self, message: FromWorker) -> None:
        self._socket.send(encode(message))

    def recv(self) -> ToWorker:
        message: ToWorker = decode_to_worker(self._next_frame())
        return message

    def _next_frame(self) -> bytes:
        until_s = time.monotonic() + _SPIN_S
        while time.monotonic() < until_s:
            try:
                return self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                os.sched_yield()  # whoever shares the core goes first
        return self._socket.recv()

    def close(self) -> None:
        self._socket.close()
        self._context.term()  # ends the heartbeat


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of a Millrace engine; started by the engine, not by hand.")
    parser.add_argument("--address", required=True)
    parser.add_argument("--identity", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--engine-pid", type=int)
    parser.add_argument("--log-level", default="INFO")
    return parser.parse_args(sys.argv[1:] if argv is None else argv)
