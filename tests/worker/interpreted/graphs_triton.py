"""Decode steps as graphs, with a double that runs the same function again, and watches what a GPU's graph relies on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.executor.wire.messages import RowSampling
from millrace.worker import graphs, rank, rank_model
from millrace.worker.attention.triton import TritonAttention
from millrace.worker.fusion.decoder import FusedDecoder
from millrace.worker.fusion.device import DeviceOperations
from millrace.worker.graphs import DecodeGraphs, Replay
from millrace.worker.kernels import rows_torch
from millrace.worker.rank import Rank
from tests.worker.driver import GREEDY, Driver, start_worker
from tests.worker.models import VOCAB_SIZE, make_model

MAX_NUM_SEQS, MAX_TOKENS = 6, 6
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SAMPLING = [GREEDY, RowSampling(0.9, 20, 0.9, 0.0, 7, 0, 0, []), GREEDY]


@pytest.fixture(autouse=True)
def triton_on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(_: TritonAttention, dtype: torch.dtype, device: torch.device, **options: Any) -> DeviceOperations:
        return DeviceOperations(TritonAttention(), dtype, device, rows_torch)

    monkeypatch.setattr(rank, "choose_attention", lambda *_, **options: TritonAttention())
    monkeypatch.setattr(rank_model, "choose_operations", choose)
    monkeypatch.setattr(graphs, "CAPTURE_PAUSE_S", 0.0)


class CaptureDouble:
    """Runs the function again. Its buffers must stay where they are, and nothing else may have changed them since."""

    def __init__(self, decoder: FusedDecoder) -> None:
        self._decoder = decoder
        self.num_replays = 0

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        compute()
        result, buffers = compute(), self._addresses()

        def replay() -> None:
            assert self._addresses() == buffers, "the graph writes to buffers that are gone"
            assert compute().data_ptr() == result.data_ptr()
            assert self._addresses() == buffers, "a replay allocates"
            self.num_replays += 1

        return result, replay

    def _addresses(self) -> dict[str, int]:
        return {name: buffer.data_ptr() for name, buffer in self._decoder._workspace._buffers.items()}


def use_graphs(worker: Rank, capture: Callable[[FusedDecoder], Any] = CaptureDouble) -> tuple[DecodeGraphs, Any]:
    runner = worker.runner
    assert runner is not None and runner.decoder is not None and runner._graphs is None
    double = capture(runner.decoder)
    runner._graphs = DecodeGraphs(runner.decoder, TritonAttention(), MAX_NUM_SEQS, 32, double)
    return runner._graphs, double


def generate(worker: Rank, seed: int, num_prompts: int = 6, longest: int = 3, **options: Any) -> list[list[int]]:
    source = random.Random(1)
    prompts = [[source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, longest))] for _ in range(num_prompts)]
    driver = Driver(worker, seed, **options)
    runner = worker.runner
    assert runner is not None and runner.decoder is not None
    del runner.decoder.run, runner.decoder.most_likely  # the driver's, which watch eager steps
    sampling = [SAMPLING[index % len(SAMPLING)] for index in range(num_prompts)]
    return [request.output for request in driver.run(prompts, MAX_TOKENS, sampling)]


@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_tokens_are_those_of_eager_steps(arch: str, tmp_path: Path) -> None:
    """In random batches with preemptions and padding, with full attention and sliding windows."""
    options: dict[str, Any] = {} if arch == "llama" else {"layer_types": ["sliding_attention"]}
    make_model(arch, tmp_path, **SMALL, **options)
    worker = start_worker(tmp_path, max_num_seqs=MAX_NUM_SEQS)
    expected = generate(worker, 1)
    found, double = use_graphs(worker)
    assert generate(worker, 1) == expected
    assert len(found.sizes) >= 3 and double.num_replays > len(found.sizes)
    assert {size for size, _ in found.sizes} <= {1, 2, 4, MAX_NUM_SEQS}


def test_long_rows_have_graphs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("attention.triton", "graphs"):
        monkeypatch.setattr(f"millrace.worker.{module}.CHUNK", 32)
    make_model("mistral", tmp_path, **SMALL)
    worker = start_worker(tmp_path, max_num_seqs=MAX_NUM_SEQS)
    expected = generate(worker, 2, 2, 60, preempts=False)
    found, _ = use_graphs(worker)
    assert generate(worker, 2, 2, 60, preempts=False) == expected
    assert {chunks for _, chunks in found.sizes} == {1, 2}


def test_graphs_are_captured_again_when_a_buffer_has_grown_and_not_again_and_again_where_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path, **SMALL)
    worker = start_worker(tmp_path, max_num_seqs=MAX_NUM_SEQS)
    expected = generate(worker, 3, 2)
    found, double = use_graphs(worker)
    assert generate(worker, 3, 2) == expected
    num_replays = double.num_replays
    assert worker.runner is not None and worker.runner.decoder is not None
    worker.runner.decoder._workspace.clear()
    assert generate(worker, 3, 2) == expected
    assert double.num_replays > num_replays and found.sizes
    calls = []

    def fails(compute: Callable[[], Tensor]) -> Any:
        calls.append(compute)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(found, "_capture", fails)
    worker.runner.decoder._workspace.clear()
    assert generate(worker, 3, 2) == expected
    assert (len(calls), found.sizes) == (1, [])


def test_captures_have_pauses_and_steps_with_too_many_chunks_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path, **SMALL)
    worker = start_worker(tmp_path, max_num_seqs=MAX_NUM_SEQS)
    expected = generate(worker, 5, 3)
    monkeypatch.setattr(graphs, "CAPTURE_PAUSE_S", 1e6)
    found, double = use_graphs(worker)
    assert generate(worker, 5, 3) == expected
    assert len(found.sizes) == 1
    num_replays = double.num_replays
    monkeypatch.setattr(graphs, "MOST_CHUNKS", 0)
    assert generate(worker, 5, 3) == expected
    assert double.num_replays == num_replays > 0
