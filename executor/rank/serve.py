"""The process of one rank: receives messages from the engine over ZeroMQ and calls a `Worker`.

Hello ->            the process is up
Phase ->  ...       each phase as it begins; the first is "import"
      <- Boot       the rank and its configuration
      <- Go         before load_model, when ranks have to queue for it
Ready ->            or StartFailed
      <- Step/Call  in order; two steps may be in work, a call waits for the steps before it
Reply ->            one for each
      <- Compile    a grammar, beside the steps
Compiled ->         the last one that is compiled

A heartbeat has a thread and a socket of its own:

Beat ->             every second
      <- DumpStacks
Stacks ->           of every thread
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import zmq

from millrace.executor.logs import set_up_logs
from millrace.executor.rank.heartbeat import Heartbeat
from millrace.executor.rank.lost_device import keep_to_the_end
from millrace.executor.rank.worker import Worker
from millrace.executor.wire.channel import Keys
from millrace.executor.wire.failures import EXIT_DEVICE_LOST, exit_status, needs_traceback, to_failure
from millrace.executor.wire.messages import (
    PROTOCOL,
    WORKER_METHODS,
    Boot,
    Call,
    Compile,
    Compiled,
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
"""Lets a rank write the stack of every thread to standard error, even if the interpreter is stuck."""

_PR_SET_PDEATHSIG = 1
_SAMPLE_EVERY_S = 10.0
"""Time between two samples of the device's memory and utilization."""

_MAX_LAUNCHED = 2
_POLL_S = 20e-6
"""Time between two looks at the device and at the socket while one step runs."""
_IDLE_MS = 20
"""Time without a step or a message after which a rank begins a part of its idle work. A part takes about as long."""
_COMPILE_POLL_MS = 2
"""Time between two looks at the grammars that are compiled while nothing else is to do."""
_SPIN_S = 200e-6
"""How long a rank polls for a message before it blocks: between steps it comes sooner than an idle core wakes up."""


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to become a rank and to connect to its engine."""

    address: str
    identity: str
    log_level: str = "INFO"
    keys: Keys | None = None
    """Set where the address is on a network."""
    engine_pid: int | None = None
    """Set if this process ends with that of the engine, on the same host."""


def serve_rank(create_worker: CreateWorker, *, import_modules: Callable[[], None] = lambda: None) -> int:
    """Be one rank until the engine sends "shutdown" or ends. Returns the exit status of the process.

    `import_modules` imports what `create_worker` needs. It is called without waiting for the engine.
    """
    options = vars(_parse())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback after Ctrl-C, which reaches a rank of torchrun
    die_with_parent(options.pop("parent_pid"))
    status = run_rank(RankOptions(**options), create_worker, import_modules)
    if status == EXIT_DEVICE_LOST:
        os._exit(status)  # an ordinary end would free what `lost_device.py` keeps
    return status


def run_rank(
    options: RankOptions, create_worker: CreateWorker, import_modules: Callable[[], None] = lambda: None
) -> int:
    """Like `serve_rank`, for a process whose launcher watches it."""
    set_up_logs(options.log_level)
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    connection = _Connection(options)
    try:
        status = _serve(connection, create_worker, import_modules)
        connection.heartbeat.wait_for_engine()
        return status
    finally:
        connection.close()


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process the signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call above
        os._exit(1)


def _serve(connection: _Connection, create_worker: CreateWorker, import_modules: Callable[[], None]) -> int:
    connection.send(Hello(pid=os.getpid(), protocol=PROTOCOL))
    started = _start(connection, create_worker, import_modules)
    if isinstance(started, Failure):
        return exit_status(started)
    worker, boot = started
    status = None
    try:
        status = _answer_calls(connection, worker, boot)
        return status
    finally:
        if status == EXIT_DEVICE_LOST:
            keep_to_the_end(worker)
        else:
            _shut_down(worker)


def _shut_down(worker: Worker) -> None:
    try:
        worker.shutdown()
    except Exception:  # it must not change the exit status
        logger.exception("the shutdown of the worker failed")


def _start(
    connection: _Connection, create_worker: CreateWorker, import_modules: Callable[[], None]
) -> tuple[Worker, Boot] | Failure:
    phase = "import"

    def enter(name: str) -> None:
        nonlocal phase
        phase = connection.heartbeat.phase = name
        connection.send(Phase(name=name))
        if name == "load_model" and boot.has_to_queue:
            assert isinstance(connection.recv(), Go)

    try:
        enter(phase)
        import_modules()
        message = connection.recv()
        assert isinstance(message, Boot), message
        boot = message
        worker = create_worker(boot.rank, boot.world_size, boot.epoch, boot.config, boot.rendezvous)
        facts = worker.start(enter)
    except Exception as error:
        failure = _to_failure(error)
        connection.send(StartFailed(phase=phase, failure=failure))
        return failure
    connection.send(Ready(facts=facts))
    return worker, boot


def _answer_calls(connection: _Connection, worker: Worker, boot: Boot) -> int:
    """Answer steps and calls until "shutdown", or until the device is lost. Returns the exit status."""
    heartbeat, is_output = connection.heartbeat, boot.rank == output_rank(boot.config)
    steps = _LaunchedSteps(worker, is_output=is_output)
    held: Call | Step | None = None
    """It waits for the steps before it."""
    next_sample_s = 0.0
    announced = compiled = 0
    """Numbers of grammars: that of the last one, and the last number that the engine knows to be compiled."""
    while True:
        if worker.last_compiled > compiled:
            compiled = worker.last_compiled
            connection.send(Compiled(compiled))
        heartbeat.phase = "step" if steps.call_ids else "idle"
        reply = steps.next_reply(until=connection.has_message if held is None else lambda: False)
        if reply is not None:
            connection.send(reply)
            if reply.failure is not None and reply.failure.cause == "device_lost":
                return EXIT_DEVICE_LOST
            if time.monotonic() >= next_sample_s:
                _sample_device(worker, heartbeat)
                next_sample_s = time.monotonic() + _SAMPLE_EVERY_S
            continue
        if announced > compiled and held is None and not connection.has_message(_COMPILE_POLL_MS):
            continue
        if held is None and worker.has_idle_work and not connection.has_message(_IDLE_MS):
            worker.do_idle_work()
            continue
        message, held = held or connection.recv(), None
        match message:
            case Step(plan=plan) if plan.depth == 1 and steps.call_ids:
                held = message  # the output rank has replied to the steps before it, this rank has not yet
            case Step(call_id, plan):
                heartbeat.phase = "step"
                steps.launch(call_id, plan)
            case Compile(number, grammar):
                announced = number
                worker.compile_grammar(number, grammar)
            case Call() if steps.call_ids:
                held = message  # waits for the steps before it
            case Call(method="shutdown", call_id=call_id):
                connection.send(Reply(call_id=call_id))
                return 0
            case Call():
                heartbeat.phase = message.method
                connection.send(_run_call(worker, message))
                _sample_device(worker, heartbeat)
            case unexpected:
                logger.error("ignored an unexpected message: %r", unexpected)


class _LaunchedSteps:
    """Owns the steps that the worker has begun and whose replies are not sent yet."""

    def __init__(self, worker: Worker, *, is_output: bool) -> None:
        self._worker = worker
        self._is_output = is_output
        self.call_ids: deque[int] = deque()
        """The oldest step first."""
        self._failures: dict[int, Failure] = {}
        """Failures of steps at their launch."""

    def launch(self, call_id: int, plan: StepPlan) -> None:
        self.call_ids.append(call_id)
        try:
            self._worker.launch(plan)
        except Exception as error:
            self._failures[call_id] = _log_failure(error, "a step")

    def next_reply(self, until: Callable[[], bool]) -> StepReply | None:
        """Wait for the oldest step and return its reply. None if there is no step, or, with less than two steps in work, as
        soon as `until()` is true."""
        if not self.call_ids:
            return None
        call_id = self.call_ids[0]
        while (
            len(self.call_ids) < _MAX_LAUNCHED and call_id not in self._failures and not self._worker.is_result_ready()
        ):
            if until():
                return None
            time.sleep(_POLL_S)
        del self.call_ids[0]
        failure = self._failures.pop(call_id, None)
        if failure is not None:
            return StepReply(call_id, failure=failure)
        try:
            result = self._worker.collect()
            return StepReply(call_id, result=result if self._is_output else None)
        except Exception as error:
            return StepReply(call_id, failure=_log_failure(error, "a step"))


def _run_call(worker: Worker, call: Call) -> Reply:
    try:
        if call.method not in WORKER_METHODS:
            raise ValueError(f"unknown method {call.method!r}")
        result = getattr(worker, call.method)(*call.args)
        return Reply(call_id=call.call_id, result=result)
    except Exception as error:
        return Reply(call_id=call.call_id, failure=_log_failure(error, call.method))


def _log_failure(error: Exception, what: str) -> Failure:
    failure = _to_failure(error)
    if needs_traceback(failure):
        logger.error("%s failed", what, exc_info=error)
    return failure


def _to_failure(error: Exception) -> Failure:
    failure = to_failure(error)
    if failure.cause == "device_lost":
        keep_to_the_end(error)
    return failure


def _sample_device(worker: Worker, heartbeat: Heartbeat) -> None:
    """Set the heartbeat's device fields. After an error of the worker they keep the last sample."""
    try:
        stats = worker.stats()
        heartbeat.device_bytes = stats.get("device_bytes")
        heartbeat.device_utilization = stats.get("device_utilization")
    except Exception:
        logger.exception("reading the worker's stats failed")


