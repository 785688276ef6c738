"""Blocks in host memory that the KV pool has evicted, and the copies between the two.

A host block is a row of one tensor: a block's part of each tensor of the pool, one after the other. So a block is one
transfer between GPU and host. On the device its parts are gathered in, and scattered from, a small buffer: on a GPU on the
stream that computes the steps. The transfers have a stream of their own. Those to the host run beside the step that follows
them, and those to the device beside the step before them:

    steps      gather a | step 1           | wait for b, scatter b | step 2
    transfers            | a to the host, b to the device |

Shapes: H host blocks, E elements of a block in all tensors of the pool, C blocks in the buffer.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from millrace.worker.errors import ModelError
from millrace.worker.transfer import CopyStream, record_event, to_device

_BUFFER_BYTES = 32 << 20
_MAX_BUFFER_BLOCKS = 64


class HostBlocks:
    """Owns the host blocks of this rank. On a GPU their memory is pinned."""

    def __init__(self, parts: list[Tensor], num_blocks: int) -> None:
        """`parts`: the tensors of the pool, which have a row for each device block."""
        self._parts = parts
        first = self._parts[0]
        num_elements = sum(part[0].numel() for part in self._parts)
        self._blocks = torch.empty(num_blocks, num_elements, dtype=first.dtype, device="cpu")  # [H, E]
        if first.is_cuda:
            _pin(self, self._blocks)
        num_buffered = min(_MAX_BUFFER_BLOCKS, max(1, _BUFFER_BYTES // (num_elements * first.itemsize)))
        self._buffer = torch.empty(num_buffered, num_elements, dtype=first.dtype, device=first.device)  # [C, E]
        self._stream = CopyStream(first.device)
        self._scattered = record_event(first.device)
        """From then on the steps do not read the buffer."""

    def __repr__(self) -> str:
        return f"HostBlocks({len(self._blocks)} blocks, {self.num_bytes()} bytes)"

    def num_bytes(self) -> int:
        return self._blocks.nbytes

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs to the host. No two have the same host block."""
        for some in self._batched(pairs):
            device_blocks = self._indices(device_block for device_block, _ in some)
            self._stream.finish()  # they read the buffer
            for part, buffered in self._split_buffer(len(some)):
                buffered.copy_(part.index_select(0, device_blocks))
            with self._stream.copying(after=record_event(self._buffer.device)):
                for row, (_, host_block) in zip(self._buffer, some, strict=False):
                    self._blocks[host_block].copy_(row, non_blocking=True)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (host block, device block) pairs to the device. No two have the same device block."""
        for some in self._batched(pairs):
            with self._stream.copying(after=self._scattered):
                for row, (host_block, _) in zip(self._buffer, some, strict=False):
                    row.copy_(self._blocks[host_block], non_blocking=True)
            self._stream.finish()
            device_blocks = self._indices(device_block for _, device_block in some)
            for part, buffered in self._split_buffer(len(some)):
                part.index_copy_(0, device_blocks, buffered)
            self._scattered = record_event(self._buffer.device)

    def measure(self) -> float:
        """Return the seconds in which a block moves to the host and back. Destroys the contents of some blocks."""
        num_blocks = min(len(self._buffer), len(self._blocks), len(self._parts[0]))
        pairs = [(block, block) for block in range(num_blocks)]
        fastest_s = float("inf")
        for _ in range(3):
            self._synchronize()
            began_s = time.perf_counter()
            self.swap_out(pairs)
            self.swap_in(pairs)
            self._synchronize()
            fastest_s = min(fastest_s, time.perf_counter() - began_s)
        return fastest_s / num_blocks

    def _batched(self, pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """Yield as many pairs at a time as the buffer holds."""
        for start in range(0, len(pairs), len(self._buffer)):
            yield pairs[start : start + len(self._buffer)]

    def _split_buffer(self, num_blocks: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor of the pool, and its part of the first rows of the buffer in the same shape."""
        end = 0
        for part in self._parts:
            start, end = end, end + part[0].numel()
            yield part, self._buffer[:num_blocks, start:end].unflatten(1, part.shape[1:])

    def _indices(self, blocks: Iterable[int]) -> Tensor:
        (indices,) = to_device(self._buffer.device, [torch.tensor(list(blocks), dtype=torch.int64, device="cpu")])
        return indices

    def _synchronize(self) -> None:
        if self._buffer.is_cuda:
            torch.cuda.synchronize(self._buffer.device)


def _pin(owner: object, tensor: Tensor) -> None:
    """Pin the memory of a tensor until `owner` is gone. torch's own pinned tensors are rounded up to a power of two, and
    their memory is not given back."""
    cudart = torch.cuda.cudart()
    address = tensor.data_ptr()
    status = int(cudart.cudaHostRegister(address, tensor.nbytes, 0))
    if status != 0:
        raise ModelError(
            f"the host tier can't have {tensor.nbytes:,} bytes of pinned memory (CUDA error {status}): lower "
            "swap_space_gib, or raise the limit of locked memory"
        )
    weakref.finalize(owner, cudart.cudaHostUnregister, address)
