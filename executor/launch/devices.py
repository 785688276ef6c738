"""The GPUs of this host, found without torch."""

from __future__ import annotations

import os
from pathlib import Path


def num_visible_gpus() -> int | None:
    """Return the number of GPUs that ranks on this host can use. None: there is none, and ranks run on the CPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([name for name in named.split(",") if name.strip() and name.strip() != "-1"]) or None
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]) or None
