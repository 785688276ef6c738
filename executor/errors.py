"""The errors between the engine and its workers."""

from __future__ import annotations

from millrace.executor.wire.messages import Failure


class ExecutorError(Exception):
    """Base of every error of this folder."""


class ExecutorTimeout(ExecutorError, TimeoutError):
    """Raised when a reply did not arrive in time. A late reply is dropped."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank = rank
        """The first rank that did not answer."""


class WorkerError(ExecutorError):
    """Raised when a worker answered a call with an error. Its process goes on."""

    def __init__(self, rank: int, failure: Failure) -> None:
        super().__init__(f"rank {rank}: {failure.kind}: {failure.message}")
        self.rank = rank
        self.failure = failure


class WorkerDied(ExecutorError):
    """Raised when a worker ended, or was killed because it was stuck. Only `restart` and `shutdown` work afterwards."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is gone: {reason}")
        self.rank = rank
        self.reason = reason


class StepLost(ExecutorError):
    """Raised when an interruption has lost the result of a step. The worker goes on with the next step of depth 1."""


class StartError(ExecutorError):
    """Raised when a worker did not become ready. Names the phase and the rank."""

    def __init__(
        self, phase: str, rank: int, message: str, *, is_retryable: bool, failure: Failure | None = None
    ) -> None:
        super().__init__(f"rank {rank} did not start, in phase {phase}: {message}")
        self.phase = phase
        self.rank = rank
        self.message = message
        self.is_retryable = is_retryable
        """False when another attempt would fail in the same way: a wrong model directory, a wrong option."""
        self.failure = failure
