"""The number of threads that compute on a CPU."""

from __future__ import annotations

import logging
import math
import os

import torch

from millrace.worker.cgroup import cpu_quota

logger = logging.getLogger("millrace.worker")


def within_quota(num_threads: int) -> int:
    """Return how many of these threads a CPU quota allows, at least 1."""
    quota = cpu_quota()
    return num_threads if quota is None else min(num_threads, max(1, math.ceil(quota)))


def limit_threads() -> None:
    """Let torch and the kernels use no more threads than a CPU quota allows, unless OMP_NUM_THREADS is set. The kernel
    stops a process whose threads have used up the quota, until the next period."""
    num_threads = within_quota(torch.get_num_threads())
    if num_threads < torch.get_num_threads() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(num_threads)
        logger.info(
            "threads: %d, as the CPU quota is %g; OMP_NUM_THREADS sets another number", num_threads, cpu_quota()
        )
