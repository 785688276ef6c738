"""How busy a device is, where it tells."""

from __future__ import annotations

import torch


def device_utilization(device: torch.device) -> float | None:
    """Share of the last sixth of a second, or second, in which a GPU computed, for whichever process: 0 to 1.

    None on the host, for a part of a GPU (MIG), and where the package is missing that torch asks for it: nvidia-ml-py, or
    amdsmi with ROCm.
    """
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # a missing package, or any error of the vendor's library, which has a tree of its own
        return None
