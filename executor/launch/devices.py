"""The GPUs of this host, as far as can be told without torch."""

from __future__ import annotations

import os
from pathlib import Path


def num_visible_gpus() -> int | None:
    """GPUs that a rank on this host could take, without asking torch. None: there are none, so that ranks run on the CPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([name for name in named.split(",") if name.strip() and name.strip() != "-1"]) or None
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]) or None
