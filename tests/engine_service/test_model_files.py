"""What the engine reads from a model's directory before the worker does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.engine_service.build import with_local_adapter
from millrace.engine_service.config import EngineConfig
from millrace.engine_service.errors import ConfigurationError
from millrace.engine_service.model_files import (
    check_parallel_sizes,
    eos_token_ids,
    fingerprint,
    resolve_adapter,
    resolve_model,
)
from tests.e2e.models import make_servable


@pytest.mark.parametrize("value", [2.5, "</s>", {"a": 1}, [1, None]])
def test_a_wrong_end_token_is_named(value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigurationError, match=r"^model: eos_token_id in .*config.json must be a token id or a list"):
        eos_token_ids(tmp_path)


def test_the_end_token_of_a_language_model_may_be_in_its_part_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None, "text_config": {"eos_token_id": 5}}))
    assert eos_token_ids(tmp_path) == [5]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0, "text_config": {"eos_token_id": 5}}))
    assert eos_token_ids(tmp_path) == [0]


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": [1]},
        {"num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": "2"},
        {"num_attention_heads": -4, "num_hidden_layers": 2},
        {"num_attention_heads": 4, "num_hidden_layers": 0},
    ],
)
def test_a_damaged_configuration_is_left_to_the_worker_which_refuses_it(config: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_parallel_sizes(tmp_path, 2, 2)


def test_a_configuration_of_endless_depth_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigurationError, match=r"^model: .*config.json can't be read"):
        check_parallel_sizes(tmp_path, 1, 1)


# --- the model's directory ---


def test_a_gguf_file_or_a_directory_or_repository_of_one_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model-q4_k_m.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    file = "gguf/model-q4_k_m.gguf"
    for model in (file, f"{tmp_path}/{file}", f"{tmp_path}/gguf", "org/name-GGUF"):
        with pytest.raises(ConfigurationError, match=r"^model: .* is in GGUF, .*; use .* safetensors, in 16 bits$"):
            resolve_model(model)


def test_another_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigurationError, match=r"^model: .* is a file; name the directory of a model$"):
        resolve_model(f"{tmp_path}/model.safetensors")


def test_a_model_for_embeddings_is_refused_and_a_reranker_that_generates_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in the files of sentence-transformers."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    modules = tmp_path / "modules.json"
    modules.write_text('[{"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}]')
    assert resolve_model(str(tmp_path)) == tmp_path
    modules.write_text('[{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]')
    for model in (str(tmp_path), "org/name"):
        with pytest.raises(
            ConfigurationError, match=r"^model: .* is a model for embeddings \(it has modules\.json\); use"
        ):
            resolve_model(model)


def test_an_adapter_is_no_model_and_a_model_is_no_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    for adapter in (str(tmp_path), "org/name"):
        with pytest.raises(ConfigurationError, match=r"^adapter: .* has no adapter_config\.json; name the directory"):
            resolve_adapter(adapter)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ConfigurationError, match=r"is a LoRA adapter .*; name org/base, and it as adapter$"):
        resolve_model(str(tmp_path))
    with pytest.raises(ConfigurationError, match="is a LoRA adapter"):
        resolve_model("org/name")
    (tmp_path / "config.json").write_text("{}")  # as axolotl saves it
    for adapter in (str(tmp_path), "org/name"):
        assert resolve_adapter(adapter) == resolve_model(adapter, or_adapter=True) == tmp_path
    with pytest.raises(ConfigurationError, match=r"^adapter: .* is a file; name the directory of an adapter$"):
        resolve_adapter(f"{tmp_path}/config.json")
    with pytest.raises(ConfigurationError, match=r"^adapter: there is no directory \./nowhere"):
        resolve_adapter("./nowhere")


@pytest.mark.parametrize(("has_own", "given"), [(True, None), (False, None), (True, "other")])
def test_the_tokenizer_is_that_of_the_adapter_if_it_has_one(has_own: bool, given: str | None, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    if has_own:
        (tmp_path / "tokenizer.json").write_text("{}")
    config = with_local_adapter(EngineConfig(model="m", adapter=str(tmp_path), tokenizer=given))
    assert config.tokenizer == (given or (str(tmp_path) if has_own else None))
    assert config.for_worker(tmp_path).weights == str(tmp_path)


@pytest.mark.parametrize("token", ["<|im_end|>", {"content": "<|im_end|>"}, "<other>", None])
def test_the_end_token_of_an_adapters_tokenizer_ends_a_sequence_too(token: object, tmp_path: Path) -> None:
    """As of an adapter for chats, over a base model with another one."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    assert eos_token_ids(tmp_path, str(adapter)) == [7, 0]
    (adapter / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    (adapter / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 9, "content": "<|im_end|>"}]}))
    assert eos_token_ids(tmp_path, str(adapter)) == [7, 0] + [9] * ("im_end" in str(token))


