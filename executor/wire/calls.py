"""The calls in progress between the engine and its ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from millrace.executor.errors import ExecutorTimeout, WorkerDied, WorkerError
from millrace.executor.metrics import Recorder
from millrace.executor.wire.messages import NO_TOKEN, Failure, Reply, StepPlan, StepReply, StepResult

_PEER_DEATH_S = 0.5
"""A rank may report the loss of a peer before the engine sees the end of that peer's process: connections close first.
The engine waits this long for that end."""


class MessageLoop(Protocol):
    """Receives messages while a caller waits for a reply."""

    def process_messages(self, timeout_s: float) -> None:
        """Wait for messages or the end of a rank for at most `timeout_s`, and handle them."""

    def require_workers(self) -> None:
        """Raise `WorkerDied` when a worker is lost."""

    def abandon(self, call_id: int) -> None:
        """Note that this call has timed out."""


class PendingCall:
    """One call and the replies to it so far. Implements `Future`."""

    def __init__(
        self,
        loop: MessageLoop,
        call_id: int,
        ranks: Sequence[int],
        reply_rank: int | None,
        limit_s: float,
        plan: StepPlan | None = None,
    ) -> None:
        """`ranks`: the ranks that are sent the call. `reply_rank`: the rank whose result is the outcome; None: all are,
        as a list. `limit_s`: the default limit of `result`. `plan`: set for a step."""
        self.call_id = call_id
        self.sent_s = time.monotonic()
        self.replies: dict[int, Reply | StepReply] = {}
        self._loop = loop
        self._plan = plan
        self._ranks = ranks
        self._wanted = ranks if reply_rank is None else (reply_rank,)
        self._is_list = reply_rank is None
        self._limit_s = limit_s
        self._failed_rank: int | None = None
        self._lost: WorkerDied | None = None

    def add_reply(self, rank: int, reply: Reply | StepReply) -> None:
        """Record a rank's reply. A reply that does not fit the call counts as the rank's failure."""
        if reply.failure is None and (reply_error := self._reply_error(rank, reply)) is not None:
            reply = msgspec.structs.replace(
                reply, failure=Failure(kind="BadReply", message=reply_error, is_retryable=True)
            )
        self.replies[rank] = reply
        if reply.failure is not None and self._failed_rank is None:
            self._failed_rank = rank

    def fail(self, lost: WorkerDied) -> None:
        """End the call: the ranks that were sent it are gone. A later start does not revive it."""
        self._lost = lost

    def _reply_error(self, rank: int, reply: Reply | StepReply) -> str | None:
        if isinstance(reply, StepReply) != self.is_step:
            return f"it answered a {'step' if self.is_step else 'call'} with a {type(reply).__name__}"
        if self._plan is None or rank not in self._wanted:
            return None
        assert isinstance(reply, StepReply)
        return None if reply.result is not None and fits(reply.result, self._plan) else "its result is not of this step"

    @property
    def is_step(self) -> bool:
        return self._plan is not None

    @property
    def has_all_replies(self) -> bool:
        return len(self.replies) == len(self._ranks)

    def done(self) -> bool:
        if self._failed_rank is not None or self._lost is not None:
            return True
        return all(rank in self.replies for rank in self._wanted)

    def result(self, timeout_s: float | None = None) -> Any:
        limit_s = self._limit_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        while not self.done():
            self._loop.require_workers()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._loop.abandon(self.call_id)
                missing = next(rank for rank in self._wanted if rank not in self.replies)
                raise ExecutorTimeout(missing, f"no reply to call {self.call_id} within {limit_s:g} s")
            self._loop.process_messages(left_s)
        if self._lost is not None:
            raise self._lost
        if self._failed_rank is not None:
            self._raise_failure(self._failed_rank)
        results = [self.replies[rank].result for rank in self._wanted]
        return results if self._is_list else results[0]

    def _raise_failure(self, rank: int) -> None:
        """Raise the rank's error, or `WorkerDied` when another rank has died, which is the cause of the error then. If
        the rank itself has died, its error says more than its exit status."""
        failure = self.replies[rank].failure
        assert failure is not None
        has_lost_peer = failure.is_retryable and failure.cause == "error"
        deadline_s = time.monotonic() + (_PEER_DEATH_S if has_lost_peer else 0.0)
        try:
            while True:
                left_s = deadline_s - time.monotonic()
                self._loop.process_messages(max(0.0, left_s))
                self._loop.require_workers()
                if left_s <= 0:
                    break
        except WorkerDied as death:
            if death.rank != rank:
                raise
        raise WorkerError(rank, failure)


def fits(result: StepResult, plan: StepPlan) -> bool:
    """Whether this can be the result of this plan: a token or a failure for every row that yields a token."""
    return (
        (result.step_id, result.epoch) == (plan.step_id, plan.epoch)
        and len(result.token_ids) == plan.num_sampled
        and result.token_ids.count(NO_TOKEN) == len(result.failures)
    )


class CallTable:
    """Owns the calls in progress, and records how they end."""

    def __init__(self, loop: MessageLoop, recorder: Recorder) -> None:
        self._loop = loop
        self._recorder = recorder
        self._last_id = 0
        self._calls: dict[int, PendingCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(
        self, ranks: Sequence[int], reply_rank: int | None, limit_s: float, plan: StepPlan | None = None
    ) -> PendingCall:
        """Make a call under a new id. Parameters as in `PendingCall`."""
        self._last_id += 1
        call = PendingCall(self._loop, self._last_id, ranks, reply_rank, limit_s, plan)
        self._calls[call.call_id] = call
        self._recorder.num_requests += 1
        return call

    @property
    def num_steps(self) -> int:
        """Steps without an outcome."""
        return sum(call.is_step and not call.done() for call in self._calls.values())

    @property
    def has_other_than_steps(self) -> bool:
        return any(not call.is_step for call in self._calls.values())

    def add_reply(self, rank: int, reply: Reply | StepReply, now_s: float) -> None:
        """Pass a reply to its call. A reply that no call waits for is stale, and counted."""
        call = self._calls.get(reply.call_id)
        if call is None or rank in call.replies:
            self._recorder.num_stale_replies += 1
            return
        was_done = call.done()
        call.add_reply(rank, reply)
        if call.done() and not was_done:
            self._record_outcome(call, call.replies[rank], now_s)
        if call.has_all_replies:
            del self._calls[reply.call_id]

    def _record_outcome(self, call: PendingCall, reply: Reply | StepReply, now_s: float) -> None:
        if isinstance(reply, StepReply) and reply.result is not None and reply.failure is None:
            num_tokens = len(reply.result.token_ids) - len(reply.result.failures)
            self._recorder.step_done(call.sent_s, now_s, reply.result.device_s, num_tokens)
        self._recorder.request_done(now_s - call.sent_s, is_failure=reply.failure is not None)

    def abandon(self, call_id: int) -> bool:
        """Remove a call that has timed out, and return whether there was one. Its late replies are stale."""
        call = self._calls.pop(call_id, None)
        if call is not None:
            self._record_failure(call)
        return call is not None

    def fail_all(self, lost: WorkerDied) -> None:
        """End every call: the ranks are gone."""
        for call in self._calls.values():
            if not call.done():
                self._record_failure(call)
                call.fail(lost)
        self._calls.clear()

    def _record_failure(self, call: PendingCall) -> None:
        self._recorder.request_done(time.monotonic() - call.sent_s, is_failure=True)
