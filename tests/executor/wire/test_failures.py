"""How errors of workers are classified."""

from __future__ import annotations

import pytest

from millrace.executor.wire.failures import EXIT_CRASH, exit_status, is_retryable_exit, to_failure
from tests.executor.fragile_worker import AcceleratorError


def test_memory_that_is_short_outside_of_torchs_allocator_is_no_lost_device() -> None:
    assert to_failure(AcceleratorError("CUDA error: out of memory")).cause == "out_of_memory"
    assert to_failure(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")).cause == "out_of_memory"
    lost = to_failure(AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert (lost.cause, is_retryable_exit(exit_status(lost)), is_retryable_exit(EXIT_CRASH)) == (
        "device_lost",
        True,
        True,
    )


@pytest.mark.parametrize(
    ("status", "is_retryable"), [(0, True), (1, True), (2, False), (7, True), (8, True), (-9, True)]
)
def test_only_a_worker_that_names_the_configuration_is_not_started_again(status: int, is_retryable: bool) -> None:
    assert is_retryable_exit(status) == is_retryable