# --- the fingerprint ---


@pytest.fixture
def servable(tmp_path: Path) -> Path:
    """A model whose larger tensors have several sampled places."""
    return make_servable("llama", tmp_path, hidden_size=128, intermediate_size=512)


def test_a_change_of_any_weight_matrix_has_another_fingerprint(servable: Path) -> None:
    """As a merged LoRA adapter changes them: only those of attention, or of one layer."""
    file = servable / "model.safetensors"
    tensors = load_file(file)
    seen = {fingerprint(servable, servable, None)}
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor * 1.01}, file, metadata={"format": "pt"})
        seen.add(fingerprint(servable, servable, None))
    assert len(seen) == 1 + len(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    assert fingerprint(servable, servable, None) in seen


def test_a_small_tensor_counts_as_a_whole(tmp_path: Path) -> None:
    weight = torch.zeros(4 * 4096 // 2, dtype=torch.bfloat16)
    seen = set()
    for number in range(0, len(weight), 61):
        save_file({"norm": weight.index_fill(0, torch.tensor(number), 1)}, tmp_path / "model.safetensors")
        seen.add(fingerprint(tmp_path, tmp_path, None))
    assert len(seen) == len(range(0, len(weight), 61))


def test_texts_have_another_fingerprint_and_places_do_not(servable: Path, tmp_path: Path) -> None:
    before = fingerprint(servable, servable, None)
    copied = tmp_path / "copied"
    shutil.copytree(servable, copied)
    assert fingerprint(copied, servable, None) == before
    template = tmp_path / "template"
    template.write_text("{{ messages }}")
    assert fingerprint(servable, servable, str(template)) != before
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (copied / name).write_bytes((copied / name).read_bytes() + b" ")
        assert fingerprint(copied, copied, None) != before
        shutil.copy(servable / name, copied / name)
    assert fingerprint(copied, copied, None) == before
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    seen = {before}
    for content, settings in ((1.0, "{}"), (2.0, "{}"), (2.0, '{"lora_alpha": 9}')):
        save_file({"a": torch.tensor([content])}, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text(settings)
        seen.add(fingerprint(servable, servable, None, str(adapter)))
    assert len(seen) == 4


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 7 + b"\x7f{}",
        b"version https://git-lfs.github.com/spec/v1",
        (2).to_bytes(8, "little") + b"[]",
        (100).to_bytes(8, "little") + b"[" * 100_000,
        (9).to_bytes(8, "little") + b'{"a": []}',
        (28).to_bytes(8, "little") + b'{"a": {"data_offsets": [1]}}',
        (36).to_bytes(8, "little") + b'{"a": {"data_offsets": ["x", null]}}',
        (34).to_bytes(8, "little") + b'{"a": {"data_offsets": [-99, -90]}}'[:34],
        (40).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 1%s]}}' % (b"0" * 9),
    ],
    ids=lambda content: content[:40].hex(),
)
def test_a_damaged_file_is_left_to_the_worker(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "other.safetensors").symlink_to(tmp_path / "nowhere")
    (tmp_path / "third.safetensors").mkdir()
    assert len(fingerprint(tmp_path, tmp_path, None)) == 32
