"""Imports a module of Triton kernels so that they run in Triton's interpreter, whatever else this process imports."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest


@contextlib.contextmanager
def interpreted(name: str, *used: str) -> Iterator[ModuleType]:
    """Import a module and a Triton of its own, which reads TRITON_INTERPRET at its import and at each launch. `used`: other
    modules with kernels that it imports."""
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for each in list(sys.modules):
            is_python = each.partition(".")[0] == "triton" and not each.startswith(
                "triton._C"
            )  # that cannot be loaded twice
            if is_python or each in (name, *used):
                patch.delitem(sys.modules, each)
        before = set(sys.modules)
        try:
            yield importlib.import_module(name)
        finally:
            for each in set(sys.modules) - before:
                if each.partition(".")[0] == "triton" or each in (name, *used):
                    del sys.modules[each]
