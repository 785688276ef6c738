"""The future of a step or a call."""

from __future__ import annotations

from typing import Protocol, TypeVar

from millrace.executor.wire.messages import StepResult

Outcome = TypeVar("Outcome", covariant=True)


class Future(Protocol[Outcome]):
    """The outcome of one `execute_model` or `collective_rpc`, now or later."""

    def result(self, timeout_s: float | None = None) -> Outcome:
        """Wait for the outcome and return it. Raises `WorkerError`, `ExecutorTimeout` and `WorkerDied`."""

    def done(self) -> bool:
        """Whether `result` would return at once."""


StepFuture = Future[StepResult]
