"""LoRA adapters: a model with one has the weights that the papers and peft give it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace.worker.errors import ModelError
from tests.worker.loading.test_load import WEIGHTS, load
from tests.worker.loading.test_quantized import make_bfloat16, quantize_model
from tests.worker.models import make_model

QUERY, DOWN, EMBEDDING = "model.layers.1.self_attn.q_proj", "model.layers.2.mlp.down_proj", "model.embed_tokens"
RANK = 4


def save_adapter(path: Path, tensors: dict[str, Tensor], **settings: Any) -> None:
    path.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, path / "adapter_model.safetensors")
    defaults = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none", "init_lora_weights": True}
    (path / "adapter_config.json").write_text(json.dumps(defaults | settings))


def factors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return random A [rank, K] and B [N, rank] for a weight [N, K]."""
    return torch.randn(RANK, weight.shape[1]), torch.randn(weight.shape[0], RANK)


def of_layer(layer: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    make_model("llama", tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def stored(llama: Path) -> dict[str, Tensor]:
    return load_file(llama / WEIGHTS)


def check(model: Path, adapter: Path, changed: dict[str, Tensor]) -> None:
    """The tensors `changed` have these values, and all others those of the base model."""
    expected = load_file(model / WEIGHTS) | changed
    for name, parameter in load(model, weights=str(adapter))[0].named_parameters():
        torch.testing.assert_close(parameter, expected[name], msg=name)


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({}, (1.5, 1.5)),
        ({"use_rslora": True}, (3.0, 3.0)),
        ({"alpha_pattern": {"q_proj": 2}}, (0.5, 1.5)),
        ({"alpha_pattern": {"proj": 2, "layers.2.mlp.down_proj": 8}}, (1.5, 2.0)),
    ],
)
def test_a_layer_is_its_base_and_the_scaled_product(
    settings: dict[str, Any], scales: tuple[float, float], llama: Path, stored: dict[str, Tensor], tmp_path: Path
) -> None:
    tensors: dict[str, Tensor] = {}
    changed: dict[str, Tensor] = {}
    for layer, scale in zip((QUERY, DOWN), scales, strict=True):
        weight = stored[f"{layer}.weight"]
        a, b = factors(weight)
        tensors |= of_layer(layer, a, b)
        changed[f"{layer}.weight"] = weight + scale * (b @ a)
    save_adapter(tmp_path / "adapter", tensors, **settings)
    check(llama, tmp_path / "adapter", changed)


def test_dora_sets_the_length_of_each_output(llama: Path, stored: dict[str, Tensor], tmp_path: Path) -> None:
    weight = stored[f"{QUERY}.weight"]
    a, b = factors(weight)
    lengths = torch.rand(len(weight)) + 1
    parts = of_layer(QUERY, a, b) | {f"{QUERY}.lora_magnitude_vector": lengths}
    save_adapter(tmp_path / "adapter", parts, use_dora=True)
    direction = weight + 1.5 * (b @ a)
    check(llama, tmp_path / "adapter", {f"{QUERY}.weight": torch.nn.functional.normalize(direction) * lengths[:, None]})


def test_an_embedding_has_factors_of_its_own(llama: Path, stored: dict[str, Tensor], tmp_path: Path) -> None:
    weight = stored[f"{EMBEDDING}.weight"]
    a, b = torch.randn(RANK, len(weight)), torch.randn(weight.shape[1], RANK)
    parts = {f"{EMBEDDING}.lora_embedding_A": a, f"{EMBEDDING}.lora_embedding_B": b}
    save_adapter(tmp_path / "adapter", parts)
    check(llama, tmp_path / "adapter", {f"{EMBEDDING}.weight": weight + 1.5 * (b @ a).T})


