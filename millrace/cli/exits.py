"""Exit statuses, and which error becomes which of them."""

from __future__ import annotations

import traceback

OK = 0
OTHER = 1
"""A job ended badly, or something that no other status names."""
INVALID = 2
"""The command line or a request is not valid; argparse uses the same number."""
NOT_FOUND = 3
NO_REDIS = 4
"""The server cannot be reached, or would lose jobs."""
TIMED_OUT = 5
INTERRUPTED = 130


class CommandError(Exception):
    """Raised by a verb that cannot go on: one sentence for the user, and the exit status."""

    def __init__(self, sentence: str, status: int = OTHER) -> None:
        super().__init__(sentence)
        self.status = status


def as_exit(error: Exception) -> tuple[int, str]:
    """The exit status and the sentence of an error. One that nobody expected keeps its traceback: it is our bug."""
    if isinstance(error, CommandError):
        return error.status, str(error)
    if isinstance(error, OSError) and error.filename:
        return INVALID, f"{error.filename}: {error.strerror}"
    status = _status_of(error)
    if status is None:
        traceback.print_exception(error)
    return OTHER if status is None else status, _one_sentence(error)


def _status_of(error: Exception) -> int | None:
    from millrace import (
        BatchNotFound,
        CannotRedrive,
        EngineNotFound,
        InvalidRequest,
        JobConflict,
        JobNotFound,
        MillraceError,
        NotDurable,
        RedisUnavailable,
        ServerUnsuitable,
        WaitTimeout,
    )

    match error:
        case InvalidRequest() | JobConflict() | CannotRedrive():
            return INVALID
        case JobNotFound() | BatchNotFound() | EngineNotFound():
            return NOT_FOUND
        case RedisUnavailable() | ServerUnsuitable() | NotDurable():
            return NO_REDIS
        case WaitTimeout():
            return TIMED_OUT
        case MillraceError():
            return OTHER
    return None


def _one_sentence(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
