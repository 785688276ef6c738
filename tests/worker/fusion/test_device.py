"""The fused forward pass with torch's operations, as on a GPU without Triton, gives the tokens of transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from millrace.worker import rank_model
from millrace.worker.attention.interface import Attention
from millrace.worker.fusion.decoder import DecoderWeights
from millrace.worker.fusion.device import DeviceOperations
from millrace.worker.fusion.mlp import GatedMLP, ModuleMLP, NormedMLP
from millrace.worker.kernels import rows_torch
from millrace.worker.linear.modules import merge_modules
from millrace.worker.loading import weights
from millrace.worker.rank import Rank
from tests.worker.driver import Driver, start_worker
from tests.worker.fusion.test_fuse import MORE
from tests.worker.models import CONFIGS, make_model
from tests.worker.test_parity import MAX_TOKENS, check_against_transformers, check_close_to_transformers, prompts


@pytest.fixture(autouse=True)
def operations_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(attention: Attention, dtype: torch.dtype, device: torch.device, **options: Any) -> DeviceOperations:
        return DeviceOperations(attention, dtype, device, rows_torch)

    monkeypatch.setattr(rank_model, "choose_operations", choose)
    monkeypatch.setattr(weights, "_can_stay_mapped", lambda *_: False)
    copy_all = weights.copy_all
    monkeypatch.setattr(weights, "copy_all", lambda pairs, _: copy_all(pairs, 4))


def start(path: Path, **options: object) -> tuple[Rank, DecoderWeights]:
    worker = start_worker(path, **options)
    decoder = worker._model.decoder
    assert decoder is not None and isinstance(decoder.operations, DeviceOperations)
    return worker, decoder


@pytest.mark.parametrize("name", [*CONFIGS, *MORE, "gpt_oss"])
def test_each_family_is_fused_and_matches_transformers(name: str, tmp_path: Path) -> None:
    base, overrides = MORE.get(name, (name, {}))
    make_model(base, tmp_path, **overrides)
    worker, _ = start(tmp_path, attention="reference")
    check_against_transformers(tmp_path, Driver(worker, seed=1).run(prompts(1), MAX_TOKENS))


@pytest.mark.parametrize("arch", ["qwen3", "gemma3_text"])
def test_bfloat16_is_close_to_transformers(arch: str, tmp_path: Path) -> None:
    make_model(arch, tmp_path)
    worker, _ = start(tmp_path, attention="reference", dtype="bfloat16")
    check_close_to_transformers(tmp_path, Driver(worker, seed=1).run(prompts(1), MAX_TOKENS), torch.bfloat16)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_run_in_their_module_through_grouped_products(name: str, tmp_path: Path) -> None:
    base, overrides = MORE[name]
    make_model(base, tmp_path, **overrides)
    worker, decoder = start(tmp_path)
    mixture = decoder.layers[0].mlp
    assert isinstance(mixture, NormedMLP) and isinstance(mixture.mlp, ModuleMLP)
    assert worker._model.module.config._experts_implementation == "grouped_mm"


def test_other_numbers_are_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model("llama", tmp_path, model_type="hyperclovax", use_post_norm=False, logits_scaling=0.5)
    with caplog.at_level(logging.INFO):
        worker = start_worker(tmp_path, attention="reference")
    assert worker._model.decoder is None
    assert "the logits of HyperCLOVAXForCausalLM differ by" in caplog.text
    check_against_transformers(tmp_path, Driver(worker, seed=1).run(prompts(1), MAX_TOKENS))


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_no_weight_is_in_memory_twice(arch: str, tmp_path: Path) -> None:
    """Those that move with the model are all that there are, besides its buffers."""
    make_model(arch, tmp_path, attention_bias=True)
    with mock.patch.object(weights, "_set", wraps=weights._set) as loaded:
        worker, decoder = start(tmp_path)
    read = {call.args[1]: call.args[2].data_ptr() for call in loaded.call_args_list}
    first = decoder.layers[0]
    assert (
        first.projections.linear.weights.data_ptr() == read["model.layers.0.self_attn.q_proj.weight"]
    )  # merged without a copy
    assert isinstance(first.mlp, GatedMLP)
    assert first.mlp._projections.linear.weights.data_ptr() == read["model.layers.0.mlp.gate_proj.weight"]
    module: Any = worker._model.module
    owned = {each.untyped_storage().data_ptr() for each in module.parameters() if each.numel()}
    for layer in decoder.layers:
        assert {layer.projections.linear.weights.untyped_storage().data_ptr(), layer.output.weights.data_ptr()} <= owned
    attention = module.model.layers[0].self_attn
    assert attention.k_proj.weight.numel() == 0 and attention.k_proj.bias is None
    is_tied = module.config.tie_word_embeddings
    assert (module.lm_head.weight is module.model.embed_tokens.weight) == is_tied
    assert decoder.head is not None and decoder.head.weights is module.lm_head.weight
    assert all(kept in set(module.parameters()) for kept in decoder.operations.tensors)


def test_the_weights_of_the_operations_move_with_the_model(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    worker, decoder = start(tmp_path)
    worker._model.module.to("meta")  # type: ignore[arg-type]
    assert all(each.is_meta for each in decoder.operations.tensors)
    assert len(decoder.operations.tensors) == 3 * 2 + 1 + 3 * 2 + 2  # norms, head norms, two tables


@pytest.mark.parametrize("level", [1, 2])
def test_a_rank_wakes_up_as_it_was(level: int, tmp_path: Path) -> None:
    make_model("gemma3_text", tmp_path)
    worker, _ = start(tmp_path)
    expected = [request.output for request in Driver(worker, seed=1).run(prompts(1), 4)]
    worker.sleep(level)
    worker.wake_up(["weights", "kv_cache"], 1)
    assert [request.output for request in Driver(worker, seed=1).run(prompts(1), 4)] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_merged_layers_are_the_single_ones(has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linears = [torch.nn.Linear(24, size, bias=has_bias and size != 7).to(dtype) for size in (8, 7, 5)]
    inputs, before = torch.randn(6, 24).to(dtype), torch.randn(6, 20).to(dtype)
    with torch.no_grad():
        expected = torch.cat([each(inputs) for each in linears], dim=-1)
        merged = merge_modules(linears, dtype)
        outputs, added = torch.empty_like(before), before.clone()
        merged.into(inputs, outputs)
        merged.into(inputs, added, accumulate=True)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(outputs, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(added, before + expected, atol=tolerance, rtol=tolerance)
