"""A rank's part of a model: its layers, its slices, what it reads of the files, and what cannot be divided."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from millrace.executor.wire.messages import WorkerConfig
from millrace.worker.errors import ModelError, RendezvousError
from millrace.worker.loading import weights
from millrace.worker.loading.checkpoint import find_weights
from millrace.worker.loading.model import build_empty, read_config
from millrace.worker.loading.part import ModelPart
from millrace.worker.loading.probe import probe_layers
from millrace.worker.loading.tensor_files import WeightFile
from millrace.worker.loading.weights import load_weights
from millrace.worker.parallel.topology import Topology
from millrace.worker.rank import Rank
from tests.worker.models import CONFIGS, build_model, make_model
from tests.worker.test_linear import LONGCAT

CPU = torch.device("cpu")


def test_layers_are_balanced_and_the_last_stage_has_no_more_than_others() -> None:
    def counts(num_layers: int, num_stages: int) -> list[int]:
        ranges = [Topology(stage, 1, num_stages).layers(num_layers) for stage in range(num_stages)]
        assert [index for layers in ranges for index in layers] == list(range(num_layers))
        return [len(layers) for layers in ranges]

    assert counts(3, 2) == [2, 1]
    assert counts(28, 3) == [10, 9, 9]
    assert counts(4, 4) == [1, 1, 1, 1]
    assert counts(7, 1) == [7]


@pytest.mark.parametrize(("size", "shares"), [(8, [4, 4]), (9, [5, 4]), (1, [1, 0])])
def test_a_dimension_is_shared_without_gaps(size: int, shares: list[int]) -> None:
    ranges = [Topology(rank, 2, 1).share(size) for rank in range(2)]
    assert [len(share) for share in ranges] == shares
    assert [index for share in ranges for index in share] == list(range(size))


def test_places_in_the_grid() -> None:
    places = [Topology(rank, 2, 3) for rank in range(6)]
    assert [(place.stage, place.tp_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [place.rank for place in places if place.is_output_rank] == [4]


def load_part(path: Path, topology: Topology, coded_dtype: torch.dtype | None = None) -> tuple[Any, ModelPart]:
    model = build_empty(read_config(path), torch.float32)
    part = ModelPart(model, topology)
    load_weights(model, part, find_weights(path), CPU, coded_dtype)
    return model, part


@pytest.mark.parametrize("arch", CONFIGS)
def test_the_ranks_parts_make_up_the_whole_model(arch: str, tmp_path: Path) -> None:
    make_model(arch, tmp_path)
    whole, _ = load_part(tmp_path, Topology(0, 1, 1))
    seen: dict[str, torch.Tensor] = {}
    for rank in range(4):
        model, part = load_part(tmp_path, Topology(rank, 2, 2))
        for name, tensor in model.state_dict().items():
            expected = whole.state_dict()[name]
            places = torch.arange(expected.numel()).view_as(expected)
            own = part.slices[name].of(places) if name in part.slices else places
            assert torch.equal(tensor, expected.flatten()[own]), name
            seen.setdefault(name, torch.zeros(expected.numel(), dtype=torch.bool))[own] = True
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, whole.get_buffer(name)), name
    assert seen.keys() == whole.state_dict().keys()
    assert all(bool(parts.all()) for parts in seen.values())


def test_only_this_ranks_slices_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    num_stored: dict[str, int] = {}
    tensor, copy_all = WeightFile.tensor, weights.copy_all

    def record_tensor(file: WeightFile, name: str) -> torch.Tensor:
        num_stored[name] = tensor(file, name).numel()
        return tensor(file, name)

    num_copied: list[int] = []

    def record_copies(pairs: list[tuple[torch.Tensor, torch.Tensor]], num_threads: int) -> None:
        num_copied.extend(stored.numel() for _, stored in pairs)
        copy_all(pairs, num_threads)

    monkeypatch.setattr(WeightFile, "tensor", record_tensor)
    monkeypatch.setattr(weights, "copy_all", record_copies)
    monkeypatch.setattr(weights, "_can_stay_mapped", lambda *_: False)
    model, _ = load_part(tmp_path, Topology(3, 2, 2))
    norms = ["model.layers.2.input_layernorm.weight", "model.layers.2.post_attention_layernorm.weight"]
    whole = [*norms, "model.norm.weight"]
    divided = [name for name, _ in model.named_parameters() if name not in whole]
    assert sorted(num_stored) == sorted([*whole, *divided])
    assert sum(num_copied) == sum(num_stored[name] for name in whole) + sum(num_stored[name] for name in divided) // 2
    assert sorted(name for name, _ in model.named_parameters() if "layers.1" in name or "embed" in name) == []


# --- what cannot be divided ---


@pytest.mark.parametrize(
    ("changes", "tp_size", "pp_size", "message"),
    [
        ({}, 3, 1, "tensor_parallel_size 3 does not divide the 4 attention heads of llama: use 1 or 2,"),
        ({}, 4, 1, "tensor_parallel_size 4 does not divide the 2 key and value heads of llama: use 1 or 2,"),
        ({"intermediate_size": 129}, 2, 1, "divide the 129 features of model.layers.0.mlp.gate_proj of llama: use 1,"),
        ({}, 1, 4, "llama has 3 layers, too few for 4 stages: use a pipeline_parallel_size of at most 3"),
        (
            {"model_type": "gpt2"},
            *(2, 1),
            "tensor_parallel_size: must be 1, since transformers has no tensor parallel plan for gpt2, got 2; "
            "run it on one rank",
        ),
        (
            {"model_type": "gpt2"},
            *(1, 2),
            "pipeline_parallel_size: must be 1, since transformers has no pipeline parallel plan for gpt2, got 2; "
            "run it on one rank",
        ),
        (
            {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
            *(2, 1),
            "has no tensor parallel plan for gpt_oss, got 2; use pipeline_parallel_size instead",
        ),
        ({"model_type": "nanochat"}, 1, 2, "plan for nanochat, got 2; use tensor_parallel_size instead"),
        (
            {"model_type": "mixtral", "intermediate_size": 33, "num_local_experts": 2},
            *(2, 1),
            "divide the 33 features of model.layers.0.mlp.experts.gate_up_proj of mixtral: use 1,",
        ),
        (
            {
                "model_type": "deepseek_v2",
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 2,
            },
            *(2, 1),
            'kv_a_proj_with_mqa of deepseek_v2 as "mla_kv_a_proj", which is not supported; use pipeline',
        ),
        (LONGCAT, 2, 1, "cannot be divided, since its forward pass needs values: run it on one rank"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_works(
    changes: dict[str, Any], tp_size: int, pp_size: int, message: str
) -> None:
    settings = build_model("llama").config.to_dict() | {"rope_parameters": None, "head_dim": 16} | changes
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = build_empty(config, torch.float32)
    with pytest.raises(ModelError, match=re.escape(message)):
        ModelPart(model, Topology(0, tp_size, pp_size))


def test_attention_that_does_not_see_fewer_heads_is_refused(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    model = build_empty(read_config(tmp_path), torch.float32)
    part = ModelPart(model, Topology(0, 2, 1))
    specs = probe_layers(model)
    part.check_layers(model, specs)
    specs[1] = replace(specs[1], num_kv_heads=2, key_dim=specs[1].key_dim // 2)
    with pytest.raises(ModelError, match="llama does not work on a part of its heads"):
        part.check_layers(model, specs)


def test_ranks_that_can_not_connect_name_the_address(tmp_path: Path) -> None:
    def rank(rendezvous: str) -> Rank:
        return Rank(0, 2, 1, WorkerConfig(model=str(tmp_path), device="cpu", tensor_parallel_size=2), rendezvous)

    with pytest.raises(
        RendezvousError, match=r"rank 0 of 2 cannot connect to the others at 'nowhere' \(it must look like"
    ):
        rank("nowhere").start(lambda _: None)
    with (
        socket.create_server(("127.0.0.1", 0)) as occupied,
        pytest.raises(RendezvousError, match="Address already in use"),
    ):
        rank(f"tcp://127.0.0.1:{occupied.getsockname()[1]}").start(lambda _: None)
