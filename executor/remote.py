"""The executors whose ranks are processes: start and end, steps and calls, lost ranks. Subclasses place the ranks."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import zmq

from millrace.executor.base import Executor
from millrace.executor.errors import StartError, WorkerDied
from millrace.executor.launch.handshake import Handshake
from millrace.executor.launch.process import RankHandle, close_all, dump_all, kill_all, stop_all
from millrace.executor.watchdog import Watchdog
from millrace.executor.wire.calls import CallTable, PendingCall
from millrace.executor.wire.channel import Channel, free_port
from millrace.executor.wire.failures import is_interruption
from millrace.executor.wire.messages import (
    Beat,
    Call,
    Compile,
    Compiled,
    FromWorker,
    ModelFacts,
    Reply,
    Stacks,
    Step,
    StepPlan,
    StepReply,
    WorkerConfig,
    encode,
    output_rank,
)

logger = logging.getLogger("millrace.executor")

_LAST_REPLY_S = 0.1
"""How long the reply of a rank that has ended may take to come out of ZeroMQ's thread."""


class RemoteExecutor(Executor):
    """Owns the ranks and the channel of one start after the other. Implements `MessageLoop`. It has no thread: the caller
    that waits for a future receives the messages. The end of a worker wakes that caller."""

    def __init__(self, config: WorkerConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self._calls = CallTable(self, self._recorder)
        self._handles: Sequence[RankHandle] = ()
        self._channel: Channel | None = None
        self._watchdog: Watchdog | None = None
        self._lost: WorkerDied | None = WorkerDied(0, "the executor has not been started")
        self._last_compiled: list[int] = []
        """By rank, see `Executor.last_compiled`."""
        self._has_timed_out = False
        """Whether a call to these workers has timed out. Their stacks are logged before they are ended then."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(epoch={self._epoch}, ranks={self._handles}, pending={len(self._calls)})"

    @property
    def is_asynchronous(self) -> bool:
        return True

    # --- placement ---

    @abstractmethod
    def _open_channel(self) -> Channel:
        """Return the channel of a new start."""

    @abstractmethod
    def _launch(self, channel: Channel) -> Sequence[RankHandle]:
        """Start every rank, which then connects to the channel. On an error, end what was started."""

    def _rendezvous(self) -> str:
        """Return `Boot.rendezvous` of this start."""
        return f"tcp://127.0.0.1:{free_port('127.0.0.1')}" if self.world_size > 1 else ""

    # --- start and end ---

    def _start_workers(self) -> list[ModelFacts]:
        try:
            if self._channel is None:
                self._launch_all()
            assert self._channel is not None
            rendezvous = self._rendezvous()
            handshake = Handshake(self._channel, self._handles, self._config, self._limits, self._epoch, rendezvous)
            facts_by_rank = handshake.run()
        except BaseException as error:
            if isinstance(error, StartError) and self._handles:
                self._recorder.num_failed_workers += 1
            self._discard_workers()
            if is_of_system(error):
                raise StartError("spawn", 0, str(error), is_retryable=True) from error
            raise
        facts, rank, now_s = facts_by_rank[0], output_rank(self._config), time.monotonic()
        is_cpu = facts.device == "cpu"
        self._watchdog = Watchdog(self._limits, self.world_size, now_s, is_cpu=is_cpu, measured_rank=rank)
        self._lost = None
        self._last_compiled = [0] * self.world_size
        logger.info(
            "workers ready: %s, %s, KV pool in %s, on %s, attention %s, epoch %d",
            *(facts.architecture, facts.dtype, facts.kv_cache_dtype, facts.device, facts.attention, self._epoch),
        )
        return facts_by_rank

    def _launch_all(self) -> None:
        self._channel = self._open_channel()
        self._handles = self._launch(self._channel)
        for handle in self._handles:
            self._channel.watch(handle.fileno())

    def shutdown(self) -> None:
        if self._channel is not None and self._lost is None and not self._has_timed_out:
            # A worker in a step reads the message after the step, or is terminated.
            self._send(encode(Call(call_id=0, method="shutdown")), range(self.world_size))
            stop_all(self._release_handles(), self._limits.shutdown_s)
        self._discard_workers()

    def _discard_workers(self) -> None:
        if self._has_timed_out and self._handles and self._lost is None:
            logger.error("a call has timed out; the ranks are ended after their stacks are logged")
            self._dump_stacks()
        self._has_timed_out = False
        handles = self._release_handles()
        kill_all(handles)
        close_all(handles)
        self._lost = WorkerDied(0, "the executor has been shut down")
        self._calls.fail_all(self._lost)
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def worker_pids(self) -> list[int]:
        """Return the process ids in rank order, each of the rank's own host."""
        return [handle.pid for handle in self._handles]

    def _release_handles(self) -> Sequence[RankHandle]:
        """Return the ranks, which the caller ends and closes."""
        handles, self._handles = self._handles, ()
        return handles

    def _num_active_workers(self) -> int:
        return sum(handle.end() is None for handle in self._handles)

    # --- steps and calls ---

    def _call(self, call: Call, ranks: range, limit_s: float | None) -> PendingCall:
        self.require_workers()
        pending = self._calls.add(ranks, None, self._limits.call_s if limit_s is None else limit_s)
        self._send(encode(msgspec.structs.replace(call, call_id=pending.call_id)), ranks)
        return pending

    def execute_model(self, plan: StepPlan) -> PendingCall:
        self.require_workers()
        assert self._watchdog is not None and not self.is_asleep
        num_in_flight = self._calls.num_steps
        ranks = range(self.world_size)
        pending = self._calls.add(ranks, output_rank(self._config), self._limits.step_s, plan)
        payload = encode(Step(pending.call_id, plan))
        self._recorder.step_sent(pending.sent_s, len(payload), num_in_flight)
        self._watchdog.step_sent(plan.num_tokens, pending.sent_s)
        self._send(payload, ranks)
        return pending

    def compile_grammar(self, number: int, grammar: str) -> None:
        self.require_workers()
        self._send(encode(Compile(number, grammar)), range(self.world_size))

    @property
    def last_compiled(self) -> int:
        return min(self._last_compiled, default=0)

    def wait_for_grammar(self, timeout_s: float) -> None:
        self.require_workers()
        self.process_messages(timeout_s)
        self.require_workers()

    def _send(self, payload: bytes, ranks: Iterable[int]) -> None:
        assert self._channel is not None
        try:
            for rank in ranks:
                self._channel.send(rank, payload)
        except BaseException:  # some ranks have the message and others do not: they would not match any more
            self._mark_lost(0, "the engine was interrupted while it sent", 0)
            raise

    def step_limit_s(self, num_tokens: int) -> float:
        return self._limits.longest_step_s if self._watchdog is None else self._watchdog.pace.limit_s(num_tokens)

    def check_health(self) -> None:
        self.process_messages(timeout_s=0)
        self.require_workers()

    def require_workers(self) -> None:
        if self._lost is not None:
            raise self._lost

    def abandon(self, call_id: int) -> None:
        self._has_timed_out |= self._calls.abandon(call_id)

    # --- received messages ---

    def process_messages(self, timeout_s: float) -> None:
        """Also returns after a second."""
        if self._channel is None or self._lost is not None:
            return
        self._channel.wait(min(timeout_s, 1.0))
        self._receive()
        if self._channel.has_ended:
            if self._calls:  # the reply that a rank sent before it ended may still be on its way in ZeroMQ's thread
                self._channel.wait_for_message(_LAST_REPLY_S)
                self._receive()
            self._find_dead_rank()
        else:
            self._find_stuck_rank()

    def _receive(self) -> None:
        assert self._channel is not None
        try:
            for rank, message in self._channel.receive():
                self._handle(rank, message)
        except BaseException:  # a reply may be lost that a caller waits for
            self._mark_lost(0, "the engine was interrupted while it received", 0)
            raise

    def _handle(self, rank: int, message: FromWorker) -> None:
        now_s = time.monotonic()
        assert self._watchdog is not None
        match message:
            case StepReply():
                self._watchdog.step_done(rank, now_s, has_failed=message.failure is not None)
                self._calls.add_reply(rank, message, now_s)
            case Reply():
                self._calls.add_reply(rank, message, now_s)
            case Compiled(number):
                self._last_compiled[rank] = number
            case Beat(phase, device_bytes, device_utilization):
                self._watchdog.heartbeat_received(rank, phase, now_s)
                self._recorder.set_device_sample(rank, device_bytes, device_utilization)
            case Stacks(text):
                logger.error("the stacks of rank %d:\n%s", rank, text)
            case _:
                self._recorder.num_stale_replies += 1

    # --- lost ranks ---

    def _find_dead_rank(self) -> None:
        ends = [(handle.rank, end) for handle in self._handles if (end := handle.end()) is not None]
        if ends:
            # A killed rank is the cause: other ranks end by themselves when they lose it.
            rank, end = next((one for one in ends if one[1].is_killed), ends[0])
            self._mark_lost(rank, end.reason, len(ends))

    def _find_stuck_rank(self) -> None:
        now_s = time.monotonic()
        assert self._watchdog is not None
        if not self._watchdog.is_due(now_s):
            return
        stuck = self._watchdog.find_stuck(now_s, is_busy=self._calls.has_other_than_steps)
        if stuck is not None:
            rank, reason = stuck
            logger.error("rank %d is %s; the ranks are ended after their stacks are logged", rank, reason)
            self._dump_stacks()
            self._kill_stuck()
            self._mark_lost(rank, reason, 1)

    def _kill_stuck(self) -> None:
        """Kill all ranks: some may wait for the stuck one."""
        kill_all(self._handles)

    def _dump_stacks(self) -> None:
        assert self._channel is not None
        dump_all(self._handles, self._channel, self._limits.dump_s, self._receive)

    def _mark_lost(self, rank: int, reason: str, num_workers: int) -> None:
        self._recorder.num_failed_workers += num_workers
        self._lost = WorkerDied(rank, reason)
        self._calls.fail_all(self._lost)
        if not self.is_asleep:  # workers that die asleep are not missed before `wake_up`
            self._lost_s = time.monotonic()


def is_of_system(error: BaseException) -> bool:
    """Whether the system lacks processes, files or memory at the moment. A `TimeoutError` of a signal handler is none."""
    return isinstance(error, OSError | zmq.ZMQError) and not is_interruption(error)