def test_whole_tensors_take_the_place_of_the_base_models(
    llama: Path, stored: dict[str, Tensor], tmp_path: Path
) -> None:
    """As with `modules_to_save`, and for an embedding that peft saves beside its factors."""
    head, embedding = (torch.randn_like(stored[name]) for name in ("lm_head.weight", f"{EMBEDDING}.weight"))
    query = stored[f"{QUERY}.weight"]
    a, b = factors(query)
    parts = {"lm_head.weight": head, f"{EMBEDDING}.base_layer.weight": embedding, **of_layer(QUERY, a, b)}
    save_adapter(tmp_path / "adapter", parts)
    changed = {"lm_head.weight": head, f"{EMBEDDING}.weight": embedding, f"{QUERY}.weight": query + 1.5 * (b @ a)}
    check(llama, tmp_path / "adapter", changed)


def test_a_head_of_its_own_is_not_tied_any_more(tmp_path: Path) -> None:
    make_model("qwen2", tmp_path / "model")
    head = torch.randn(512, 64)
    query = load_file(tmp_path / "model" / WEIGHTS)[f"{QUERY}.weight"]
    a, b = factors(query)
    save_adapter(tmp_path / "adapter", {"lm_head.weight": head, **of_layer(QUERY, a, b)})
    check(tmp_path / "model", tmp_path / "adapter", {"lm_head.weight": head, f"{QUERY}.weight": query + 1.5 * (b @ a)})


def test_weights_that_a_model_stores_transposed(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "rope_parameters": None}
    make_model("llama", tmp_path / "model", model_type="gpt2", **sizes)
    name = "transformer.h.1.attn.c_attn"
    weight = load_file(tmp_path / "model" / WEIGHTS)[f"{name}.weight"]
    a, b = factors(weight.T)
    save_adapter(tmp_path / "adapter", of_layer(name, a, b), fan_in_fan_out=True)
    check(tmp_path / "model", tmp_path / "adapter", {f"{name}.weight": weight + 1.5 * (b @ a).T})


