"""Classifies the errors of a worker: as a `Failure` for the wire, as an exit status for a supervisor."""

from __future__ import annotations

import inspect
import signal
import traceback
from types import FrameType
from typing import Literal

from millrace.executor.wire.messages import Failure

EXIT_CRASH = 1
EXIT_CONFIGURATION = 2
EXIT_DEVICE_LOST = 7
EXIT_OUT_OF_MEMORY = 8
"""The same as those of `millrace serve`: under torchrun a rank is such a process too."""

EXIT_BY_CAUSE = {"out_of_memory": EXIT_OUT_OF_MEMORY, "device_lost": EXIT_DEVICE_LOST}
"""By `Failure.cause`, for the causes that have a status of their own."""

_EXIT_MEANINGS = {
    EXIT_CRASH: "crash",
    EXIT_CONFIGURATION: "configuration",
    EXIT_DEVICE_LOST: "device lost",
    EXIT_OUT_OF_MEMORY: "out of memory",
}

_OUT_OF_MEMORY_KINDS = frozenset({"OutOfMemoryError", "MemoryError"})
_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator",
    "Cannot allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "Triton Error [CUDA]: out of memory",
)
"""In errors of other kinds: when host memory is short, or GPU memory that torch's allocator does not manage."""
_DEVICE_LOST_KINDS = frozenset({"AcceleratorError"})
_DEVICE_LOST_TEXTS = (
    "Triton Error [CUDA]",
    "CUDA driver error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
)
"""In plain RuntimeErrors of Triton's launcher and of torch. No later call to the device succeeds in this process."""
_REFUSED_LAUNCH_TEXTS = (
    "no kernel image is available",
    "device kernel image is invalid",
    "unsupported toolchain",
    "invalid device function",
    "invalid configuration argument",
    "invalid argument",
    "too many resources requested for launch",
    "operation not supported",
)
"""In errors of the kinds above when the driver refuses a call: the device works, and so do later calls."""
_PEER_LOST_KINDS = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "RendezvousError"})
"""Class names, since this side must not import torch. A lost peer is retryable: the other rank has the cause."""
_PEER_LOST_TEXTS = ("connection closed by peer", "connection reset by peer", "timed out waiting", "broken pipe")
"""In gloo's errors when a peer is lost. They are plain RuntimeErrors that also name a file of gloo's source."""
_GLOO_SOURCES = "gloo/transport/"
_REFUSAL_KINDS = frozenset({"ConfigError", "DeviceError", "ModelError", "StepSkipped"})
"""Classes of `millrace.worker.errors` whose message is sufficient without a traceback."""


def to_failure(error: BaseException) -> Failure:
    """Return kind, message in one line, traceback and cause of `error`."""
    names = {cls.__name__ for cls in type(error).__mro__}
    cause = _cause(names, str(error))
    is_peer_lost = bool(names & _PEER_LOST_KINDS) or _is_gloo_peer_lost(str(error))
    return Failure(
        kind=type(error).__name__,
        message=" ".join(str(error).split()) or type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
        is_retryable=cause != "error" or is_peer_lost,
        cause=cause,
    )


def is_interruption(error: BaseException) -> bool:
    """Whether a Python signal handler has raised `error`. It is for the program, mostly a time limit of its own, and says
    nothing about the code that it has interrupted."""
    return any(_is_of_handler(frame) for frame, _ in traceback.walk_tb(error.__traceback__))


def _is_of_handler(frame: FrameType) -> bool:
    """Whether a function has its caller's frame as an argument. Python calls signal handlers in this way. It is not asked
    which ones are installed, since a handler may have replaced itself."""
    names, varargs, _, values = inspect.getargvalues(frame)
    arguments = [*(values.get(name) for name in names), *values.get(varargs or "", ())]
    return frame.f_back is not None and any(argument is frame.f_back for argument in arguments)


def needs_traceback(failure: Failure) -> bool:
    """Whether a log should have the traceback: not of a refusal, and not when memory is short, which is expected now and
    then. The engine logs the consequence of those."""
    return failure.cause != "out_of_memory" and failure.kind not in _REFUSAL_KINDS


def _is_gloo_peer_lost(message: str) -> bool:
    return _GLOO_SOURCES in message and any(text in message.lower() for text in _PEER_LOST_TEXTS)


def _cause(names: set[str], message: str) -> Literal["error", "out_of_memory", "device_lost"]:
    if names & _OUT_OF_MEMORY_KINDS or any(text in message for text in _OUT_OF_MEMORY_TEXTS):
        return "out_of_memory"
    is_of_device = names & _DEVICE_LOST_KINDS or any(text in message for text in _DEVICE_LOST_TEXTS)
    is_refused = any(text in message for text in _REFUSED_LAUNCH_TEXTS)
    return "device_lost" if is_of_device and not is_refused else "error"


def exit_status(failure: Failure) -> int:
    """Return the exit status of a worker whose start failed like this."""
    return EXIT_BY_CAUSE.get(failure.cause, EXIT_CRASH if failure.is_retryable else EXIT_CONFIGURATION)


def describe_exit(status: int) -> str:
    """Describe the end of a process. `status` is negative for a signal, as in `subprocess`."""
    if status == -signal.SIGKILL:
        return "killed by SIGKILL (by the kernel if memory ran out: see dmesg)"
    if status < 0:
        has_name = -status in set(signal.Signals)  # most real-time signals have none
        return f"killed by {signal.Signals(-status).name if has_name else f'signal {-status}'}"
    meaning = _EXIT_MEANINGS.get(status)
    return f"exit status {status} ({meaning})" if meaning else f"exit status {status}"


def is_retryable_exit(status: int) -> bool:
    """Whether another start may succeed. The worker itself decides against it, by its exit status."""
    return status != EXIT_CONFIGURATION
