"""How errors of workers are classified."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

from millrace.executor.wire.failures import (
    EXIT_CRASH,
    EXIT_OUT_OF_MEMORY,
    describe_exit,
    exit_status,
    is_interruption,
    is_retryable_exit,
    to_failure,
)
from tests.executor.fragile_worker import AcceleratorError


def test_memory_that_is_short_outside_of_torchs_allocator_is_no_lost_device() -> None:
    assert to_failure(AcceleratorError("CUDA error: out of memory")).cause == "out_of_memory"
    for status in ("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED"):
        assert to_failure(RuntimeError(f"CUDA error: {status} when calling")).cause == "out_of_memory"
    lost = to_failure(AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert (lost.cause, is_retryable_exit(exit_status(lost)), is_retryable_exit(EXIT_CRASH)) == (
        "device_lost",
        True,
        True,
    )


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("Triton Error [CUDA]: an illegal memory access was encountered", "device_lost"),
        ("Triton Error [CUDA]: unspecified launch failure", "device_lost"),
        ("Triton Error [CUDA]: out of memory", "out_of_memory"),
        ("Triton Error [CUDA]: invalid argument", "error"),
        ("Triton Error [CUDA]: device kernel image is invalid", "error"),
        ("CUDA driver error: unknown error", "device_lost"),
        ("CUDA driver error: out of memory", "out_of_memory"),
        (
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`",
            "device_lost",
        ),
        (
            "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
            "device_lost",
        ),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "device_lost"),
        ("out of resource: shared memory, Required: 278528, Hardware limit: 232448.", "error"),
        ("mat1 and mat2 shapes cannot be multiplied (1x2 and 3x4)", "error"),
    ],
)
def test_errors_of_a_device_are_told_from_our_own_by_their_text(message: str, cause: str) -> None:
    assert to_failure(RuntimeError(message)).cause == cause


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("unable to mmap 1073741912 bytes from file </m/model.safetensors>: Cannot allocate memory (12)"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        MemoryError(),
    ],
)
def test_memory_of_the_host_that_is_short_is_out_of_memory(error: Exception) -> None:
    assert to_failure(error).cause == "out_of_memory"


def test_a_tensor_without_memory_on_the_host_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    failure = to_failure(caught.value)
    assert (failure.cause, exit_status(failure)) == ("out_of_memory", EXIT_OUT_OF_MEMORY)


def test_the_end_of_a_process_names_what_may_have_ended_it() -> None:
    assert describe_exit(-signal.SIGKILL) == "killed by SIGKILL (by the kernel if memory ran out: see dmesg)"
    assert describe_exit(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert describe_exit(-40) == "killed by signal 40"
    assert describe_exit(EXIT_OUT_OF_MEMORY) == "exit status 8 (out of memory)"


def test_torchs_own_accelerator_error_is_a_lost_device() -> None:
    error = torch.AcceleratorError(
        "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress'"
    )
    assert to_failure(error).cause == "device_lost"


def test_a_gpu_that_this_torch_has_no_kernels_for_is_no_lost_device_and_another_start_is_of_no_use() -> None:
    failure = to_failure(torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"))
    assert (failure.cause, is_retryable_exit(exit_status(failure))) == ("error", False)


@pytest.mark.parametrize(
    ("status", "is_retryable"), [(0, True), (1, True), (2, False), (7, True), (8, True), (-9, True)]
)
def test_only_a_worker_that_names_the_configuration_is_not_started_again(status: int, is_retryable: bool) -> None:
    assert is_retryable_exit(status) == is_retryable


def test_a_message_is_one_line_in_a_log() -> None:
    text = "CUDA error: out of memory\nSearch for it in the manual.\n"
    assert to_failure(AcceleratorError(text)).message == "CUDA error: out of memory Search for it in the manual."


def plain(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def with_any_arguments(*arguments: Any) -> None:
    plain(*arguments)


def that_replaces_itself(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    raise TimeoutError


class Handler:
    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    def method(self, number: int, frame: FrameType | None) -> None:
        raise TimeoutError


@pytest.mark.parametrize(
    "handler",
    [
        plain,
        with_any_arguments,
        that_replaces_itself,
        Handler(),
        Handler().method,
        partial(plain),
        lambda *_: plain(0, None),
    ],
)
def test_the_error_of_a_signal_handler_is_an_interruption(handler: Callable[..., None]) -> None:
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises(TimeoutError) as caught:
            signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert is_interruption(caught.value)


def test_other_errors_are_no_interruptions() -> None:
    def look_at_the_caller() -> None:
        caller = sys._getframe(1)
        raise TimeoutError(caller.f_code.co_name)

    for work in (look_at_the_caller, partial(plain, 0, None), partial(plain, 0, sys._getframe().f_back)):
        with pytest.raises(TimeoutError) as caught:
            work()
        assert not is_interruption(caught.value)
