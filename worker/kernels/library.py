"""Loads the compiled kernels, and mirrors the structures of kernels.h."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

# The library needs libgomp. Loaded after torch it shares torch's copy and its threads.
import torch
from torch import Tensor

logger = logging.getLogger("millrace.worker")

VERSION = 24
"""MILLRACE_KERNELS_VERSION of kernels.h."""
INSTRUCTION_SETS = ("amx", "avx512bf16", "avx512", "avx2", "generic")
"""The best first."""
VARIABLE = "MILLRACE_KERNELS"
"""Environment variable: "auto", an instruction set, or "none" for torch alone."""

KERNEL_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""As in kernels.h: what activations can have, and weights."""
KERNEL_INT8, KERNEL_CODES_4, KERNEL_CODES_8, KERNEL_FLOATS_8 = range(2, 6)
"""Of weights."""

_WITHOUT = "attention, sampling and linear layers on the CPU run through torch, which is slower"


class AttentionRows(ctypes.Structure):
    """`struct attention_rows`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_starts", "kv_lens", "block_tables")),
        *((name, ctypes.c_int64) for name in ("num_rows", "table_width", "num_threads", "num_decodes")),
        *((name, ctypes.c_void_p) for name in ("order", "common")),
    )


class AttentionCall(ctypes.Structure):
    """`struct attention`."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim", "block_size")),
        *((name, ctypes.c_int64) for name in ("dtype", "pool_dtype", "rounds", "window")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm")),
        *(("norm_eps", ctypes.c_float), ("rotary_dim", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines")),
        *((name, ctypes.c_void_p) for name in ("qkv", "keys", "values", "output", "sinks")),
    )


class DrawCall(ctypes.Structure):
    """`struct draws`."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size")),
        *(
            (name, ctypes.c_void_p)
            for name in ("peaks", "temperatures", "floors", "top_k", "top_p", "row_keys", "token_ids")
        ),
        ("num_threads", ctypes.c_int64),
    )


class LinearCall(ctypes.Structure):
    """`struct linear`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "output", "peaks", "token_ids", "allowed")),
        *((name, ctypes.c_int64) for name in ("num_rows", "accumulates", "num_threads")),
        *((name, ctypes.c_void_p) for name in ("panels", "weight_scales", "bias", "rounded", "scales", "errors")),
        *((name, ctypes.c_int64) for name in ("num_outputs", "num_inputs")),
        *((name, ctypes.c_int64) for name in ("weight_dtype", "input_dtype", "output_dtype")),
        *((name, ctypes.c_void_p) for name in ("code_table", "code_scales", "code_zeros", "groups")),
        *((name, ctypes.c_int64) for name in ("num_groups", "by_group", "rounds")),
    )


class NormCall(ctypes.Structure):
    """`struct norm`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "weights", "output")),
        *((name, ctypes.c_int64) for name in ("num_rows", "size", "dtype", "adds", "num_threads")),
        ("epsilon", ctypes.c_float),
    )


class GateCall(ctypes.Structure):
    """`struct gate`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "output")),
        *((name, ctypes.c_int64) for name in ("num_rows", "size", "dtype", "activation", "num_threads")),
    )


class RecurrenceCall(ctypes.Structure):
    """`struct recurrence`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_starts", "slots", "is_new")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_threads", "rule", "dtype", "rounds")),
        *((name, ctypes.c_void_p) for name in ("input", "output")),
        *((name, ctypes.c_int64) for name in ("width", "conv_at", "factor_at", "gate_at", "step_at", "gain_at")),
        *((name, ctypes.c_int64) for name in ("query_at", "key_at", "value_at", "num_channels", "num_taps")),
        *((name, ctypes.c_int64) for name in ("num_key_heads", "num_heads", "key_dim", "value_dim", "state_dim")),
        *((name, ctypes.c_void_p) for name in ("conv_weights", "conv_bias", "conv_states", "states")),
        *((name, ctypes.c_void_p) for name in ("rates", "step_bias", "skips", "norm_weights")),
        *((name, ctypes.c_int64) for name in ("norm_size", "gates_first")),
        *((name, ctypes.c_float) for name in ("gain", "epsilon")),
    )


class PackCall(ctypes.Structure):
    """`struct packing`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "panels", "scales", "output_ids")),
        *((name, ctypes.c_int64) for name in ("first_output", "num_outputs", "num_inputs", "dtype", "num_threads")),
    )


