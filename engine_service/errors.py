"""What can go wrong in an engine."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error of this folder."""


class ConfigurationError(EngineError):
    """Raised at the start when an option or the model can't work; another attempt would end the same way."""


class WorkersLost(EngineError):
    """Raised when the workers of an engine that is leaving are lost: they are not replaced any more."""


class EngineDead(EngineError):
    """Raised when the workers are lost and do not come back."""

    def __init__(self, message: str, cause: str = "error") -> None:
        """`cause`: as in `millrace.executor.wire.messages.Failure`, of the last attempt."""
        super().__init__(message)
        self.cause = cause
