"""Graphs of decode steps of all sizes, with the double of a capture, and when they are captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from millrace.executor.wire.messages import RowSampling
from millrace.worker import graph_kinds, graphs
from millrace.worker.graph_kinds import Kind
from millrace.worker.graphs import StepGraphs
from millrace.worker.input_batch import InputBatch
from millrace.worker.kv_pool import KVPool
from millrace.worker.rank import Rank
from millrace.worker.runner import Runner
from millrace.worker.transfer import FixedBuffer
from tests.worker.driver import GREEDY, start_worker
from tests.worker.interpreted.graph_steps import (
    DRAWN,
    LIMITED,
    MAX_NUM_SEQS,
    SMALL,
    SPACE,
    add_graphs,
    ahead,
    count,
    finish_all,
    generate,
    use_graphs,
)
from tests.worker.models import make_model
from tests.worker.test_no_waiting import ROWS

pytestmark = pytest.mark.usefixtures("triton_on_this_cpu")


@pytest.mark.parametrize(("num_rows", "first"), [(1, DRAWN), (3, LIMITED), (5, DRAWN), (6, GREEDY)])
def test_steps_of_each_size_yield_the_tokens_of_eager_steps(
    num_rows: int, first: RowSampling, worker: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [first, *([GREEDY, DRAWN] * num_rows)][:num_rows]
    expected = ahead(worker, rows)
    found, double = use_graphs(worker)
    eager, copies = count(monkeypatch, InputBatch, "send"), count(monkeypatch, FixedBuffer, "filling")
    assert ahead(worker, rows) == expected
    assert (len(eager), len(copies)) == (2, 3), "a step with a graph is one copy to the device"
    size = min(1 << (num_rows - 1).bit_length(), MAX_NUM_SEQS)
    kinds = {Kind(rows, SPACE, draws=True, has_limits=first is LIMITED) for rows in (size, MAX_NUM_SEQS)}
    assert found.kinds == sorted(kinds)  # the largest one was captured in the first step
    assert (double.num_captures, double.num_replays) == (len(kinds), 3)
    assert double.num_padded == (3 if num_rows < size else len(kinds) - 1)


@pytest.mark.parametrize("name", ["penalties", "logprobs"])
def test_rows_with_processors_are_drawn_behind_the_graph(name: str, worker: Rank) -> None:
    rows = [DRAWN, ROWS[name], LIMITED]
    expected = ahead(worker, rows)
    found, double = use_graphs(worker)
    assert ahead(worker, rows) == expected
    assert found.kinds == [Kind(size, SPACE, draws=False) for size in (4, MAX_NUM_SEQS)]
    assert double.num_padded == 3


def test_long_rows_have_graphs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_kinds, "LEAST_CHUNKS", 1)
    monkeypatch.setattr(graphs, "MOST_TOKENS", 0)
    for module in ("attention.triton", "graphs", "graph_kinds"):
        monkeypatch.setattr(f"millrace.worker.{module}.CHUNK", 32)
    make_model("mistral", tmp_path, **SMALL)
    worker = start_worker(tmp_path, max_num_seqs=MAX_NUM_SEQS)
    expected = generate(worker, 2, 3, 40, preempts=False)
    for most_chunks in (8192, 12):
        monkeypatch.setattr(graphs, "MOST_CHUNKS", most_chunks)
        found, _ = use_graphs(worker)
        assert generate(worker, 2, 3, 40, preempts=False) == expected
        assert {kind.num_chunks for kind in found.kinds} == {1, 4}


def test_graphs_are_captured_again_when_a_buffer_has_grown_and_not_again_and_again_where_that_fails(
    worker: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(worker, 3, 2)
    found, double = use_graphs(worker)
    assert generate(worker, 3, 2) == expected
    assert worker.runner is not None and worker.runner.decoder is not None

    def grow_slots() -> None:
        sequences = worker.runner._sequences  # type: ignore[union-attr]
        taken = [sequences._take_slot() for _ in range(sequences.num_slots + 1)]
        sequences._free_slots += taken

    for change in (worker.runner.decoder._workspace.clear, grow_slots):
        num_replays = double.num_replays
        change()
        assert generate(worker, 3, 2) == expected
        assert double.num_replays > num_replays and found.kinds
    calls = []

    def fails(compute: Callable[[], Tensor]) -> Any:
        calls.append(compute)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(found, "_capture", fails)
    worker.runner.decoder._workspace.clear()
    assert generate(worker, 3, 2) == expected
    assert (len(calls), found.kinds) == (1, [])


def test_while_captures_pause_a_larger_graph_runs_and_steps_with_too_many_chunks_run_none(
    worker: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ahead(worker, [LIMITED] * 5), ahead(worker, [GREEDY] * 2)
    monkeypatch.setattr(graphs, "CAPTURE_PAUSE_STEPS", 1000)
    found, double = use_graphs(worker)
    assert (ahead(worker, [LIMITED] * 5), ahead(worker, [GREEDY] * 2)) == expected
    assert len(found.kinds) == 1 and double.num_replays == 6
    monkeypatch.setattr(graphs, "MOST_CHUNKS", 0)
    assert ahead(worker, [GREEDY] * 2) == expected[1]
    assert double.num_replays == 6


def test_steps_behind_an_error_and_a_sleep_yield_the_same_tokens(worker: Rank) -> None:
    rows = [GREEDY, LIMITED, DRAWN]
    expected = ahead(worker, rows)
    found, _ = use_graphs(worker)
    ahead(worker, rows)

    def fails() -> None:
        raise torch.OutOfMemoryError

    captured = dict(found._graphs)
    found._graphs.update({kind: replace(graph, replay=fails) for kind, graph in captured.items()})
    with pytest.raises(torch.OutOfMemoryError):
        ahead(worker, rows)
    found._graphs.update(captured)
    finish_all(worker)
    assert ahead(worker, rows) == expected
    for level in (1, 2):
        worker.sleep(level)
        worker.wake_up(["weights", "kv_cache"], 1)
        _, double = use_graphs(worker)
        assert ahead(worker, rows) == expected
        assert double.num_replays == 3


@pytest.mark.usefixtures("for_all_steps")
def test_the_memory_profile_has_the_largest_graph_and_the_pool_no_more_than_sequences_can_use(
    worker: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, made = worker._model.facts, list[Any]()
    total, used, reserved, peak = 2 << 20, 1 << 19, 1 << 18, 1 << 20
    figures: dict[str, Any] = {
        "mem_get_info": (total - used, total),
        "memory_reserved": reserved,
        "max_memory_reserved": peak + 2 * facts.kv_bytes_per_block,
        "get_device_properties": SimpleNamespace(total_memory=total),
    }
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, figure=figure: figure)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    make_runner, add, captured = worker._make_runner, StepGraphs._add, list[Kind]()

    def record_and_add(found: StepGraphs, kind: Kind, *others: Any) -> None:
        captured.append(kind)
        add(found, kind, *others)

    monkeypatch.setattr(StepGraphs, "_add", record_and_add)

    def make_with_graphs(pool: KVPool) -> Runner:
        made.append(make_runner(pool))
        add_graphs(made[0], width=48)
        return made[0]

    monkeypatch.setattr(worker, "_make_runner", make_with_graphs)
    monkeypatch.setattr(worker, "_device", torch.device("cuda"))
    monkeypatch.setattr(worker, "_config", structs.replace(worker._config, num_blocks=None))
    layout = structs.replace(facts.kv_layout, max_step_tokens=8)
    monkeypatch.setattr(worker._model, "facts", structs.replace(facts, kv_layout=layout))
    assert worker._profile_gpu() == int(total * 0.9) - (used - reserved) - peak
    kinds = [(False, False, 8), (True, True, 0)]
    assert captured == [Kind(MAX_NUM_SEQS, SPACE, *others) for others in kinds]
    made.clear()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 40, 1 << 40))
    assert worker._num_device_blocks() == MAX_NUM_SEQS * layout.num_blocks(facts.max_model_len) + 1