_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_CALL_WITHOUT_STATUS = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_ARGMAX = ctypes.CFUNCTYPE(
    None,
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
)


class KernelTable(ctypes.Structure):
    """`struct kernels`. Each access makes a new function object."""

    _fields_ = (
        *(("attend", _CALL), ("argmax", _ARGMAX), ("draw", _CALL), ("linear", _CALL)),
        *(("pack", _CALL_WITHOUT_STATUS), ("unpack", _CALL_WITHOUT_STATUS), ("panel_outputs", ctypes.c_int)),
        *(("norm", _CALL_WITHOUT_STATUS), ("gate", _CALL_WITHOUT_STATUS), ("recurrence", _CALL)),
    )


@dataclass(frozen=True)
class Kernels:
    """The loaded library, and the instruction set that it uses."""

    library: ctypes.CDLL
    instruction_set: str

    @cached_property
    def table(self) -> KernelTable:
        table: KernelTable = self.library.millrace_kernels(self.instruction_set.encode()).contents
        return table

    @cached_property
    def _attend(self) -> Callable[[Any], int]:
        return self.table.attend  # type: ignore[no-any-return]

    def order_rows(self, rows: AttentionRows, block_size: int, order: Tensor, common: Tensor) -> None:
        """Fill int32 [R], [R]. Raises `MemoryError`."""
        pointers = (ctypes.c_void_p(order.data_ptr()), ctypes.c_void_p(common.data_ptr()))
        check(self.library.millrace_order_rows(ctypes.byref(rows), ctypes.c_int64(block_size), *pointers))

    def attend(self, call: AttentionCall) -> None:
        """Raises `MemoryError`."""
        check(self._attend(ctypes.byref(call)))

    def draw(self, call: DrawCall) -> None:
        """Raises `MemoryError`."""
        check(self.table.draw(ctypes.byref(call)))


@cache
def find_kernels() -> Kernels | None:
    """Return the kernels, or None if torch has to do their work. The first call logs which it is."""
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in ("auto", "none", *INSTRUCTION_SETS):
        logger.warning(
            '%s is "%s": it must be auto, none, %s; using auto', VARIABLE, wanted, ", ".join(INSTRUCTION_SETS)
        )
        wanted = "auto"
    if wanted == "none":
        logger.info("%s is none: %s", VARIABLE, _WITHOUT)
        return None
    try:
        library = load_library(Path(__file__).parent)
    except (OSError, AttributeError) as error:
        logger.warning("there are no compiled kernels, so %s: %.200s", _WITHOUT, error)
        return None
    supported = supported_instruction_sets(library)
    if wanted != "auto" and wanted not in supported:
        logger.warning("%s is %s, which this machine does not have: using %s", VARIABLE, wanted, supported[0])
    kernels = Kernels(library, wanted if wanted in supported else supported[0])
    logger.info("compiled kernels: %s, %d threads", kernels.instruction_set, torch.get_num_threads())
    return kernels


def has_bfloat16(kernels: Kernels | None) -> bool:
    """Whether the chosen instruction set multiplies bfloat16."""
    if kernels is None or kernels.instruction_set == "generic":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return kernels.instruction_set in ("amx", "avx512bf16")


def load_library(directory: Path) -> ctypes.CDLL:
    """Load the library in a directory. Raises `OSError`, and `AttributeError` for a library without our functions."""
    found = [path for suffix in EXTENSION_SUFFIXES if (path := directory / f"_library{suffix}").exists()]
    if not found:
        root = directory.resolve().parents[1]
        if (root / "pyproject.toml").exists():  # Python prefers its working directory to an installed package
            where = f"Python imports Millrace from the checkout {root}, where they are not built"
            raise OSError(f"{where}: run `pip install -e .` there, or start Python in another directory")
        raise OSError("they were not built: install a C compiler, and Millrace again")
    library = ctypes.CDLL(str(found[0]))
    if (version := library.millrace_version()) != VERSION:
        raise OSError(f"{found[0].name} is version {version} instead of {VERSION}: install Millrace again")
    library.millrace_kernels.restype = ctypes.POINTER(KernelTable)
    return library


def supported_instruction_sets(library: ctypes.CDLL) -> list[str]:
    """Return those of INSTRUCTION_SETS that this machine has."""
    return [name for name in INSTRUCTION_SETS if library.millrace_kernels(name.encode())]


def check(status: int) -> None:
    """Raise `MemoryError` unless the status of a call is 0."""
    if status != 0:
        raise MemoryError("the compiled kernels have no memory for their intermediate results")
