"""Which models get a forward pass of our own, and that it gives the tokens of transformers."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from millrace.worker.fusion.decoder import DecoderWeights
from millrace.worker.fusion.fuse import waits_for_device
from millrace.worker.fusion.mlp import Experts, NormedMLP
from millrace.worker.fusion.structure import NotRecognised, read_structure
from millrace.worker.kernels.library import find_kernels
from tests.worker.driver import Driver, Request, start_worker
from tests.worker.models import CONFIGS, MULTIPLIERS, build_model, make_model
from tests.worker.test_parity import MAX_TOKENS, check_against_transformers, prompts

pytestmark = pytest.mark.skipif(find_kernels() is None, reason="the compiled kernels were not built")

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("llama", {"model_type": "phi3", "rope_parameters": None}),
    "phi3, half rotated": (
        "llama",
        {
            "model_type": "phi3",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "mixtral": ("mistral", {"model_type": "mixtral", "num_local_experts": 4}),
    "qwen3_moe": (
        "qwen3",
        {
            "model_type": "qwen3_moe",
            "tie_word_embeddings": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "seed": 3,
        },
    ),
    "granite_swa": ("llama", {"model_type": "granite_swa", "rope_parameters": None, "sliding_window": 24}),
    "granite": ("llama", {"model_type": "granite", "rope_parameters": None, **MULTIPLIERS}),
    "granitemoe": (
        "llama",
        {"model_type": "granitemoe", "rope_parameters": None, "num_local_experts": 4, **MULTIPLIERS},
    ),
    "granitemoehybrid, no rotary embedding": (
        "llama",
        {
            "model_type": "granitemoehybrid",
            "rope_parameters": None,
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 96,
            **MULTIPLIERS,
        },
    ),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "seed": 2}),
}
"""Recognised besides CONFIGS: base and overrides."""


def run(path: Path, **options: object) -> tuple[list[Request], DecoderWeights | None]:
    worker = start_worker(path, **options)
    return Driver(worker, seed=1).run(prompts(1), MAX_TOKENS), worker._model.decoder


@pytest.mark.parametrize("arch", [*CONFIGS, "gpt_oss"])
def test_the_families_with_their_own_tests_are_recognised(arch: str, tmp_path: Path) -> None:
    make_model(arch, tmp_path)
    assert start_worker(tmp_path)._model.decoder is not None


@pytest.mark.parametrize("name", MORE)
def test_more_families_are_recognised_and_match_transformers(name: str, tmp_path: Path) -> None:
    base, overrides = MORE[name]
    make_model(base, tmp_path, **overrides)
    requests, decoder = run(tmp_path)
    assert decoder is not None
    check_against_transformers(tmp_path, requests)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_token_passes_its_experts_whatever_the_others_choose(name: str, tmp_path: Path) -> None:
    base, overrides = MORE[name]
    torch.manual_seed(0)
    make_model(base, tmp_path, **overrides)
    worker = start_worker(tmp_path)
    assert worker._model.decoder is not None
    mixture = worker._model.decoder.layers[0].mlp
    assert isinstance(mixture, NormedMLP) and isinstance(mixture.mlp, Experts)
    inputs = torch.randn(600, 64)
    together, added, alone = torch.empty(600, 64), torch.ones(600, 64), torch.empty(1, 64)
    mixture.into(inputs, together)
    for row in range(0, 600, 37):
        mixture.into(inputs[row : row + 1], alone)
        assert torch.equal(alone[0], together[row])
    mixture.into(inputs, added, accumulate=True)
    assert torch.equal(added, together + 1)


def test_experts_are_in_memory_once_and_wake_up_as_they_were(tmp_path: Path) -> None:
    base, overrides = MORE["mixtral"]
    torch.manual_seed(0)
    make_model(base, tmp_path, **overrides)
    worker = start_worker(tmp_path)
    experts = worker._model.module.model.layers[0].mlp.experts
    assert experts.gate_up_proj.numel() == experts.down_proj.numel() == 0
    expected = [request.output for request in Driver(worker, seed=1).run(prompts(1), 4)]
    for level in (1, 2):
        worker.sleep(level)
        worker.wake_up(["weights", "kv_cache"], 1)
        assert [request.output for request in Driver(worker, seed=1).run(prompts(1), 4)] == expected


def test_an_unknown_structure_runs_through_the_modules(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model("llama", tmp_path, model_type="olmo2", seed=2)
    with caplog.at_level(logging.INFO):
        requests, decoder = run(tmp_path)
    assert decoder is None
    assert (
        "runs through transformers' modules, which is slower: Olmo2DecoderLayer has no input_layernorm" in caplog.text
    )
    check_against_transformers(tmp_path, requests)


LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "rope_parameters": None,
}


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            {"model_type": "helium", "head_dim": 16, "rope_parameters": None, "tie_word_embeddings": False},
            "its rotary embedding pairs other entries",
        ),
        (
            LATENT | {"model_type": "deepseek_v3", "head_dim": 8, "tie_word_embeddings": False},
            "DeepseekV3Attention has no k_proj, v_proj",
        ),
        (
            LATENT | {"model_type": "deepseek_v2", "tie_word_embeddings": False},
            "its rotary embedding is not of cosines and sines",
        ),
        (
            {
                "model_type": "smollm3",
                "no_rope_layers": [1, 0, 1],
                "rope_parameters": None,
                "tie_word_embeddings": False,
            },
            "it has layers without a rotary embedding",
        ),
    ],
)
def test_what_only_looks_like_a_known_structure_runs_through_the_modules(
    overrides: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    make_model("llama", tmp_path, seed=1, **overrides)
    with caplog.at_level(logging.INFO):
        requests, decoder = run(tmp_path)
    assert decoder is None
    assert f"which is slower: {reason}" in caplog.text
    check_against_transformers(tmp_path, requests)


@pytest.mark.parametrize("changed", [LlamaMLP, LlamaDecoderLayer, nn.Embedding, None])
def test_a_model_that_computes_something_else_is_rejected_by_its_numbers(
    changed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changed is None:  # multiplies by what Granite divides by
        make_model("llama", tmp_path, model_type="hyperclovax", use_post_norm=False, logits_scaling=0.5)
    else:
        make_model("llama", tmp_path)
        forward = changed.forward
        monkeypatch.setattr(changed, "forward", lambda *args, **options: 0.7 * forward(*args, **options))
    with caplog.at_level(logging.INFO):
        requests, decoder = run(tmp_path)
    assert decoder is None
    assert f"the logits of {'HyperCLOVAX' if changed is None else 'Llama'}ForCausalLM differ by" in caplog.text
    check_against_transformers(tmp_path, requests)


@pytest.mark.parametrize(("divisor", "has_argmax"), [(0.4, False), (0.5, True), (1.0, True)])
def test_greedy_tokens_need_all_logits_where_a_division_may_make_them_equal(
    divisor: float, has_argmax: bool, tmp_path: Path
) -> None:
    make_model("llama", tmp_path, model_type="granite", logits_scaling=divisor)
    worker = start_worker(tmp_path)
    assert worker.runner is not None and worker.runner.decoder is not None
    assert worker.runner.decoder.has_argmax == has_argmax
    check_against_transformers(tmp_path, Driver(worker, seed=1).run(prompts(1), MAX_TOKENS))


@pytest.mark.parametrize(("max_model_len", "is_fused"), [(32, True), (33, False), (512, False)])
def test_queries_that_are_scaled_by_position_are_left_to_the_modules(
    max_model_len: int, is_fused: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in bfloat16, where the scale changes the logits less than the number format may."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32}
    rope |= {"llama_4_scaling_beta": 0.1}
    overrides: dict[str, Any] = {
        "model_type": "ministral3",
        "head_dim": 16,
        "sliding_window": None,
        "rope_parameters": rope,
    }
    make_model("llama", tmp_path, **overrides)
    with caplog.at_level(logging.INFO):
        worker = start_worker(tmp_path, dtype="bfloat16", max_model_len=max_model_len)
    assert (worker._model.decoder is not None) == is_fused
    assert ("which is slower: it scales the queries of positions from 32 on" in caplog.text) != is_fused
    given = [prompt for prompt in prompts(1) if len(prompt) + MAX_TOKENS <= max_model_len]
    worker = start_worker(tmp_path, max_model_len=max_model_len)
    check_against_transformers(tmp_path, Driver(worker, seed=1).run(given, MAX_TOKENS))


def test_the_other_attention_is_never_fused(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    assert start_worker(tmp_path, attention="reference")._model.decoder is None


def test_no_weight_is_in_memory_twice(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    worker = start_worker(tmp_path)
    layer = worker._model.module.model.layers[0]
    assert worker._model.decoder is not None
    packed = worker._model.decoder.layers[0].projections.linear.weights
    assert layer.self_attn.q_proj.weight.data_ptr() == packed.data_ptr()
    assert layer.self_attn.k_proj.weight.numel() == layer.self_attn.v_proj.weight.numel() == 0


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_tied_head_and_embedding_are_in_memory_once(stored: str, tmp_path: Path) -> None:
    build_model("qwen2").to(getattr(torch, stored)).save_pretrained(tmp_path)
    worker = start_worker(tmp_path, dtype="float32")
    decoder, module = worker._model.decoder, worker._model.module
    assert decoder is not None and decoder.head is not None
    weights = {each.weight.untyped_storage().data_ptr() for each in (module.lm_head, module.model.embed_tokens)}
    assert weights == {decoder.head.weights.untyped_storage().data_ptr()}
    check_against_transformers(tmp_path, Driver(worker, seed=1).run(prompts(1), MAX_TOKENS))


def test_a_sleep_releases_the_weights(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    worker = start_worker(tmp_path)
    expected = [request.output for request in Driver(worker, seed=1).run(prompts(1), 4)]
    assert worker._model.decoder is not None
    packed = weakref.ref(worker._model.decoder.layers[0].projections.linear.weights)
    worker.sleep(2)
    gc.collect()
    assert packed() is None
    worker.wake_up(["weights", "kv_cache"], 1)
    assert [request.output for request in Driver(worker, seed=1).run(prompts(1), 4)] == expected


def test_shared_layers_are_not_recognised() -> None:
    model = build_model("llama")
    layers = model.get_decoder().layers
    assert isinstance(layers, nn.ModuleList)
    layers[1] = layers[0]
    with pytest.raises(NotRecognised, match="its layers share weights"):
        read_structure(model, [], 16)


@pytest.mark.parametrize(("failure", "waits"), [("called a synchronizing CUDA operation", True), (None, False)])
def test_a_step_that_waits_for_the_gpu_is_noticed(
    failure: str | None, waits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As experts do in transformers, where torch has no grouped product for the GPU or the precision."""
    modes = ["before"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def run(*_: object) -> None:
        assert modes[-1] == "error"
        if failure is not None:
            raise RuntimeError(failure)

    decoder: Any = SimpleNamespace(run=run)
    assert waits_for_device(decoder, None, None) == waits  # type: ignore[arg-type]
    assert modes == ["before", "error", "before"]
    assert ("does not run as a graph" in caplog.text) == waits


def test_other_errors_of_a_step_are_not_taken_for_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    decoder: Any = SimpleNamespace(run=mock.Mock(side_effect=RuntimeError("an illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal"):
        waits_for_device(decoder, None, None)  # type: ignore[arg-type]
