"""The keys and values of all running sequences: preallocated pairs of tensors, which one layer of each group shares.

    layer.keys    [N, S, Hkv, D]    layer.values    [N, S, Hkv, Dv]    in fp8 also layer.scales    [N, S, Hkv] each

    groups a, b    a: layers 0 2 4    b: layers 1 3    (`millrace.worker.layer_groups`)
    pairs          0: layers 0 1      1: layers 2 3    2: layer 4

Shapes: N blocks, S tokens in a block, Hkv key and value heads of this rank, D size of a key head, Dv size of a value
head, T tokens of a step, L positions of a sequence.

The slot of a token is `block_id * S + offset in the block`. The engine allocates block ids, the same for all layers of a
group. Layers of different groups never have the same block, so they can share tensors. Block 0 is never allocated. Slots
without a token may hold any bits, also NaN: attention must not use them, not even with weight 0.

In fp8 each head of each token has a scale, with which its largest number is the largest of the format. The scales of a block
lie behind its numbers, so a block remains one row of each tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from millrace.worker.host_memory import advise_huge_pages
from millrace.worker.host_tier import HostBlocks
from millrace.worker.transfer import to_device

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
SCALE_BYTES = 4
SMALLEST_SCALE = 1e-30


@dataclass(frozen=True)
class LayerSpec:
    """What one layer stores of each token, and its sliding window in tokens, if any."""

    layer_index: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None
    group: int = 0

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        scale_bytes = 2 * SCALE_BYTES if dtype == FP8 else 0
        return self.num_kv_heads * ((self.key_dim + self.value_dim) * dtype.itemsize + scale_bytes)


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of the pool."""

    keys: Tensor  # [N, S, Hkv, D]
    values: Tensor  # [N, S, Hkv, Dv]
    group: int = 0
    """Whose block tables and slots the layer has in a `StepBatch`."""
    scales: tuple[Tensor, Tensor] | None = None
    """Scales of keys and values [N, S, Hkv], float32. None unless they are fp8."""

    def write(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store key [Hkv, T, D] and value [Hkv, T, Dv] in the slots [T], in the pool's dtype."""
        key_scales, value_scales = self.scales or (None, None)
        _store(self.keys, key_scales, key.transpose(0, 1), slot_mapping)
        _store(self.values, value_scales, value.transpose(0, 1), slot_mapping)

    def gather(self, block_table: Tensor, first: int, kv_len: int) -> tuple[Tensor, Tensor]:
        """Copy the L positions of one sequence from the block of `first` up to `kv_len`: [L, Hkv, D], [L, Hkv, Dv]. fp8
        numbers become float32."""
        block_size = self.keys.shape[1]
        first_block = first // block_size
        blocks = block_table[first_block : num_blocks_for(kv_len, block_size)]
        length = kv_len - first_block * block_size
        key_scales, value_scales = self.scales or (None, None)
        return _load(self.keys, key_scales, blocks)[:length], _load(self.values, value_scales, blocks)[:length]


def _store(pool: Tensor, scales: Tensor | None, new: Tensor, slots: Tensor) -> None:
    """Store keys or values [T, Hkv, D]."""
    if scales is None:
        pool.flatten(0, 1).index_copy_(0, slots, new.to(pool.dtype))
        return
    places = slots // pool.shape[1], slots % pool.shape[1]
    numbers = new.float()
    scale = (numbers.abs().amax(-1) * (1 / LARGEST_FP8)).clamp_(min=SMALLEST_SCALE)
    pool.view(torch.uint8)[places] = (numbers / scale.unsqueeze(-1)).to(FP8).view(torch.uint8)
    scales[places] = scale


def _load(pool: Tensor, scales: Tensor | None, blocks: Tensor) -> Tensor:
    """Return the keys or values of some blocks, one after the other."""
    if scales is None:
        return pool.index_select(0, blocks).flatten(0, 1)
    numbers = pool.view(torch.uint8)[blocks].view(FP8).float()
    return (numbers * scales[blocks].unsqueeze(-1)).flatten(0, 1)


class KVPool:
    """Owns the KV tensors of this rank. The engine knows which sequence has which block."""

    def __init__(
        self,
        specs: Iterable[LayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_groups = num_groups
        self.host: HostBlocks | None = None
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """Keys and values, with their scales."""
        self.layers: dict[int, LayerCache] = {}
        for sharing in share_tensors(specs):
            shape = (num_blocks, block_size, sharing[0].num_kv_heads)
            keys, values = (_allocate(*shape, dim, dtype, device) for dim in (sharing[0].key_dim, sharing[0].value_dim))
            self._pairs.append((keys, values))
            scales = None
            if dtype == FP8:
                (keys, key_scales), (values, value_scales) = (_split(each, shape) for each in (keys, values))
                scales = key_scales, value_scales
            self.layers |= {spec.layer_index: LayerCache(keys, values, spec.group, scales) for spec in sharing}

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in every layer."""
        if not pairs:
            return
        on_host = torch.tensor(pairs, dtype=torch.int64, device="cpu").unbind(1)
        sources, destinations = to_device(self._pairs[0][0].device, on_host)
        for pair in self._pairs:
            for tensor in pair:
                tensor.index_copy_(0, destinations, tensor.index_select(0, sources))

    def add_host_tier(self, num_blocks: int) -> None:
        self.host = HostBlocks([part for pair in self._pairs for part in pair], num_blocks)

    def num_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._pairs)

    def __repr__(self) -> str:
        return f"KVPool({len(self.layers)} layers, {self.num_blocks} blocks of {self.block_size}, {self.num_bytes()} bytes)"


def _allocate(
    num_blocks: int, block_size: int, num_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor [N, S, Hkv, D], in fp8 one of bytes [N, S * Hkv * (D + SCALE_BYTES)]."""
    # torch.empty: on a CPU a page takes memory only after the first write to it.
    if dtype == FP8:
        return torch.empty(num_blocks, block_size * num_heads * (dim + SCALE_BYTES), dtype=torch.uint8, device=device)
    tensor = torch.empty(num_blocks, block_size, num_heads, dim, dtype=dtype, device=device)
    if device.type == "cpu":
        advise_huge_pages(tensor)
    return tensor


def _split(blocks: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return the numbers [N, S, Hkv, D] and the scales [N, S, Hkv] of fp8 blocks, without a copy."""
    num_scales = shape[1] * shape[2]
    numbers = blocks[:, : -SCALE_BYTES * num_scales].view(FP8).unflatten(1, (*shape[1:], -1))
    return numbers, blocks[:, -SCALE_BYTES * num_scales :].view(torch.float32).unflatten(1, shape[1:])


def share_tensors(specs: Iterable[LayerSpec]) -> list[list[LayerSpec]]:
    """Return which layers share tensors: the first ones of all groups, then the second ones, and so on."""
    groups: defaultdict[int, list[LayerSpec]] = defaultdict(list)
    for spec in specs:
        groups[spec.group].append(spec)
    return [[spec for spec in sharing if spec is not None] for sharing in zip_longest(*groups.values())]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
