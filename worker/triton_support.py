"""Finds out whether Triton can compile and run kernels here."""

from __future__ import annotations

import logging
from functools import cache

from millrace.executor.wire.failures import is_interruption

logger = logging.getLogger("millrace.worker")

LEAST_CAPABILITY = 80
"""Ten times the compute capability of the GPUs that have the kernels' shared memory and bfloat16."""


@cache
def find_triton() -> bool:
    """Whether Triton's kernels run on this machine's GPU, or in Triton's interpreter. The first call logs why they do not.

    Call it before the import of a module that imports Triton. It builds Triton's driver library, unless that is in the
    cache: this needs a C compiler, Python's headers and a writable cache directory.
    """
    try:
        import triton
        from triton.runtime.driver import driver

        is_interpreted = triton.knobs.runtime.interpret
        if not is_interpreted:
            target = driver.active.get_current_target()
            if target.backend == "cuda" and target.arch < LEAST_CAPABILITY:
                raise RuntimeError(f"the GPU has compute capability {target.arch / 10}, the kernels need 8.0")
    except Exception as error:  # of Triton, the compiler or the file system
        if is_interruption(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.warning("Triton cannot be used, so the GPU's kernels are torch's, which are slower: %.300s", reason)
        return False
    logger.info("Triton %s%s", triton.__version__, ", in its interpreter" if is_interpreted else "")
    return True
