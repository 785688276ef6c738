"""Dependent launches: kernels of Triton start before the kernel ahead of them has ended ("programmatic dependent launch" in
NVIDIA's CUDA Programming Guide), from compute capability 9.0 on.

A decode step of few rows is some hundred kernels of a few microseconds, and to start one takes about one. So the programs
of a kernel start while the kernel ahead of it runs, and wait until that has ended. Only behind this wait may the programs of
the next kernel start. So a kernel that has waited sees what all earlier kernels of the stream have stored.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton.runtime.driver import driver

LEAST_CAPABILITY = 90
LINE_BYTES = tl.constexpr(128)
"""Of the L2 cache."""


@cache
def capability() -> int:
    """Return ten times the compute capability of the GPU; 0 in the interpreter, and for a GPU that is not NVIDIA's."""
    if triton.knobs.runtime.interpret:
        return 0
    target = driver.active.get_current_target()
    return int(target.arch) if target.backend == "cuda" else 0


@cache
def launch_options() -> dict[str, Any]:
    """Return the arguments for the launch of a kernel that begins with `wait_for_earlier_kernels`."""
    if capability() >= LEAST_CAPABILITY:
        return {"IS_DEPENDENT": True, "launch_pdl": True}
    return {"IS_DEPENDENT": False}


@triton.jit
def wait_for_earlier_kernels(IS_DEPENDENT: tl.constexpr):
    """Stands before all loads and stores of tensors that other kernels of the model write. What the step has given to the
    device before its first layer may be loaded ahead: the kernel ahead of this one has waited for it."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Fetch the cache lines of the pointers into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
