"""Names what went wrong in a worker: for the wire as a `Failure`, for a supervisor as an exit status."""

from __future__ import annotations

import signal
import traceback
from typing import Literal

from millrace.executor.wire.messages import Failure

EXIT_CRASH = 1
EXIT_CONFIGURATION = 2
EXIT_DEVICE_LOST = 7
EXIT_OUT_OF_MEMORY = 8
"""As `millrace serve` has them: under torchrun a rank is one, too."""

_EXIT_MEANINGS = {
    EXIT_CRASH: "crash",
    EXIT_CONFIGURATION: "configuration",
    EXIT_DEVICE_LOST: "device lost",
    EXIT_OUT_OF_MEMORY: "out of memory",
}

_OUT_OF_MEMORY_KINDS = frozenset({"OutOfMemoryError", "MemoryError"})
_OUT_OF_MEMORY_WORDS = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What torch says, under other names, when host memory is short, or a GPU's for what its allocator does not manage."""
_DEVICE_LOST_KINDS = frozenset({"AcceleratorError"})
_PEER_LOST_KINDS = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "RendezvousError"})
"""Class names, since this side must not import torch. A lost peer is retryable: the other rank says what happened."""
_PEER_LOST_WORDS = ("connection closed by peer", "connection reset by peer", "timed out waiting", "broken pipe")
"""What gloo says then, in a plain RuntimeError that also names the file of gloo's source that it comes from."""
_GLOO_SOURCES = "gloo/transport/"
_REFUSAL_KINDS = frozenset({"ConfigError", "DeviceError", "ModelError"})
"""Of `millrace.worker.errors`: their one sentence names the remedy."""


def to_failure(error: BaseException) -> Failure:
    """Name, message, traceback and cause of `error`."""
    names = {cls.__name__ for cls in type(error).__mro__}
    cause = _cause(names, str(error))
    is_peer_lost = bool(names & _PEER_LOST_KINDS) or _has_gloo_lost_a_peer(str(error))
    return Failure(
        kind=type(error).__name__,
        message=str(error) or type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
        is_retryable=cause != "error" or is_peer_lost,
        cause=cause,
    )


def needs_traceback(failure: Failure) -> bool:
    """Whether a log says more with it: not for a refusal, and not for too little memory, which is expected now and then.
    What follows from those the engine says."""
    return failure.cause != "out_of_memory" and failure.kind not in _REFUSAL_KINDS


def _has_gloo_lost_a_peer(message: str) -> bool:
    return _GLOO_SOURCES in message and any(words in message.lower() for words in _PEER_LOST_WORDS)


def _cause(names: set[str], message: str) -> Literal["error", "out_of_memory", "device_lost"]:
    if names & _OUT_OF_MEMORY_KINDS or any(words in message for words in _OUT_OF_MEMORY_WORDS):
        return "out_of_memory"
    return "device_lost" if names & _DEVICE_LOST_KINDS else "error"


def exit_status(failure: Failure) -> int:
    """With what a worker ends whose start failed so."""
    match failure.cause:
        case "out_of_memory":
            return EXIT_OUT_OF_MEMORY
        case "device_lost":
            return EXIT_DEVICE_LOST
        case _:
            return EXIT_CRASH if failure.is_retryable else EXIT_CONFIGURATION


def describe_exit(status: int) -> str:
    """A process's end in words; `status` is negative for a signal, as in `subprocess`."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    meaning = _EXIT_MEANINGS.get(status)
    return f"exit status {status} ({meaning})" if meaning else f"exit status {status}"


def is_retryable_exit(status: int) -> bool:
    """Whether a worker that ended so may do better when it is started again: unless it says itself that it won't."""
    return status != EXIT_CONFIGURATION
