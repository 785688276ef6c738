"""The keys and values of all running sequences: one pair of preallocated tensors per layer.

    layer.keys    [N, S, Hkv, D]    layer.values    [N, S, Hkv, Dv]

Shapes: N blocks, S tokens in a block, Hkv key and value heads of this rank, D size of a key head, Dv size of a value
head, T tokens of a step, L positions of a sequence.

The slot of a token is `block_id * S + offset in the block`. The engine allocates block ids, the same for all layers.
Block 0 is never allocated. Slots without a token may hold any bits, also NaN: attention must not use them, not even
with weight 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerSpec:
    """What one layer stores of each token, and its sliding window in tokens, if any."""

    layer_index: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of the pool."""

    keys: Tensor  # [N, S, Hkv, D]
    values: Tensor  # [N, S, Hkv, Dv]

    def write(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store key [Hkv, T, D] and value [Hkv, T, Dv] in the slots [T], in the pool's dtype."""
        self.keys.flatten(0, 1).index_copy_(0, slot_mapping, key.transpose(0, 1).to(self.keys.dtype))
        self.values.flatten(0, 1).index_copy_(0, slot_mapping, value.transpose(0, 1).to(self.values.dtype))

    def gather(self, block_table: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """Copy the first L = `kv_len` positions of one sequence: [L, Hkv, D], [L, Hkv, Dv]."""
        blocks = block_table[: num_blocks_for(kv_len, self.keys.shape[1])]
        return (
            self.keys.index_select(0, blocks).flatten(0, 1)[:kv_len],
            self.values.index_select(0, blocks).flatten(0, 1)[:kv_len],
        )


class KVPool:
    """Owns the KV tensors of this rank. The engine knows which sequence has which block."""

    def __init__(
        self, specs: Iterable[LayerSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: dict[int, LayerCache] = {}
        for spec in specs:
            shape = (num_blocks, block_size, spec.num_kv_heads)
            # torch.empty: on a CPU a page takes memory only after the first write to it.
            self.layers[spec.layer_index] = LayerCache(
                keys=torch.empty(*shape, spec.key_dim, dtype=dtype, device=device),
                values=torch.empty(*shape, spec.value_dim, dtype=dtype, device=device),
            )

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in every layer, in the given order: a later pair sees the earlier
        copies."""
        for source, destination in pairs:
            for layer in self.layers.values():
                layer.keys[destination] = layer.keys[source]
                layer.values[destination] = layer.values[source]

    def num_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers.values())

    def __repr__(self) -> str:
        return f"KVPool({len(self.layers)} layers, {self.num_blocks} blocks of {self.block_size}, {self.num_bytes()} bytes)"


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
