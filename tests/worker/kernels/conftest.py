"""The compiled kernels with each instruction set that this machine has. Without the library these tests skip."""

from __future__ import annotations

from pathlib import Path

import pytest

import millrace.worker.kernels.library as kernels_library
from millrace.worker.kernels.library import Kernels, load_library, supported_instruction_sets

DIRECTORY = Path(kernels_library.__file__).parent


def instruction_sets() -> list[str]:
    try:
        return supported_instruction_sets(load_library(DIRECTORY))
    except OSError:
        return []


@pytest.fixture(
    params=[name for name in instruction_sets() if name != "amx"]
)  # it has linear layers of its own, no more
def kernels(request: pytest.FixtureRequest) -> Kernels:
    library = load_library(DIRECTORY)
    return Kernels(library, request.param)