def test_an_adapter_for_a_quantized_model(tmp_path: Path) -> None:
    make_bfloat16("llama", tmp_path / "model")
    quantize_model(tmp_path / "model", "packed 4", tmp_path / "plain")
    a, b = factors(torch.empty(64, 64))
    save_adapter(tmp_path / "adapter", of_layer(QUERY, a, b))
    with_plain, with_quantized = (
        load(tmp_path / base, weights=str(tmp_path / "adapter"), dtype="float32")[0].get_parameter(f"{QUERY}.weight")
        for base in ("plain", "model")
    )
    torch.testing.assert_close(with_quantized, with_plain, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    ("settings", "names", "message"),
    [
        ({"peft_type": "IA3"}, (QUERY,), "is an adapter of kind IA3, and only LORA is supported"),
        ({"lora_bias": True}, (QUERY,), "uses lora_bias, which is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, (QUERY,), "uses init_lora_weights=pissa_niter_4"),
        ({}, ("model.layers.7.mlp.up_proj",), "is for model.layers.7.mlp.up_proj, which the model does not have"),
        ({}, (), "holds no LoRA weights"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    settings: dict[str, Any], names: tuple[str, ...], message: str, llama: Path, tmp_path: Path
) -> None:
    tensors = {key: each for name in names for key, each in of_layer(name, *factors(torch.empty(64, 64))).items()}
    save_adapter(tmp_path / "adapter", tensors, **settings)
    with pytest.raises(ModelError, match=message):
        load(llama, weights=str(tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{QUERY}.lora_A.weight": None}, f"a part of {QUERY} is missing"),
        ({f"{QUERY}.lora_B.weight": None}, f"a part of {QUERY} is missing"),
        ({f"{QUERY}.lora_A.weight": torch.zeros(0)}, f"a part of {QUERY} is missing"),
        (
            {f"{QUERY}.lora_A.weight": torch.randn(RANK, 7)},
            rf"is for {QUERY} as \[64, 7\], but the model has \[64, 64\]: name",
        ),
        ({f"{QUERY}.lora_A.weight": torch.randn(2, 64)}, "no weight can be computed from .*copy the model again"),
        ({f"{QUERY}.lora_C": torch.randn(2)}, "lora_C, which the model does not have"),
        ({"model.norm.weight": torch.randn(60)}, r"is for model.norm.weight as \[60\], but the model has \[64\]: name"),
        ({f"{EMBEDDING}.lora_magnitude_vector": torch.randn(2)}, "a part of model.embed_tokens is missing"),
    ],
)
def test_a_damaged_adapter_is_named(
    change: dict[str, Tensor | None], message: str, llama: Path, tmp_path: Path
) -> None:
    tensors = of_layer(QUERY, *factors(torch.empty(64, 64))) | change
    save_adapter(tmp_path / "adapter", {name: each for name, each in tensors.items() if each is not None})
    with pytest.raises(ModelError, match=message):
        load(llama, weights=str(tmp_path / "adapter"))


@pytest.mark.parametrize("has_factors", [True, False])
def test_a_tied_head_keeps_the_base_models_embedding(has_factors: bool, tmp_path: Path) -> None:
    """As in peft: the adapter changes the input of the model only."""
    make_model("qwen2", tmp_path / "model")
    stored = load_file(tmp_path / "model" / WEIGHTS)
    embedding, query = stored[f"{EMBEDDING}.weight"], stored[f"{QUERY}.weight"]
    a, b = torch.randn(RANK, len(embedding)), torch.randn(embedding.shape[1], RANK)
    changed = embedding + 1.5 * (b @ a).T if has_factors else torch.randn_like(embedding)
    own = {f"{EMBEDDING}.lora_embedding_A": a, f"{EMBEDDING}.lora_embedding_B": b}
    factors_of_query = factors(query)
    parts = (own if has_factors else {f"{EMBEDDING}.weight": changed}) | of_layer(QUERY, *factors_of_query)
    save_adapter(tmp_path / "adapter", parts)
    expected = {f"{EMBEDDING}.weight": changed, "lm_head.weight": embedding}
    query = query + 1.5 * (factors_of_query[1] @ factors_of_query[0])
    check(tmp_path / "model", tmp_path / "adapter", expected | {f"{QUERY}.weight": query})


def test_names_with_the_prefix_twice_and_with_the_adapters_name(
    llama: Path, stored: dict[str, Tensor], tmp_path: Path
) -> None:
    a, b = factors(stored[f"{QUERY}.weight"])
    layer = f"base_model.model.{QUERY}"
    parts = {f"{layer}.lora_A.default.weight": a, f"{layer}.lora_B.default.weight": b}
    save_adapter(tmp_path / "adapter", parts)
    (tmp_path / "adapter" / "config.json").write_text("{}")  # as axolotl saves it
    check(llama, tmp_path / "adapter", {f"{QUERY}.weight": stored[f"{QUERY}.weight"] + 1.5 * (b @ a)})


def test_tensors_in_float32_leave_the_others_in_bfloat16(tmp_path: Path) -> None:
    """Where float32 is computed, bfloat16 weights are kept as they are stored."""
    make_bfloat16("llama", tmp_path / "model")
    a, b = factors(torch.empty(64, 64))
    save_adapter(tmp_path / "adapter", {"model.norm.weight": torch.randn(64), **of_layer(QUERY, a, b)})
    model = load(tmp_path / "model", weights=str(tmp_path / "adapter"), dtype="float32")[0]
    assert model.get_parameter(f"{DOWN}.weight").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "settings", [{"lora_alpha": None}, {"alpha_pattern": ["q_proj"]}, {"alpha_pattern": {"(": 1}}, {"lora_alpha": "x"}]
)
def test_damaged_settings_are_one_sentence(settings: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", of_layer(QUERY, *factors(torch.empty(64, 64))), **settings)
    with pytest.raises(ModelError, match=r"adapter_config\.json cannot be read"):
        load(llama, weights=str(tmp_path / "adapter"))


def test_an_adapter_without_its_weights_or_with_a_damaged_config(llama: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    save_adapter(adapter, of_layer(QUERY, *factors(torch.empty(64, 64))))
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"adapter_config\.json cannot be read"):
        load(llama, weights=str(adapter))
    save_adapter(adapter, of_layer(QUERY, *factors(torch.empty(64, 64))))
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        load(llama, weights=str(adapter))