class _Connection:
    """Owns the rank's socket and its heartbeat."""

    def __init__(self, options: RankOptions) -> None:
        self._context = zmq.Context()
        self._socket = self._connect(options, options.identity)
        self._socket.setsockopt(zmq.LINGER, 1000)
        socket = self._connect(options, f"{options.identity}.beat")
        rendezvous_dir = os.path.dirname(options.address.removeprefix("ipc://"))
        self.heartbeat = Heartbeat(socket, options.engine_pid, rendezvous_dir if options.engine_pid else None)

    def _connect(self, options: RankOptions, identity: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt_string(zmq.IDENTITY, identity)
        if options.keys is not None:
            socket.curve_serverkey = options.keys.server_public.encode()
            socket.curve_publickey = options.keys.public.encode()
            socket.curve_secretkey = options.keys.secret.encode()
        socket.connect(options.address)
        return socket

    def send(self, message: FromWorker) -> None:
        self._socket.send(encode(message))

    def has_message(self, timeout_ms: int = 0) -> bool:
        return bool(self._socket.poll(timeout_ms))

    def recv(self) -> ToWorker:
        message: ToWorker = decode_to_worker(self._next_frame())
        return message

    def _next_frame(self) -> bytes:
        until_s = time.monotonic() + _SPIN_S
        while time.monotonic() < until_s:
            try:
                return self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                os.sched_yield()  # lets other processes on this core run first
        return self._socket.recv()

    def close(self) -> None:
        self._socket.close()
        self._context.term()  # ends the heartbeat


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of a Millrace engine; started by the engine, not by hand.")
    parser.add_argument("--address", required=True)
    parser.add_argument("--identity", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--engine-pid", type=int)
    parser.add_argument("--log-level", default="INFO")
    return parser.parse_args()
