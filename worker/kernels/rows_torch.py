"""Norms, gated activations and rotary embeddings in plain torch, on any device. They compute in float32.

Shapes: M rows, K entries in each, T tokens, Hq query heads, Hkv key heads, D size of a head, P positions, R rotary size, W
outputs of the attention's projections, at least (Hq + Hkv) * D.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(weights: Tensor, epsilon: float, inputs: Tensor, outputs: Tensor, *, adds: bool = False) -> None:
    """Write the RMSNorms of rows [M, K], with float32 weights [K], to the outputs [M, K], or add them to the outputs."""
    normed = _norm(inputs.float(), epsilon).mul_(weights)
    if adds:
        outputs.add_(normed)
    else:
        outputs.copy_(normed)


def gated_activation(activation: str, inputs: Tensor, outputs: Tensor) -> None:
    """Write `activation(gate) * value` [M, K] for inputs [M, 2 K]: the gates, then the values."""
    gates, values = inputs.float().chunk(2, dim=-1)
    activated = F.silu(gates) if activation == "silu" else F.gelu(gates, approximate="tanh")
    outputs.copy_(activated.mul_(values))


def norm_and_rotate(
    projected: Tensor,  # [T, W], the queries, then the keys, each by heads
    positions: Tensor,  # [T]
    tables: tuple[Tensor, Tensor],  # cosines and sines, float32 [P, R / 2]
    norms: tuple[Tensor, Tensor] | None,  # weights of RMSNorm for queries and for keys, float32 [D]
    epsilon: float,
    num_heads: int,
    head_dim: int,
    outputs: Tensor,  # [T, (Hq + Hkv) * D]
) -> None:
    """Write the queries and keys, normalized if there are weights, then rotated: of the first R entries of each head, entry
    i with entry i + R / 2."""
    num_tokens, half = len(projected), tables[0].shape[1]
    heads = projected[:, : outputs.shape[1]].float().view(num_tokens, -1, head_dim)
    if norms is not None:
        num_key_heads = heads.shape[1] - num_heads
        weights = torch.cat([norms[0].expand(num_heads, -1), norms[1].expand(num_key_heads, -1)])
        heads = _norm(heads, epsilon).mul_(weights)
    cosines, sines = (table[positions].unsqueeze(1) for table in tables)  # [T, 1, R / 2]
    first, second, rest = heads.split([half, half, head_dim - 2 * half], dim=-1)
    rotated = [first * cosines - second * sines, second * cosines + first * sines, rest]
    outputs.view(heads.shape).copy_(torch.cat(rotated, dim=-1))


def _norm(values: Tensor, epsilon: float) -> Tensor:
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
