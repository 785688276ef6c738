"""Times the phases of a start, with one log line for each."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def timed(logger: logging.Logger, phase: str) -> Iterator[None]:
    """Log how long the block took, unless it raises."""
    began_s = time.monotonic()
    yield
    logger.info("start: %s %.2f s", phase, time.monotonic() - began_s)


def process_age_s() -> float:
    """Return the seconds since this process was started, in steps of 10 ms."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # "starttime", since the boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
