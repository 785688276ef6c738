"""Records the work that a function queues on a GPU, so that one launch runs it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]]
"""Runs a function, which writes to the same addresses each time, and records the work that it queues on the device. Returns
its result, and a function that runs it again."""


class CudaCapture:
    """Captures CUDA graphs. They share one memory pool for intermediate tensors, since only one graph runs at a time."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._newest: torch.cuda.CUDAGraph | None = None
        """Kept when all graphs are dropped: torch refuses to capture into memory that no graph holds any more."""

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        steps, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        memory = torch.cuda.graph_pool_handle() if self._newest is None else self._newest.pool()
        self._stream.wait_stream(steps)
        try:
            with torch.cuda.stream(self._stream):
                compute()  # compiles kernels, makes buffers and plans the attention, which a capture must not
            with self._capturing(graph, memory):
                result = compute()
        finally:
            torch.cuda.set_stream(steps)  # a capture that fails leaves its own
            steps.wait_stream(self._stream)
        self._newest = graph
        return result, graph.replay

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, memory: Any) -> Iterator[None]:
        try:
            with torch.cuda.graph(graph, memory, self._stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            _end_allocations(self._stream.device_index, memory)
            self._newest = None  # torch's allocator of pinned memory still takes this memory for one in use
            raise


def _end_allocations(device: int, memory: Any) -> None:
    """End the allocations in a memory pool behind a capture that failed. torch leaves them open where the capture cannot be
    ended: then it captures nothing into this memory any more, and `torch.cuda.empty_cache` gives nothing back."""
    with suppress(RuntimeError):  # torch has ended them
        torch._C._cuda_endAllocateToPool(device, memory)
        torch._C._cuda_releasePool(device, memory)
