"""The calls that are under way between the engine and its ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from millrace.executor.errors import ExecutorTimeout, WorkerDied, WorkerError
from millrace.executor.wire.messages import Failure, Reply, StepPlan, StepReply, StepResult

_WITNESS_S = 0.5
"""When a rank says that it lost another, the end of that one gets this long to be noticed: its connections close first."""


class Pump(Protocol):
    """Who moves the messages while somebody waits for a reply."""

    def pump(self, timeout_s: float) -> None:
        """Wait for messages or a death for at most this long and deal with what has come."""

    def require_workers(self) -> None:
        """Raise `WorkerDied` when a worker is lost."""

    def forget(self, call_id: int) -> None:
        """Nobody waits for this call any more."""


class PendingCall:
    """One call on its way to the ranks: what has come back so far. `StepFuture` for a step."""

    def __init__(
        self,
        pump: Pump,
        call_id: int,
        wanted: Iterable[int],
        *,
        num_asked: int,
        is_list: bool,
        limit_s: float,
        plan: StepPlan | None = None,
    ) -> None:
        """`wanted`: of the `num_asked` ranks that have got it, those whose results are the outcome. `plan`: of a step."""
        self.call_id = call_id
        self.sent_s = time.monotonic()
        self.replies: dict[int, Reply | StepReply] = {}
        self._pump = pump
        self._plan = plan
        self._num_asked = num_asked
        self._wanted = tuple(wanted)
        self._is_list = is_list
        self._limit_s = limit_s
        self._failed_rank: int | None = None
        self._lost: WorkerDied | None = None

    def take(self, rank: int, reply: Reply | StepReply) -> None:
        """A rank has answered. What is no answer to this call counts as the rank's failure."""
        if reply.failure is None and (reply_error := self._reply_error(rank, reply)) is not None:
            reply = msgspec.structs.replace(
                reply, failure=Failure(kind="BadReply", message=reply_error, is_retryable=True)
            )
        self.replies[rank] = reply
        if reply.failure is not None and self._failed_rank is None:
            self._failed_rank = rank

    def give_up(self, lost: WorkerDied) -> None:
        """What has not come yet never will: the ranks that were asked are gone, also when there are others by then."""
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
    def is_over(self) -> bool:
        """Whether every rank has answered."""
        return len(self.replies) == self._num_asked

    def done(self) -> bool:
        if self._failed_rank is not None or self._lost is not None:
            return True
        return all(rank in self.replies for rank in self._wanted)

    def result(self, timeout_s: float | None = None) -> Any:
        limit_s = self._limit_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        while not self.done():
            self._pump.require_workers()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._pump.forget(self.call_id)
                missing = next(rank for rank in self._wanted if rank not in self.replies)
                raise ExecutorTimeout(missing, f"no reply to call {self.call_id} within {limit_s:g} s")
            self._pump.pump(left_s)
        if self._lost is not None:
            raise self._lost
        if self._failed_rank is not None:
            self._raise_failure(self._failed_rank)
        results = [self.replies[rank].result for rank in self._wanted]
        return results if self._is_list else results[0]

    def _raise_failure(self, rank: int) -> None:
        """When another rank has died, that is what happened, and not the error of its peer. A rank that died of its own
        error has said more in it than its end does."""
        failure = self.replies[rank].failure
        assert failure is not None
        has_lost_peer = failure.is_retryable and failure.cause == "error"
        deadline_s = time.monotonic() + (_WITNESS_S if has_lost_peer else 0.0)
        try:
            while True:
                left_s = deadline_s - time.monotonic()
                self._pump.pump(max(0.0, left_s))
                self._pump.require_workers()
                if left_s <= 0:
                    break
        except WorkerDied as death:
            if death.rank != rank:
                raise
        raise WorkerError(rank, failure)


def fits(result: StepResult, plan: StepPlan) -> bool:
    """Whether it can be the result of this plan: tokens for every row that samples, but for those that failed."""
    failed = {failure.seq_id for failure in result.failures}
    return (
        (result.step_id, result.epoch) == (plan.step_id, plan.epoch)
        and result.seq_ids == [row.seq_id for row in plan.rows if row.samples and row.seq_id not in failed]
        and len(result.num_tokens) == len(result.seq_ids)
        and min(result.num_tokens, default=1) >= 1
        and sum(result.num_tokens) == len(result.token_ids)
    )
