"""Models that take images or audio too: their language models are served alone, and have the tokens of the whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForMultimodalLM, PretrainedConfig

from millrace.worker.errors import ModelError
from tests.worker.driver import Driver, start_worker
from tests.worker.loading.test_adapter import factors, of_layer, save_adapter
from tests.worker.loading.test_load import WEIGHTS, edit_config, load
from tests.worker.models import VOCAB_SIZE, randomize
from tests.worker.test_parity import MAX_TOKENS, check_against_transformers, prompts

TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
AUDIO = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
GEMMA: dict[str, Any] = {
    "text_config": TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "vision_config": ENCODER | {"patch_size": 14},
    "mm_tokens_per_image": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": GEMMA,  # tied
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": ENCODER | {"model_type": "pixtral", "head_dim": 16, "patch_size": 14},
        "tie_word_embeddings": False,
    },
    "smolvlm": {  # its names have text_model
        "text_config": TEXT | {"model_type": "llama", "pad_token_id": 0},
        "vision_config": ENCODER | {"patch_size": 14},
        "scale_factor": 2,
    },
    "qwen2_audio": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "audio_config": AUDIO | {"model_type": "qwen2_audio_encoder", "num_mel_bins": 16},
    },
}


def make_whole(name: str, path: Path) -> tuple[Any, PretrainedConfig]:
    """Save a whole model with random weights in the names of published checkpoints. Returns it, and the configuration of
    its language model."""
    config = AutoConfig.for_model(name, **MODELS[name])
    has_images = "vision_config" in MODELS[name]
    torch.manual_seed(0)
    whole = (AutoModelForImageTextToText if has_images else AutoModelForMultimodalLM).from_config(config).eval()
    whole.config.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    randomize(whole, seed=4)
    whole.save_pretrained(path)
    return whole, config.get_text_config()


@pytest.mark.parametrize("name", MODELS)
def test_a_language_model_has_the_tokens_of_the_whole_model(name: str, tmp_path: Path) -> None:
    whole, _ = make_whole(name, tmp_path)
    requests = Driver(start_worker(tmp_path), seed=1).run(prompts(1), MAX_TOKENS)
    check_against_transformers(tmp_path, requests, whole)


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_the_names_of_the_modules_are_read_too(name: str, tmp_path: Path) -> None:
    whole, _ = make_whole(name, tmp_path)
    published = dict(load(tmp_path)[0].named_parameters())
    is_tied = whole.config.tie_word_embeddings
    tensors = {
        each: tensor for each, tensor in whole.state_dict().items() if not (is_tied and each.startswith("lm_head"))
    }
    assert not tensors.keys() <= load_file(tmp_path / WEIGHTS).keys()
    save_file(tensors, tmp_path / WEIGHTS)
    parameters = dict(load(tmp_path)[0].named_parameters())
    assert parameters.keys() == published.keys()
    assert all(torch.equal(parameters[each], published[each]) for each in parameters)


def test_an_adapter_of_the_whole_model_is_merged(tmp_path: Path) -> None:
    make_whole("gemma3", tmp_path / "whole")
    base = dict(load(tmp_path / "whole")[0].named_parameters())
    layer = "layers.1.self_attn.q_proj"
    a, b = factors(base[f"model.{layer}.weight"])
    for number, name in enumerate((f"model.language_model.{layer}", f"language_model.model.{layer}")):
        save_adapter(tmp_path / str(number), of_layer(name, a, b))
        merged = dict(load(tmp_path / "whole", weights=str(tmp_path / str(number)))[0].named_parameters())
        changed = {each for each in base if not torch.equal(merged[each], base[each])}
        assert changed == {f"model.{layer}.weight"}


def test_a_quantized_model_may_say_so_of_its_language_model_only(tmp_path: Path) -> None:
    make_whole("gemma3", tmp_path)
    edit_config(tmp_path, text_config=GEMMA["text_config"] | {"quantization_config": {"quant_method": "unheard-of"}})
    with pytest.raises(ModelError, match=r"quantized checkpoint \(unheard-of\)"):
        load(tmp_path)


def test_a_model_whose_prompts_are_not_causal_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("paligemma", text_config=TEXT).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="paligemma takes more than text, and its language model cannot be used alone"):
        load(tmp_path)


def test_a_language_model_without_a_class_of_its_own_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen2_5_vl").save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match="qwen2_5_vl takes more than text, and its language model cannot be used alone"
    ):
        load(tmp_path)


def test_layers_of_other_kinds_are_refused(tmp_path: Path) -> None:
    make_whole("gemma3", tmp_path)
    edit_config(tmp_path, text_config=GEMMA["text_config"] | {"layer_types": ["chunked_attention", "full_attention"]})
    with pytest.raises(ModelError, match="gemma3_text has layers of kind chunked_attention"):
        load(tmp_path)
