"""What the tests of Triton kernels share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def products_of_a_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute products in float64. NumPy's float32 products of a row depend, on some CPUs, on its place among the rows."""

    def create_dot(_: Any, a: Any, b: Any, sums: Any, *options: Any) -> Any:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(sums.data.dtype)
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
