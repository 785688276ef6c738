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
    def __init__(self) -> None:
        self.waited_for: list[StreamDouble] = []

    def wait_stream(self, other: StreamDouble) -> None:
        self.waited_for.append(other)


class GraphDouble:
    """Holds the memory into which it was captured, until it is gone."""

    holders: ClassVar[dict[int, int]] = {}

    def __init__(self) -> None:
        self._memory: int | None = None

    def hold(self, memory: int | None) -> None:
        if memory is not None and not self.holders[memory]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._memory = len(self.holders) if memory is None else memory
        self.holders[self._memory] = self.holders.get(self._memory, 0) + 1

    def pool(self) -> int | None:
        return self._memory

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        if self._memory is not None:
            self.holders[self._memory] -= 1


class Device:
    """Owns the current stream."""

    def __init__(self) -> None:
        self.steps = self.current = StreamDouble()

    def set_stream(self, stream: StreamDouble) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: StreamDouble) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(
        self, graph: GraphDouble, pool: int | None, stream: StreamDouble, capture_error_mode: str
    ) -> Iterator[None]:
        """As torch's, which leaves its own stream the current one where a capture fails."""
        assert capture_error_mode == "thread_local", "threads of the worker use the device meanwhile"
        before, self.current = self.current, stream
        graph.hold(pool)
        yield
        self.current = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    doubles: dict[str, Any] = {"Stream": StreamDouble, "CUDAGraph": GraphDouble, "stream": device.stream}
    doubles |= {"graph": device.graph, "set_stream": device.set_stream, "current_stream": lambda: device.current}
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
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
    capture(compute)
