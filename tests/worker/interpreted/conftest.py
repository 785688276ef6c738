"""What the tests of Triton kernels share."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def patch_once() -> None:
    """Let the interpreter replace the functions of Triton's language once for each module that uses them. It does so at
    each call of a function, which takes a third of the time of these tests."""
    patched, patch = set(), interpreter._patch_lang

    def patch_new(function: Any) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return interpreter._LangPatchScope()  # which restores nothing

    interpreter._patch_lang = patch_new
    numpy_dtype = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: numpy_dtype(tl.uint64 if dtype.scalar.is_ptr() else dtype.scalar)


patch_once()


@pytest.fixture(autouse=True)
def products_of_a_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute products in float64. NumPy's float32 products of a row depend, on some CPUs, on its place among the rows."""

    def create_dot(_: Any, a: Any, b: Any, sums: Any, *options: Any) -> Any:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(sums.data.dtype)
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
