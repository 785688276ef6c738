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


@pytest.fixture(params=[name for name in instruction_sets() if name != "amx"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Of AMX only what needs `all_kernels` is other code than of avx512bf16: linear layers, and attention that rounds."""
    return Kernels(load_library(DIRECTORY), request.param)


@pytest.fixture(params=instruction_sets())
def all_kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(load_library(DIRECTORY), request.param)
