"""The errors of an engine."""

from __future__ import annotations

from millrace.results.errors import MillraceError


class EngineError(MillraceError):
    """Base of the errors of an engine."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))  # the message of a library may have several lines


class ConfigurationError(EngineError):
    """Raised at the start when an option or the model can't work; another attempt would end the same way."""


class PortInUse(EngineError):
    """Raised at the start when another process has the metrics port, perhaps an engine that drains. Later it may be free."""


class Asleep(EngineError):
    """Raised when a generation is to run while the engine sleeps. Call `wake_up` first."""


class WorkersLost(EngineError):
    """Raised when the workers of a draining engine are lost, since they are not replaced."""


class EngineDead(EngineError):
    """Raised when the workers are lost and can't be replaced."""

    def __init__(self, message: str, cause: str = "error") -> None:
        """`cause`: as in `millrace.executor.wire.messages.Failure`, of the last attempt."""
        super().__init__(message)
        self.cause = cause
