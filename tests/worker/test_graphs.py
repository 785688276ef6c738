"""What torch expects of a capture, with doubles that keep to the same rules: `tests/worker/interpreted` has the graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from millrace.worker.capture import CudaCapture


class StreamDouble:
    device_index = 0

    def __init__(self) -> None:
        self.waited_for: list[StreamDouble] = []

    def wait_stream(self, other: StreamDouble) -> None:
        self.waited_for.append(other)


Memory = tuple[int, int]


class GraphDouble:
    """Holds the memory into which it was captured, until it is gone."""

    holders: ClassVar[dict[Memory, int]] = {}

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self.is_complete = False

    def hold(self, memory: Memory) -> None:
        if not self.holders.get(memory, 1):
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._memory = memory
        self.holders[memory] = self.holders.get(memory, 0) + 1

    def pool(self) -> Memory | None:
        return self._memory

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        if self._memory is not None and self.is_complete:
            self.holders[self._memory] -= 1


class Device:
    """Owns the current stream, and the memory into which captures allocate at the moment."""

    def __init__(self) -> None:
        self.steps = self.current = StreamDouble()
        self.allocating: list[Memory] = []
        self.num_handles = 0

    def graph_pool_handle(self) -> Memory:
        self.num_handles += 1
        return (0, self.num_handles)

    def end_allocations(self, index: int, memory: Memory) -> None:
        if memory not in self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating.remove(memory)

    def release(self, index: int, memory: Memory) -> None:
        GraphDouble.holders[memory] -= 1

    def set_stream(self, stream: StreamDouble) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: StreamDouble) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: GraphDouble, pool: Memory, stream: StreamDouble, capture_error_mode: str) -> Iterator[None]:
        """As torch's, which leaves its own stream the current one where a capture fails, and allocations open."""
        assert capture_error_mode == "thread_local", "threads of the worker use the device meanwhile"
        assert pool not in self.allocating, "beginAllocateToPool: already recording to mempool_id"
        before, self.current = self.current, stream
        graph.hold(pool)
        self.allocating.append(pool)
        yield
        graph.is_complete = True
        self.allocating.remove(pool)
        self.current = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    doubles: dict[str, Any] = {"Stream": StreamDouble, "CUDAGraph": GraphDouble, "stream": device.stream}
    doubles |= {"graph": device.graph, "set_stream": device.set_stream, "current_stream": lambda: device.current}
    doubles["graph_pool_handle"] = device.graph_pool_handle
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", device.end_allocations, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", device.release, raising=False)
    monkeypatch.setattr(GraphDouble, "holders", {})
    return device


def compute_on(device: Device, streams: list[StreamDouble]) -> Callable[[], Tensor]:
    def compute() -> Tensor:
        streams.append(device.current)
        return torch.zeros(1)

    return compute


def test_graphs_share_their_memory_also_when_all_earlier_ones_were_dropped(device: Device) -> None:
    capture, streams = CudaCapture(), list[StreamDouble]()
    compute = compute_on(device, streams)
    for _ in range(2):
        kept = [capture(compute) for _ in range(2)]
        assert all(replay is not None for _, replay in kept)
        kept.clear()
    assert len(GraphDouble.holders) == 1
    assert len(streams) == 8 and len(set(streams)) == 1 and streams[0] is not device.steps
    assert streams[0].waited_for.count(device.steps) == 4 and device.steps.waited_for.count(streams[0]) == 4


def test_steps_go_on_in_their_own_stream_behind_a_capture_that_fails(device: Device) -> None:
    capture, streams = CudaCapture(), list[StreamDouble]()
    compute = compute_on(device, streams)

    def fails() -> Tensor:
        if len(streams) % 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return compute()

    with pytest.raises(RuntimeError, match="not permitted"):
        capture(fails)
    assert device.current is device.steps
    assert device.allocating == [], "torch would give no memory back"
    assert not any(GraphDouble.holders.values())
    capture(compute)
