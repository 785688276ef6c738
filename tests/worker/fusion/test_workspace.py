"""The buffers of a forward pass."""

from __future__ import annotations

import torch

from millrace.worker.fusion.workspace import Workspace


def test_layers_of_different_widths_write_to_the_same_addresses_in_each_step() -> None:
    workspace = Workspace(torch.float32, torch.device("cpu"))

    def step(num_rows: int) -> list[int]:
        return [workspace.rows("activated", num_rows, width).data_ptr() for width in (8, 24, 8)]

    first = step(3)
    num_made = workspace.num_made
    assert (step(3), step(2), workspace.num_made) == (first, first, num_made)
    assert first[0] == first[2] != first[1]
