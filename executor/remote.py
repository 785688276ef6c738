"""What executors have in common whose ranks are processes: calls, replies, deaths. They differ in how ranks are placed."""

from __future__ import annotations

import logging
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import zmq

from millrace.executor.base import Executor
from millrace.executor.errors import Asleep, StartError, WorkerDied
from millrace.executor.launch.process import RankHandle, close_all, dump_all, stop_all
from millrace.executor.limits import Limits
from millrace.executor.metrics import ExecutorMetrics
from millrace.executor.watchdog import Watchdog
from millrace.executor.wire.calls import PendingCall
from millrace.executor.wire.channel import Channel
from millrace.executor.wire.handshake import Handshake
from millrace.executor.wire.messages import (
    Beat,
    Call,
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


class RemoteExecutor(Executor):
    """Owns the ranks of one life after the other, and every call that is under way.

    No thread of its own: whoever waits for a future moves the messages along. A worker's end wakes that wait at once.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        worker_module: str = "millrace.worker",
        log_level: str = "INFO",
        limits: Limits | None = None,
    ) -> None:
        super().__init__(config, limits)
        self._worker_module = worker_module
        self._log_level = log_level
        self._last_call_id = 0
        self._pending: dict[int, PendingCall] = {}
        self._handles: Sequence[RankHandle] = ()
        self._channel: Channel | None = None
        self._counting = threading.Lock()
        """Held while a channel's counts go over to the recorder: who reads the figures sees them in one of the two."""
        self._watchdog: Watchdog | None = None
        self._lost: WorkerDied | None = WorkerDied(0, "the executor has not been started")
        self._has_overdue = False
        """Whether a call of this life has timed out: before the workers are ended they shall say where they are."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(epoch={self._epoch}, ranks={self._handles}, pending={len(self._pending)})"

    # --- placement ---

    @abstractmethod
    def _open_channel(self) -> Channel:
        """The socket of a new life."""

    @abstractmethod
    def _launch(self, channel: Channel) -> Sequence[RankHandle]:
        """Bring every rank to where it dials the channel. On an error, whatever was started is ended."""

    def _rendezvous(self) -> str:
        """Where the ranks of this life meet each other."""
        return f"tcp://127.0.0.1:{_free_port()}" if self.world_size > 1 else ""

    # --- life ---

    def _start_workers(self) -> list[ModelFacts]:
        try:
            self._channel = self._open_channel()
            self._handles = self._launch(self._channel)
            for handle in self._handles:
                self._channel.watch(handle.fileno())
            facts_by_rank = self._shake_hands(self._channel)
        except BaseException as error:
            if isinstance(error, StartError) and self._handles:
                self._recorder.num_failed_workers += 1
            self._discard_workers()
            if isinstance(error, OSError | zmq.ZMQError):  # no process, file or memory to be had just now
                raise StartError("spawn", 0, str(error), is_retryable=True) from error
            raise
        facts = facts_by_rank[0]
        self._watchdog = Watchdog(
            self._limits,
            self.world_size,
            time.monotonic(),
            is_cpu=facts.device == "cpu",
            measured_rank=output_rank(self._config),
        )
        self._lost = None
        logger.info("ready: %s %s on %s, epoch %d", facts.architecture, facts.dtype, facts.device, self._epoch)
        return facts_by_rank

    def _shake_hands(self, channel: Channel) -> list[ModelFacts]:
        rendezvous = self._rendezvous()
        handshake = Handshake(
            channel, self._handles, self._config, self._limits, epoch=self._epoch, rendezvous=rendezvous
        )
        return handshake.run()

    def shutdown(self) -> None:
        if self._channel is not None and self._lost is None and not self._has_overdue:
            goodbye = encode(Call(call_id=0, method="shutdown"))
            # A worker in the middle of a step reads it afterwards, or is terminated.
            self._send(goodbye, range(self.world_size))
            stop_all(self._let_go(), self._limits.shutdown_s)
        self._discard_workers()

    def _discard_workers(self) -> None:
        self._dump_overdue()
        handles = self._let_go()
        _kill(handles)
        close_all(handles)
        self._lost = WorkerDied(0, "the executor has been shut down")
        self._give_up_calls(self._lost)
        if self._channel is not None:
            self._close_channel(self._channel)

    def worker_pids(self) -> list[int]:
        """Process ids in rank order, each on the rank's own host, for logs and for whoever watches the processes."""
        return [handle.pid for handle in self._handles]

    def _let_go(self) -> Sequence[RankHandle]:
        """The ranks of a life that is over, for the caller to end."""
        handles, self._handles = self._handles, ()
        return handles

    def _close_channel(self, channel: Channel) -> None:
        with self._counting:
            self._recorder.num_stale_replies += channel.num_dropped
            self._recorder.reply_bytes += channel.step_reply_bytes
            self._channel = None
        channel.close()

    def _dump_overdue(self) -> None:
        if self._has_overdue and self._handles and self._lost is None:
            logger.error("a call has timed out; the stacks of all ranks follow, then they are ended")
            self._dump_stacks()
        self._has_overdue = False

    def _num_active_workers(self) -> int:
        return sum(handle.end() is None for handle in self._handles)

    # --- calls ---

    def _call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ranks: Sequence[int],
        reply_rank: int | None = None,
        limit_s: float | None = None,
    ) -> PendingCall:
        self.require_workers()
        wanted, is_list = (ranks, True) if reply_rank is None else ((reply_rank,), False)
        limit_s = self._limits.call_s if limit_s is None else limit_s
        pending = self._register(wanted, len(ranks), is_list=is_list, limit_s=limit_s)
        call = Call(call_id=pending.call_id, method=method, args=list(args), kwargs=kwargs)
        self._send(encode(call), ranks)
        return pending

    def execute_model(self, plan: StepPlan) -> PendingCall:
        self.require_workers()
        if self._missing:
            raise Asleep(f"the workers sleep: they miss {', '.join(sorted(self._missing))}")
        assert self._watchdog is not None
        num_in_flight = sum(call.is_step and not call.done() for call in self._pending.values())
        wanted, limit_s = (output_rank(self._config),), self._limits.step_s
        pending = self._register(wanted, self.world_size, is_list=False, limit_s=limit_s, plan=plan)
        payload = encode(Step(pending.call_id, plan))
        self._recorder.sent_step(pending.sent_s, len(payload), num_in_flight)
        self._watchdog.sent_step(sum(row.num_tokens for row in plan.rows), pending.sent_s)
        self._send(payload, range(self.world_size))
        return pending

    def step_limit_s(self, num_tokens: int) -> float:
        return self._limits.longest_step_s if self._watchdog is None else self._watchdog.pace.limit_s(num_tokens)

    def _register(
        self, wanted: Sequence[int], num_asked: int, *, is_list: bool, limit_s: float, plan: StepPlan | None = None
    ) -> PendingCall:
        self._last_call_id += 1
        pending = PendingCall(
            self, self._last_call_id, wanted, num_asked=num_asked, is_list=is_list, limit_s=limit_s, plan=plan
        )
        self._pending[pending.call_id] = pending
        self._recorder.sent(pending.sent_s)
        return pending

    def _send(self, payload: bytes, ranks: Iterable[int]) -> None:
        assert self._channel is not None
        try:
            for rank in ranks:
                self._channel.send(rank, payload)
        except BaseException:  # some ranks have it and some do not, or half of it: they would go on out of step
            self._lose(0, "the engine was interrupted while it sent", 0)
            raise

    def check_health(self) -> None:
        self.pump(timeout_s=0)
        self.require_workers()

    def stats(self) -> ExecutorMetrics:
        with self._counting:
            metrics, channel = super().stats(), self._channel
        if channel is None:
            return metrics
        return msgspec.structs.replace(
            metrics,
            num_stale_replies=metrics.num_stale_replies + channel.num_dropped,
            reply_bytes=metrics.reply_bytes + channel.step_reply_bytes,
        )

    def require_workers(self) -> None:
        """Raise `WorkerDied` when a worker is lost."""
        if self._lost is not None:
            raise self._lost

    def forget(self, call_id: int) -> None:
        """Stop waiting for a call: it has failed, and its replies, if they still come, are stale."""
        if (pending := self._pending.pop(call_id, None)) is not None:
            self._has_overdue = True
            self._record_failure(pending)

    def _give_up_calls(self, lost: WorkerDied) -> None:
        for pending in self._pending.values():
            if not pending.done():
                self._record_failure(pending)
                pending.give_up(lost)
        self._pending.clear()

    def _record_failure(self, pending: PendingCall) -> None:
        now_s = time.monotonic()
        self._recorder.completed(now_s - pending.sent_s, now_s, is_failure=True)

    # --- replies ---

    def pump(self, timeout_s: float) -> None:
        """Wait for messages or a death for at most this long, or a second, and deal with what has come."""
        if self._channel is None or self._lost is not None:
            return
        self._channel.wait(min(timeout_s, 1.0))
        self._take_in()
        if self._channel.has_ended:
            self._find_dead()
        else:
            self._look_for_stuck()

    def _listen(self, seconds: float) -> None:
        """Take in what comes, and judge nobody meanwhile."""
        assert self._channel is not None
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            self._channel.wait(left_s)
            self._take_in()

    def _take_in(self) -> None:
        assert self._channel is not None
        try:
            for rank, message in self._channel.receive():
                self._deliver(rank, message)
        except BaseException:  # a reply may be lost that somebody would wait for
            self._lose(0, "the engine was interrupted while it received", 0)
            raise

    def _deliver(self, rank: int, message: FromWorker) -> None:
        now_s = time.monotonic()
        assert self._watchdog is not None
        match message:
            case StepReply():
                self._watchdog.answered_step(rank, now_s, has_failed=message.failure is not None)
                self._take_reply(rank, message, now_s)
            case Reply():
                self._take_reply(rank, message, now_s)
            case Beat(phase, device_bytes, device_utilization):
                self._watchdog.heard(rank, phase, now_s)
                self._recorder.saw_device(rank, device_bytes, device_utilization)
            case Stacks(text):
                logger.error("the stacks of rank %d:\n%s", rank, text)
            case _:
                self._recorder.num_stale_replies += 1

    def _take_reply(self, rank: int, reply: Reply | StepReply, now_s: float) -> None:
        pending = self._pending.get(reply.call_id)
        if pending is None or rank in pending.replies:
            self._recorder.num_stale_replies += 1
            return
        was_done = pending.done()
        pending.take(rank, reply)
        if pending.done() and not was_done:
            self._record(pending, pending.replies[rank], now_s)
        if pending.is_over:
            del self._pending[reply.call_id]

    def _record(self, pending: PendingCall, reply: Reply | StepReply, now_s: float) -> None:
        if isinstance(reply, StepReply) and reply.result is not None and reply.failure is None:
            num_tokens = len(reply.result.token_ids)
            self._recorder.completed_step(pending.sent_s, now_s, reply.result.device_s, num_tokens)
        self._recorder.completed(now_s - pending.sent_s, now_s, is_failure=reply.failure is not None)

    # --- deaths ---

    def _find_dead(self) -> None:
        """The rank that was killed goes before those that ended because they had lost it."""
        ends = [(handle.rank, end) for handle in self._handles if (end := handle.end()) is not None]
        if ends:
            rank, end = next((one for one in ends if one[1].is_killed), ends[0])
            self._lose(rank, end.reason, len(ends))

    def _look_for_stuck(self) -> None:
        now_s = time.monotonic()
        assert self._watchdog is not None
        if not self._watchdog.is_due(now_s):
            return
        is_busy = any(not call.is_step for call in self._pending.values())
        verdict = self._watchdog.verdict(now_s, is_busy=is_busy)
        if verdict is not None:
            self._end_stuck(*verdict)

    def _end_stuck(self, rank: int, reason: str) -> None:
        logger.error("rank %d is %s; the stacks of all ranks follow, then they are ended", rank, reason)
        self._dump_stacks()
        self._kill_stuck()
        self._lose(rank, reason, 1)

    def _kill_stuck(self) -> None:
        """A rank stands still: end the whole group, of which some may wait for it."""
        _kill(self._handles)

    def _dump_stacks(self) -> None:
        dump_all(self._handles, lambda: self._listen(self._limits.dump_s))

    def _lose(self, rank: int, reason: str, num_workers: int) -> None:
        self._recorder.num_failed_workers += num_workers
        self._lost = WorkerDied(rank, reason)
        self._give_up_calls(self._lost)
        if not self.is_asleep:  # those that die asleep are not missed before somebody wakes them
            self._lost_s = time.monotonic()


def _kill(handles: Iterable[RankHandle]) -> None:
    for handle in handles:
        handle.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
