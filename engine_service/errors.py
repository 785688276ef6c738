"""The errors of an engine."""

from __future__ import annotations

_MAX_CHARACTERS = 460


class EngineError(Exception):
    """Base of every error of this folder. Its message is one printable line of bounded length."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ConfigurationError(EngineError):
    """Raised at the start when an option or the model can't work; another attempt would end the same way."""


class WorkersLost(EngineError):
    """Raised when the workers of a draining engine are lost, since they are not replaced."""


class EngineDead(EngineError):
    """Raised when the workers are lost and can't be replaced."""

    def __init__(self, message: str, cause: str = "error") -> None:
        """`cause`: as in `millrace.executor.wire.messages.Failure`, of the last attempt."""
        super().__init__(message)
        self.cause = cause


def one_line(message: str) -> str:
    """Return the message in one printable line. A long one, often of a library, keeps its beginning and its end."""
    line = " ".join(message.split())
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    half = _MAX_CHARACTERS // 2
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:half]} ... {line[-half:]}"
