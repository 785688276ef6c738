"""A rank releases its memory in sleep. It wakes up unchanged, or reports what has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.executor.rank.worker import WAKE_TAGS
from millrace.executor.wire.messages import StepId, StepPlan
from millrace.worker.errors import PlanError, WeightsChanged
from millrace.worker.rank import Rank
from tests.worker.driver import Driver, execute, num_sequences, pool_bytes, start_worker
from tests.worker.models import make_model

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11, 12]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model("qwen3", tmp_path)
    return tmp_path


def wake_up(worker: Rank) -> None:
    worker.wake_up(list(WAKE_TAGS), 1)


def weights_on(worker: Rank) -> str:
    return worker._model.location


def generate(worker: Rank) -> list[list[int]]:
    return [request.output for request in Driver(worker, 1).run(PROMPTS, 6)]


@pytest.mark.parametrize("level", [1, 2])
def test_a_rank_that_woke_up_generates_the_same(level: int, model: Path) -> None:
    worker = start_worker(model)
    before = generate(worker)
    worker.sleep(level)
    assert pool_bytes(worker) == num_sequences(worker) == 0
    assert (worker._model._module is None) == (level == 2)
    wake_up(worker)
    assert worker._pool is not None and worker._pool.num_blocks == 200
    assert generate(worker) == before


def test_a_gpu_ends_its_copies_and_gives_back_what_torch_and_cublas_keep(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, calls = start_worker(model), list[str]()

    def synchronize(_: torch.device) -> None:
        calls.append(f"synchronize, the pool is {'there' if worker._pool else 'gone'}")

    monkeypatch.setattr(worker, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty the cache"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("clear cuBLAS"), raising=False)
    worker.sleep(1)
    assert calls == ["synchronize, the pool is there", "clear cuBLAS", "empty the cache"]


def test_weights_and_pool_wake_up_apart_in_any_order(model: Path) -> None:
    worker = start_worker(model)
    before = generate(worker)
    for tags in (["weights"], ["kv_cache"]), (["kv_cache"], ["weights"]):
        worker.sleep(2)
        worker.wake_up(tags[0], 1)
        with pytest.raises(PlanError, match="it sleeps: call wake_up first"):
            execute(worker, StepPlan(StepId(1), 1, 1, 0, 0))
        worker.wake_up(tags[1], 1)
        assert generate(worker) == before


def test_the_new_pool_begins_a_new_epoch(model: Path) -> None:
    worker = start_worker(model)
    worker.sleep(1)
    worker.wake_up(["weights", "kv_cache"], 2)
    with pytest.raises(PlanError, match="epoch 1, this rank is in epoch 2"):
        execute(worker, StepPlan(StepId(1), 1, 1, 0, 0))
    assert execute(worker, StepPlan(StepId(1), 2, 1, 0, 0)).epoch == 2


def test_deeper_sleep_and_repeated_calls(model: Path) -> None:
    worker = start_worker(model)
    before = generate(worker)
    for level in (1, 1, 2, 2, 1):
        worker.sleep(level)
    assert weights_on(worker) == "disk"
    wake_up(worker)
    wake_up(worker)
    assert weights_on(worker) == "device"
    assert generate(worker) == before


def test_a_rank_without_pool_sleeps_too(model: Path) -> None:
    worker = start_worker(model)
    worker._drop_pool()
    worker._num_blocks = None
    worker.sleep(1)
    wake_up(worker)
    worker.initialize_cache(200, 0)
    assert len(generate(worker)[0]) == 6


def change_file(model: Path, worker: Rank) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] += 1
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def change_memory(model: Path, worker: Rank) -> None:
    worker._model.module.model.layers[1].mlp.down_proj.weight += 1


@pytest.mark.parametrize(("level", "change"), [(1, change_memory), (2, change_file)])
def test_weights_that_changed_meanwhile_are_noticed(
    level: int, change: Callable[[Path, Rank], None], model: Path
) -> None:
    worker = start_worker(model)
    worker.sleep(level)
    with torch.no_grad():
        change(model, worker)
    with pytest.raises(
        WeightsChanged, match=r"1 of 37 tensors .* first of all model\.layers\.1\.mlp\.down_proj\.weight"
    ):
        wake_up(worker)
    with pytest.raises(PlanError, match="it sleeps"):
        execute(worker, StepPlan(StepId(1), 1, 1, 0, 0))


def test_unknown_levels_and_tags_are_refused(model: Path) -> None:
    worker = start_worker(model)
    for level in (0, 3):
        with pytest.raises(AssertionError, match=f"sleep level {level}"):
            worker.sleep(level)
    with pytest.raises(AssertionError, match="tags"):
        worker.wake_up(["kv"], 2)
    assert len(generate(worker)) == 2
