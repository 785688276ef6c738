"""The number of threads that compute on a CPU."""

from __future__ import annotations

import logging
import math
import os

import torch

from millrace.worker.cgroup import cpu_quota

logger = logging.getLogger("millrace.worker")


def limit_threads() -> None:
    """Let torch and the kernels use no more threads than a CPU quota allows, unless OMP_NUM_THREADS is set. The kernel
    stops a process whose threads have used up the quota, until the next period."""
    quota = cpu_quota()
    if quota is None or "OMP_NUM_THREADS" in os.environ:
        return
    num_threads = max(1, math.ceil(quota))
    if num_threads < torch.get_num_threads():
        torch.set_num_threads(num_threads)
        logger.info("threads: %d, as the CPU quota is %g; OMP_NUM_THREADS sets another number", num_threads, quota)
