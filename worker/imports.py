"""Imports transformers without what a rank never uses, which would take as long again. Only for a process of our own.

transformers' model code imports torch's compiler (`torch._dynamo`, with sympy) only to mark functions for it, and torch's
sharded tensors only for its own way to divide a model. It renders chat templates with jinja2, which the engine service does,
loads images with PIL, trains with scipy, and drafts tokens with scikit-learn. To list the public names of all models it
reads 2,000 files, twice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed

from millrace.executor.model_names import unlisted_models

_COMPILER = "torch._dynamo"
_UNUSED = ("jinja2", "PIL", "scipy", "sklearn")


def import_transformers() -> None:
    """Import transformers' model code as on a torch without `torch.distributed`, without what is unused, and with the
    compiler replaced. Afterwards `transformers` itself has no names of models; the models' modules have them."""
    if _COMPILER not in sys.modules:
        _replace_compiler()
    hidden = [name for name in _UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # as if they were not installed
    is_available, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        with unlisted_models():
            import transformers.modeling_utils  # noqa: F401
    finally:
        torch.distributed.is_available = is_available
        for name in hidden:
            del sys.modules[name]


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
