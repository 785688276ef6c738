"""The utilization of a device: known where torch can measure it, and otherwise None."""

from __future__ import annotations

import pytest
import torch

from millrace.worker.device import device_utilization

GPU = torch.device("cuda:0")


def test_the_host_has_no_utilization() -> None:
    assert device_utilization(torch.device("cpu")) is None


def test_a_gpu_has_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: {GPU: 37}[device])
    assert device_utilization(GPU) == 0.37


@pytest.mark.parametrize("error", [ModuleNotFoundError("nvidia-ml-py"), RuntimeError("driver"), Exception("MIG")])
def test_what_torch_cannot_measure_is_unknown(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    assert device_utilization(GPU) is None
