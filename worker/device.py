"""The device of a rank: its choice and its utilization."""

from __future__ import annotations

import torch

from millrace.worker.errors import ConfigError, DeviceError


def choose_device(name: str, rank: int = 0) -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:N". A GPU becomes torch's current device.

    Without N, rank r gets GPU r modulo the number of visible GPUs. Raises `ConfigError` for another name and
    `DeviceError` when there is no such GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda" and not (name.startswith("cuda:") and name[5:].isdecimal()):
        raise ConfigError(f'unknown device "{name}": use "auto", "cpu", "cuda" or "cuda:N"')
    if not torch.cuda.is_available():
        raise DeviceError(f'device is "{name}", but torch sees no GPU: check the driver, or use device "cpu"')
    device = torch.device(name if ":" in name else f"cuda:{rank % torch.cuda.device_count()}")
    if device.index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise DeviceError(
            f'device "{name}" does not exist: use "cuda:0" to "cuda:{last}", or check CUDA_VISIBLE_DEVICES'
        )
    torch.cuda.set_device(device)
    return device


def device_utilization(device: torch.device) -> float | None:
    """Return the share of time, 0 to 1, in which a GPU computed for any process, over the driver's last sample period
    (1/6 s to 1 s).

    None for the host, for a part of a GPU (MIG), and without the package that torch needs for it: nvidia-ml-py, or
    amdsmi with ROCm.
    """
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # a missing package, or an error class of the vendor's library
        return None
