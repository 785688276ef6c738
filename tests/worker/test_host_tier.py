"""Transfers of KV blocks on a stream of their own: a double of a GPU makes them as late as it may."""

from __future__ import annotations

import pytest
import torch

from millrace.worker import host_tier
from millrace.worker.host_tier import HostBlocks
from tests.worker.device_double import DeviceDouble, DeviceTensor

NUM_BLOCKS = 12


def test_blocks_move_beside_the_steps_and_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_MAX_BUFFER_BLOCKS", 3)
    device = DeviceDouble()
    device.install(monkeypatch)
    contents = [torch.arange(NUM_BLOCKS * size).float().view(NUM_BLOCKS, size) for size in (2, 5)]
    parts = [DeviceTensor(each.clone()) for each in contents]
    with device:
        tier = HostBlocks(list(parts), NUM_BLOCKS)
        device.pin(tier._blocks)
        tier.swap_out([(block, 11 - block) for block in range(8)])
        for part in parts:
            part[:8].fill_(-1)  # a step writes to the blocks
        tier.swap_out([(8, 0), (9, 2)])
        tier.swap_in([(11 - block, block) for block in reversed(range(8))])
        tier.swap_out([(0, 5), (7, 1)])
        tier.swap_in([(0, 9), (2, 8), (5, 10), (1, 11)])
    for part, before in zip(parts, contents, strict=True):
        assert torch.equal(part.on_host, before[[*range(8), 9, 8, 0, 7]])
