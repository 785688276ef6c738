"""Imports torch and transformers without what a rank never uses, which would take as long again.

transformers' model code imports torch's compiler (`torch._dynamo`, with sympy) only to mark functions for it, and torch's
sharded tensors only for its own way to divide a model.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_MARKERS = frozenset({"allow_in_graph", "assume_constant_result"})
"""Decorators of the compiler that return the function itself."""


def defer_compiler() -> None:
    """Let the compiler be imported at its first use instead of with transformers. Does nothing if it is imported already.

    Safe in the process of a user: functions that were marked before the first use are marked then.
    """
    import torch

    if _COMPILER in sys.modules:
        return
    spec = importlib.util.find_spec(_COMPILER)
    assert spec is not None
    compiler = _DeferredCompiler(_COMPILER)
    compiler.__spec__, compiler.__loader__, compiler.__package__ = spec, spec.loader, _COMPILER
    compiler.__file__, compiler.__path__ = spec.origin, spec.submodule_search_locations or []
    sys.modules[_COMPILER] = torch._dynamo = compiler  # type: ignore[assignment]
    try:
        importlib.import_module(f"{_COMPILER}._trace_wrapped_higher_order_op")  # transformers takes a name from it
    except ImportError:  # another version of torch: the compiler is imported with transformers
        pass
    finally:
        del compiler.__path__  # other parts of the package need all of it


def forgo_sharded_tensors() -> None:
    """Import transformers' model code as on a torch without `torch.distributed`, which ranks use without transformers. Only
    for a process of our own."""
    import torch.distributed

    is_available, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        import transformers.modeling_utils  # noqa: F401
    finally:
        torch.distributed.is_available = is_available


class _DeferredCompiler(ModuleType):
    """Stands for `torch._dynamo` and becomes it at the first use."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lock = threading.RLock()
        self._is_loading = False
        self._pending: list[Callable[[], object]] = []
        """Marks to set after the import."""

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if type(self) is ModuleType:
                return getattr(self, name)
            if not self._is_loading:
                if name in _MARKERS:
                    return functools.partial(self._mark, name)
                if name == "disable":
                    return self._disable
            is_asked_of_all_modules = name.startswith("__") and name != "__path__"  # by `inspect`
            if self._is_loading or is_asked_of_all_modules:
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            self._load()
            return getattr(self, name)

    def _load(self) -> None:
        self._is_loading = True
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        self.__path__ = spec.submodule_search_locations or []
        try:
            spec.loader.exec_module(self)
        except BaseException:
            del self.__path__
            self._is_loading = False
            raise
        self.__class__ = ModuleType  # type: ignore[assignment]
        for mark in self._pending:
            mark()

    def _mark(self, marker: str, function: Any) -> Any:
        self._pending.append(lambda: getattr(self, marker)(function))
        return function

    def _disable(self, function: Any = None, *args: Any, **options: Any) -> Any:
        if function is None:
            return lambda given: self._disable(given, *args, **options)

        target = function

        @functools.wraps(function)
        def call(*inputs: Any, **named: Any) -> Any:
            return target(*inputs, **named)

        def disable() -> None:
            nonlocal target
            target = self.disable(function, *args, **options)

        self._pending.append(disable)
        return call
