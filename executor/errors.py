"""What can go wrong between the engine and its workers."""

from __future__ import annotations

from millrace.executor.wire.messages import Failure


class ExecutorError(Exception):
    """Base of every error of this folder."""


class UnknownMethod(ExecutorError):
    """Raised when a call names something that is not in `WORKER_METHODS`."""


class ExecutorTimeout(ExecutorError, TimeoutError):
    """Raised when a reply did not come in time; the reply is dropped when it does."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank = rank
        """The first of those that did not answer."""


class WorkerError(ExecutorError):
    """Raised when a worker answered a call with an error of its own; the process lives on."""

    def __init__(self, rank: int, failure: Failure) -> None:
        super().__init__(f"rank {rank}: {failure.kind}: {failure.message}")
        self.rank = rank
        self.failure = failure


class WorkerDied(ExecutorError):
    """Raised when a worker is lost: it has ended, or it was ended because it was stuck. Nothing but `restart` and
    `shutdown` works afterwards."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is gone: {reason}")
        self.rank = rank
        self.reason = reason


class Asleep(ExecutorError):
    """Raised when a step is wanted of workers that sleep; `wake_up` first."""


class StartError(ExecutorError):
    """Raised when a worker did not become ready; names the phase, and the rank."""

    def __init__(
        self, phase: str, rank: int, message: str, *, is_retryable: bool, failure: Failure | None = None
    ) -> None:
        super().__init__(f"rank {rank} did not start, in phase {phase}: {message}")
        self.phase = phase
        self.rank = rank
        self.message = message
        self.is_retryable = is_retryable
        """False when another attempt would end the same way: a wrong model directory, a wrong option."""
        self.failure = failure
