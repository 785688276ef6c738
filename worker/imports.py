"""Imports transformers without what a rank never uses, which would take as long again. Only for a process of our own.

transformers' model code imports torch's compiler (`torch._dynamo`, with sympy) only to mark functions for it, and torch's
sharded tensors only for its own way to divide a model. It renders chat templates with jinja2, which the engine service does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed

_COMPILER = "torch._dynamo"
_TEMPLATES = "jinja2"


def import_transformers() -> None:
    """Import transformers' model code as on a torch without `torch.distributed`, without jinja2, and with the compiler
    replaced."""
    if _COMPILER not in sys.modules:
        _replace_compiler()
    hides_templates = _TEMPLATES not in sys.modules
    if hides_templates:
        sys.modules[_TEMPLATES] = None  # type: ignore[assignment]  # as if it were not installed
    is_available, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        import transformers.modeling_utils  # noqa: F401
    finally:
        torch.distributed.is_available = is_available
        if hides_templates:
            del sys.modules[_TEMPLATES]


def _replace_compiler() -> None:
    compiler = sys.modules[_COMPILER] = torch._dynamo = _Compiler()  # type: ignore[assignment]
    with contextlib.suppress(ImportError):  # transformers takes a class from it, which needs no more of the compiler
        importlib.import_module(f"{_COMPILER}._trace_wrapped_higher_order_op")
    del compiler.__path__  # other parts of it need the real module


class _Compiler(ModuleType):
    """Stands for `torch._dynamo`. Marks have no effect. The first other use imports the real module."""

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__spec__ = importlib.util.find_spec(_COMPILER)
        assert self.__spec__ is not None
        self.__path__ = self.__spec__.submodule_search_locations or []

    @staticmethod
    def disable(function: Any = None, *_args: Any, **_options: Any) -> Any:
        """Mark a function that is not to be compiled; called with options alone, return the decorator."""
        return _unchanged if function is None else function

    @staticmethod
    def allow_in_graph(function: Any) -> Any:
        return function

    assume_constant_result = allow_in_graph

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # `inspect` asks each module for some of these
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return getattr(importlib.import_module(_COMPILER), name)


def _unchanged(function: Any) -> Any:
    return function
