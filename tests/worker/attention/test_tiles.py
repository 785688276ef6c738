"""How decode rows are shared out among the programs of a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from millrace.worker.attention.triton import num_together


@pytest.mark.parametrize(
    ("num_registers", "num_warps", "num_bytes", "expected"),
    [
        (128, 2, 22544, 8),
        (104, 2, 22544, 8),  # 9 have enough registers together, but not in one of the four parts each
        (96, 2, 22544, 9),  # for 10 there is not enough shared memory
        (200, 2, 45072, 4),
        (255, 16, 1024, 1),
    ],
)
def test_as_many_programs_run_together_as_fit_into_the_parts_of_a_multiprocessor(
    num_registers: int, num_warps: int, num_bytes: int, expected: int
) -> None:
    """On an H200, programs beyond these ran alone at the end, and decode rows took a third longer."""
    assert num_together(num_registers, num_warps, num_bytes, shared_memory=228 << 10) == expected
