"""What the tests of Triton kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from millrace.worker import graphs
from millrace.worker.rank import Rank
from tests.worker.driver import start_worker
from tests.worker.interpreted.graph_steps import MAX_NUM_SEQS, SMALL, patch_worker
from tests.worker.models import make_model

NUMPY_NAMES = {"add": "add", "sub": "subtract", "mul": "multiply"}


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


def check_overflow_with_numpy() -> None:
    """Let a kernel whose sum, difference or product of integers overflows fail. The interpreter itself computes this in ten
    operations of Triton's language, which takes a third of the time of these tests, and reports nothing."""

    def check(lhs: tl.tensor, rhs: tl.tensor, operation: Callable[..., Any]) -> None:
        if lhs.dtype.int_bitwidth < 64:
            limits, name = np.iinfo(lhs.handle.data.dtype), operation.__name__
            exact = getattr(np, NUMPY_NAMES[name])(lhs.handle.data, rhs.handle.data, dtype=np.int64)
            assert limits.min <= exact.min() and exact.max() <= limits.max, f"{name} of {lhs.dtype} overflows"

    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = check


def make_types_once() -> None:
    """Let the interpreter make each type and each shape of a tensor once, and compare no equal shapes. This takes a third of
    the time of these tests."""
    semantic = type(interpreter.interpreter_semantic)
    broadcast, make_type, make_tensor = semantic.broadcast_impl_value, tl.block_type.__init__, tl.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def make_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)
        self.__dict__.update(types[key])

    def make_tensor_once(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            make_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_others
    tl.block_type.__init__ = make_type_once
    tl.tensor.__init__ = make_tensor_once


patch_once()
check_overflow_with_numpy()
make_types_once()


@pytest.fixture(autouse=True)
def products_of_a_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute products in float64. NumPy's float32 products of a row depend, on some CPUs, on its place among the rows."""

    def create_dot(_: Any, a: Any, b: Any, sums: Any, *options: Any) -> Any:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(sums.data.dtype)
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(scope="session")
def triton_on_this_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch_worker(patch)
        yield


@pytest.fixture(scope="session")
def started(triton_on_this_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> Rank:
    """A worker that tests use one after the other, since a start runs kernels too."""
    path = tmp_path_factory.mktemp("llama")
    make_model("llama", path, **SMALL)
    return start_worker(path, max_num_seqs=MAX_NUM_SEQS, num_blocks=1000)


@pytest.fixture
def worker(started: Rank, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """A worker without graphs. Those that it is given are for decode rows only."""
    assert started.runner is not None
    started.runner._graphs = None
    monkeypatch.setattr(graphs, "MOST_TOKENS", 0)
    return started


@pytest.fixture
def for_all_steps(worker: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_TOKENS", 60)
