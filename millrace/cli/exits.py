"""Exit statuses, and the mapping of errors and of SIGTERM to them."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import NoReturn

OK = 0
OTHER = 1
"""A job failed, or an error without a status of its own."""
INVALID = 2
"""The command line or a request is not valid; argparse uses the same number."""
NOT_FOUND = 3
NO_REDIS = 4
"""The server cannot be reached or used. Of `run-batch`: it is not complete, for whatever reason, and the same command
continues."""
TIMED_OUT = 5
INTERRUPTED = 130
CLOSED_PIPE = 141
"""The reader of stdout has seen enough; a shell has this status for a program that SIGPIPE ends."""


_AGAIN_S = 0.05
"""Until an interrupt that was dropped comes again."""

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Of an error without the name of a file."""


class CommandError(Exception):
    """Raised by a verb that cannot continue: a message for the user, and the exit status."""

    def __init__(self, message: str, status: int = OTHER) -> None:
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C inside the block, so that the verb ends its processes and says how to continue."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    def report(unraisable: sys.UnraisableHookArgs) -> None:
        """Interrupt again where Python has dropped the exception, since the signal came while it ran a `__del__`."""
        if unraisable.exc_type is KeyboardInterrupt:
            main = threading.main_thread().ident
            assert main is not None
            threading.Timer(_AGAIN_S, signal.pthread_kill, (main, signal.SIGTERM)).start()
        else:
            report_before(unraisable)

    before, report_before = signal.signal(signal.SIGTERM, interrupt), sys.unraisablehook
    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = report_before
        signal.signal(signal.SIGTERM, before)


def as_exit(error: Exception) -> tuple[int, str]:
    """Return the exit status and the message for an error. An unexpected error is our bug: print its traceback too."""
    from millrace.results.errors import one_line

    if isinstance(error, CommandError):
        return error.status, str(error)
    if isinstance(error, OSError) and error.filename:
        return INVALID, one_line(f"{error.filename}: {error.strerror}")
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return OTHER, one_line(f"stdout can't be written: {error.strerror}")
    status = _status_of(error)
    if status is None:
        traceback.print_exception(error)
    return OTHER if status is None else status, one_line(str(error) or type(error).__name__, 480)


def _status_of(error: Exception) -> int | None:
    from millrace.producer.errors import InvalidRequest
    from millrace.results import errors

    match error:
        case InvalidRequest() | errors.JobConflict() | errors.CannotRedrive() | errors.InvalidRedisURL():
            return INVALID
        case errors.JobNotFound() | errors.BatchNotFound() | errors.EngineNotFound():
            return NOT_FOUND
        case errors.RedisUnavailable() | errors.ServerUnsuitable() | errors.NotDurable():
            return NO_REDIS
        case errors.WaitTimeout():
            return TIMED_OUT
        case errors.MillraceError() | OSError():  # such as a full disk behind stdout
            return OTHER
    return None
