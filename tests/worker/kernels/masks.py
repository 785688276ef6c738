"""Masks as those of grammars, and what they do to logits."""

from __future__ import annotations

import torch

from millrace.worker.linear.packed import RowMasks


def random_masks(num_rows: int, num_outputs: int, shares: tuple[float, ...]) -> RowMasks:
    """Masks for two of three rows, or all of five, padded as those of grammars. Some are alike, as with one schema."""
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.tensor([row for row in range(num_rows) if row % 3 or num_rows == 5], dtype=torch.int64)
    allowed = torch.zeros(len(rows), -(-num_outputs // 32) * 32, dtype=torch.uint8)
    for index in range(len(rows)):
        share = shares[index // 4 % len(shares)]
        if index % 4 == 3:
            allowed[index] = allowed[index - 1]
        elif share > 0:
            allowed[index, :num_outputs] = torch.rand(num_outputs, generator=generator) < share
        elif share < 0:
            allowed[index, torch.randint(num_outputs, (1,), generator=generator)] = 1
    bits = (allowed.unflatten(1, (-1, 8)) << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)
    return RowMasks(rows, bits)


def masked(logits: torch.Tensor, masks: RowMasks) -> torch.Tensor:
    """Return the stored logits without the ids that are not allowed."""
    is_allowed = (masks.bits.unsqueeze(-1) >> torch.arange(8) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[masks.rows] = logits[masks.rows].masked_fill(~is_allowed, -torch.inf)
    return logits
