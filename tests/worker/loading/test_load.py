"""Model directories: valid ones load exactly as in transformers, others are refused with one clear sentence."""

from __future__ import annotations

import json
import logging
import re
import resource
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, T5Config
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.utils import logging as transformers_logging

from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import ModelFacts, WorkerConfig
from millrace.worker.errors import ConfigError, DeviceError, ModelError, is_out_of_memory
from millrace.worker.fusion.device import DeviceOperations
from millrace.worker.fusion.operations import CompiledOperations
from millrace.worker.kernels import rows_torch
from millrace.worker.kernels.library import find_kernels, supported_instruction_sets
from millrace.worker.loading import weights
from millrace.worker.loading.tensor_files import WeightFile
from millrace.worker.rank import Rank
from tests.worker.driver import Driver, start_worker
from tests.worker.models import VOCAB_SIZE, build_model, make_model
from tests.worker.test_parity import MAX_TOKENS, check_against_transformers, prompts

WEIGHTS = "model.safetensors"


def load(path: Path, **options: Any) -> tuple[Any, ModelFacts]:
    """Load a model as a rank does, and leave its weights unpacked."""
    rank = Rank(0, 1, 1, WorkerConfig(model=str(path), device="cpu", **options))
    with (
        mock.patch("millrace.worker.rank_model.fuse", return_value=None),
        mock.patch("millrace.worker.rank_model.use_packed_linear"),
    ):
        facts = rank.start(lambda _: None)
    return rank._model.module, facts


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make_model("llama", tmp_path)
    return tmp_path


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3_text", "nemotron_h"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_is_what_transformers_loads(arch: str, dtype: str, tmp_path: Path) -> None:
    make_model(arch, tmp_path)
    ours, facts = load(tmp_path, dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, local_files_only=True)
    expected = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    actual = dict(ours.named_parameters()) | dict(ours.named_buffers())
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name
    assert facts.weight_bytes == sum(parameter.nbytes for parameter in theirs.parameters())
    assert facts.dtype == dtype


def test_the_facts_describe_the_model(tmp_path: Path) -> None:
    make_model("gemma3_text", tmp_path)
    _, facts = load(tmp_path, max_model_len=100, block_size=8)
    assert facts == ModelFacts(
        architecture="Gemma3ForCausalLM",
        vocab_size=512,
        max_model_len=100,
        dtype="float32",
        device="cpu",
        attention="cpu",
        weight_bytes=facts.weight_bytes,
        kv_bytes_per_block=8 * 2 * 2 * 16 * 4,
        kv_layout=KVLayout(8, (24, 24, None), 2048, 100),
        weights_checksum=facts.weights_checksum,
        kv_cache_dtype="float32",
    )
    assert load(tmp_path, max_model_len=100_000)[1].max_model_len == 512


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_kv_pool_has_a_number_format_of_its_own(llama: Path, dtype: str, kv_cache_dtype: str) -> None:
    size_of = {"float32": 4, "bfloat16": 2}
    as_computed = load(llama, dtype=dtype)[1]
    facts = load(llama, dtype=dtype, kv_cache_dtype=kv_cache_dtype)[1]
    assert (as_computed.kv_cache_dtype, facts.kv_cache_dtype) == (dtype, kv_cache_dtype)
    assert facts.kv_bytes_per_block * size_of[dtype] == as_computed.kv_bytes_per_block * size_of[kv_cache_dtype]


def test_the_same_weights_have_the_same_checksum_and_others_another(llama: Path) -> None:
    first = load(llama)[1].weights_checksum
    assert load(llama)[1].weights_checksum == first
    assert load(llama, dtype="bfloat16")[1].weights_checksum != first
    edit_weights(llama, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].add_(1))
    assert load(llama)[1].weights_checksum != first


def test_sharded_weights_load_like_whole_ones(llama: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    build_model("llama").save_pretrained(sharded, max_shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    whole, split = load(llama)[0].state_dict(), load(sharded)[0].state_dict()
    assert all(torch.equal(whole[name], split[name]) for name in whole)
    next(iter(sharded.glob("*-00002-of-*"))).unlink()
    with pytest.raises(ModelError, match=r"00002-of-.* is missing"):
        load(sharded)


def test_tied_weights_are_shared_whichever_of_them_is_stored(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    expected = load(tmp_path)[0].lm_head.weight.clone()
    edit_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    model, _ = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, expected)


def test_weights_that_are_stored_apart_with_other_values_are_not_tied(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    edit_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    model, _ = load(tmp_path)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight + 1)


def test_names_without_the_base_models_prefix_and_old_buffers_are_understood(llama: Path) -> None:
    expected = load(llama)[0].state_dict()

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["layers.0.attn.masked_bias"] = torch.tensor(-1e4)

    edit_weights(llama, strip)
    actual = load(llama)[0].state_dict()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_experts_stored_one_by_one_are_merged(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = build_model("qwen3", model_type="qwen3_moe", tie_word_embeddings=False, **sizes)
    model.save_pretrained(tmp_path)
    assert any(".experts.0." in name for name in load_file(tmp_path / WEIGHTS))
    request = Driver(start_worker(tmp_path), seed=1).run([[1, 2, 3, 4, 5]], 3)[0]
    with torch.no_grad():
        logits = model(torch.tensor([request.tokens])).logits[0, 4:-1]
    torch.testing.assert_close(torch.stack(request.logits), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("computed_by", ["fused", "modules", "torch", "fused modules of a GPU"])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2"])
def test_weights_do_not_change_with_their_files(
    arch: str, computed_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, kept = tmp_path / "served", tmp_path / "kept"
    make_model(arch, kept)
    shutil.copytree(kept, served)
    if computed_by == "modules":
        monkeypatch.setattr("millrace.worker.rank_model.fuse", lambda *_: None)
    if computed_by == "torch":
        monkeypatch.setattr("millrace.worker.linear.choice.find_kernels", lambda: None)
    if computed_by == "fused modules of a GPU":
        monkeypatch.setattr(
            "millrace.worker.rank_model.choose_operations",
            lambda attention, dtype, device, **_: DeviceOperations(attention, dtype, device, rows_torch),
        )
    worker = start_worker(served)
    assert str(served) not in Path("/proc/self/maps").read_text()
    (served / WEIGHTS).write_bytes(bytes((served / WEIGHTS).stat().st_size))
    check_against_transformers(kept, Driver(worker, seed=1).run(prompts(1), MAX_TOKENS))


@pytest.mark.skipif(find_kernels() is None, reason="the compiled kernels were not built")
def test_a_weight_is_in_memory_once_while_it_is_packed(tmp_path: Path) -> None:
    """Unpacked weights are the file's memory, and leave the process as soon as they are packed."""
    make_model("llama", tmp_path, vocab_size=VOCAB_SIZE * 16)

    def resident_kib() -> int:
        entry = Path("/proc/self/smaps").read_text().partition(str(tmp_path / WEIGHTS))[2]
        return int(entry.partition("\nRss:")[2].split()[0]) if entry else 0

    head_kib = VOCAB_SIZE * 16 * 64 * 4 // 1024
    release, resident = CompiledOperations.release_memory, []

    def record(operations: CompiledOperations) -> None:
        resident.append(resident_kib())
        release(operations)

    with mock.patch.object(CompiledOperations, "release_memory", record):
        start_worker(tmp_path)
    layers_kib = (tmp_path / WEIGHTS).stat().st_size // 1024 - 2 * head_kib
    assert resident[0] > 2 * head_kib > resident[0] - layers_kib
    assert resident == sorted(resident, reverse=True)
    assert resident[-1] < 2 * head_kib + layers_kib // 3
    assert resident_kib() == 0


@pytest.mark.parametrize("num_threads", [1, 3])
def test_tensors_of_any_shape_are_copied_and_converted(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CHUNK_BYTES", 100)
    stored = [torch.randn(shape).half() for shape in ((), (0,), (7,), (300,), (5, 40), (3, 4, 5), (2, 0))]
    stored.append(torch.randn(6, 8).half().T)
    pairs = [(torch.empty(each.shape), each) for each in stored]
    before = torch.get_num_threads()
    weights.copy_all(pairs, num_threads)
    assert all(torch.equal(own, each.float()) for own, each in pairs)
    assert torch.get_num_threads() == before


def test_float16_checkpoints_run_in_float32_on_a_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_model("llama").half().save_pretrained(tmp_path)
    with caplog.at_level("INFO", logger="millrace.worker"):
        assert load(tmp_path)[1].dtype == "float32"
    assert "running in float32" in caplog.text
    assert load(tmp_path, dtype="float16")[1].dtype == "float16"


HAVE_BFLOAT16 = ("amx", "avx512bf16")


@pytest.fixture(params=[*HAVE_BFLOAT16, "avx512", "avx2"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The CPU is one with this instruction set at most."""
    found = find_kernels()
    if found is None or request.param not in supported_instruction_sets(found.library):
        pytest.skip(f"there is no {request.param} here")
    limited = replace(found, instruction_set=request.param)
    monkeypatch.setattr("millrace.worker.loading.dtype.find_kernels", lambda: limited)
    return str(request.param)


def test_auto_takes_bfloat16_where_the_cpu_has_it(
    machine: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_model("llama").bfloat16().save_pretrained(tmp_path)
    with caplog.at_level("INFO", logger="millrace.worker"):
        dtype = load(tmp_path)[1].dtype
    assert dtype == ("bfloat16" if machine in HAVE_BFLOAT16 else "float32")
    assert ("no instructions for it: running in float32" in caplog.text) == (dtype == "float32")


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("is_fused", [True, False])
def test_weights_stay_bfloat16_where_float32_is_computed(
    arch: str, is_fused: bool, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are those of float32 weights: widened, each of them is the same."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    moe: dict[str, Any] = {"model_type": arch, "tie_word_embeddings": False, **sizes} if arch == "qwen3_moe" else {}
    build_model("qwen3" if moe else arch, **moe).bfloat16().save_pretrained(tmp_path)
    if not is_fused:
        monkeypatch.setattr("millrace.worker.rank_model.fuse", lambda *_: None)
    worker = start_worker(tmp_path, dtype="float32")
    assert worker._model.facts.dtype == "float32"
    request = Driver(worker, seed=1).run([[1, 2, 3, 4, 5]], 5)[0]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32", local_files_only=True)
        logits = model(torch.tensor([request.tokens])).logits[0, 4:-1]
    torch.testing.assert_close(torch.stack(request.logits), logits, rtol=1e-4, atol=1e-4)
    is_kept = arch not in ("gemma3_text", "qwen3_moe")  # an embedding of its own; experts are converted
    assert (worker._model.module.model.embed_tokens.weight.dtype == torch.bfloat16) == is_kept
    worker.sleep(2)
    worker.wake_up(["weights", "kv_cache"], 1)
    assert Driver(worker, seed=1).run([[1, 2, 3, 4, 5]], 5)[0].output == request.output


def test_a_dtype_that_the_cpu_emulates_is_reported(machine: str, llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(llama, dtype="bfloat16")[1].dtype == "bfloat16"
    assert ("bfloat16 is emulated on this CPU, which is slow: use --dtype auto" in caplog.text) == (
        machine not in HAVE_BFLOAT16
    )


@pytest.mark.parametrize("renamed", [{}, {"model.norm.weight": "other"}])
def test_transformers_writes_nothing_between_the_lines_of_the_log(
    renamed: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither a progress bar nor a table of what differs, also where it converts the checkpoint."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    make_model("qwen3", tmp_path, model_type="qwen3_moe", tie_word_embeddings=False, **sizes)
    path = tmp_path / "model.safetensors"
    save_file({renamed.get(name, name): each for name, each in load_file(path).items()}, path, {"format": "pt"})
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.enable_progress_bar()
    transformers_logging.set_verbosity(logging.INFO)
    capfd.readouterr()
    try:
        with pytest.raises(ModelError) if renamed else nullcontext():
            load(tmp_path)
        assert transformers_logging.is_progress_bar_enabled(), "programs that use LLM keep theirs"
        assert transformers_logging.get_verbosity() == logging.INFO
    finally:
        transformers_logging.disable_progress_bar()  # as all tests of workers have it
        transformers_logging.set_verbosity(verbosity)
    assert capfd.readouterr() == ("", "")


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no directory"):
        load(tmp_path / "nothing")


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", "[" * 100_000])
def test_a_damaged_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json .*copy the model again"):
        load(tmp_path)


def test_a_directory_without_weights_is_refused(llama: Path) -> None:
    (llama / WEIGHTS).unlink()
    with pytest.raises(ModelError, match="has no safetensors files"):
        load(llama)


def test_pickled_weights_are_refused(llama: Path) -> None:
    (llama / WEIGHTS).rename(llama / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"\.bin files, which can run code: convert them"):
        load(llama)


@pytest.mark.parametrize("size", [0, 5, 2000, -1])
def test_truncated_weights_are_refused(llama: Path, size: int) -> None:
    content = (llama / WEIGHTS).read_bytes()
    (llama / WEIGHTS).write_bytes(content[:size])
    with pytest.raises(ModelError, match="truncated or damaged"):
        load(llama)


@pytest.mark.parametrize(
    ("kind", "room"),
    [(resource.RLIMIT_AS, 1 << 29), (resource.RLIMIT_AS, 3 << 29), (resource.RLIMIT_DATA, 3 << 29)],
    ids=["safetensors", "torch", "python"],
)
def test_weights_that_there_is_no_memory_to_map_are_no_damaged_ones(kind: int, room: int, llama: Path) -> None:
    """Each library that maps the file has an error of its own."""
    size = 1 << 30
    header = json.dumps({"a": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with (llama / WEIGHTS).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    before, pages = resource.getrlimit(kind), Path("/proc/self/statm").read_text().split()
    used = int(pages[0 if kind == resource.RLIMIT_AS else 5]) * resource.getpagesize()
    resource.setrlimit(kind, (used + room, before[1]))
    try:
        with pytest.raises((MemoryError, RuntimeError, OSError)) as caught:
            WeightFile(llama / WEIGHTS)
    finally:
        resource.setrlimit(kind, before)
    assert is_out_of_memory(caught.value)


def test_other_files_than_weights_are_named(llama: Path) -> None:
    content = (llama / WEIGHTS).read_bytes()
    (llama / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 1\n")
    with pytest.raises(ModelError, match="is a pointer of Git LFS instead of weights: run git lfs pull"):
        load(llama)
    (llama / WEIGHTS).rename(llama / "adapter_model.safetensors").write_bytes(content)
    (llama / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is a LoRA adapter \(adapter_config\.json\): name its base model"):
        load(llama)
    (llama / "adapter_config.json").unlink()
    (llama / "adapter_model.safetensors").rename(llama / "model.gguf")
    with pytest.raises(ModelError, match="has its weights in GGUF"):
        load(llama)


def test_an_adapter_beside_a_whole_model_is_not_used(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    (llama / "adapter_config.json").write_text("{}")
    load(llama)
    assert f"the LoRA adapter in {llama} is not used" in caplog.text


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_without_settings_are_refused(dtype: torch.dtype, llama: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(llama, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(ModelError, match=rf"{name} in .* is stored as (I8|F8_E4M3): use a checkpoint in 16 or 32 bits"):
        load(llama)


def test_integers_in_a_parameter_of_another_name_are_refused(tmp_path: Path) -> None:
    make_model("qwen2", tmp_path)
    name = "model.layers.1.self_attn.q_proj.bias"
    edit_weights(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ModelError, match=rf"{name} is stored as torch.int8: use a checkpoint in 16 or 32 bits"):
        load(tmp_path)


def test_a_shard_that_is_missing_without_an_index_is_found_by_its_tensors(llama: Path) -> None:
    edit_weights(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    (llama / WEIGHTS).rename(llama / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"missing model\.layers\.1\.mlp\.up_proj\.weight; unexpected none"):
        load(llama)


def test_yarn_extends_the_context_that_config_json_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    make_model("llama", tmp_path, max_position_embeddings=64, rope_parameters=yarn)
    assert load(tmp_path)[1].max_model_len == 256
    assert load(tmp_path, max_model_len=999)[1].max_model_len == 256
    assert "max_model_len 999 exceeds the model's 256 positions, which are used: if it was trained for" in caplog.text
    long = [[(7 * index) % VOCAB_SIZE for index in range(200)]]
    check_against_transformers(tmp_path, Driver(start_worker(tmp_path), seed=1).run(long, MAX_TOKENS))


def test_yarn_of_the_layers_without_a_window_extends_the_context(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    default = {"rope_type": "default", "rope_theta": 1e4}
    rope = {"sliding_attention": yarn, "full_attention": default}
    make_model("gemma3_text", tmp_path / "window", max_position_embeddings=64, rope_parameters=rope)
    assert load(tmp_path / "window")[1].max_model_len == 64
    rope = {"sliding_attention": default, "full_attention": yarn}
    make_model("gemma3_text", tmp_path, max_position_embeddings=64, rope_parameters=rope)
    assert load(tmp_path)[1].max_model_len == 256
    long = [[(7 * index) % VOCAB_SIZE for index in range(200)]]
    check_against_transformers(tmp_path, Driver(start_worker(tmp_path), seed=1).run(long, MAX_TOKENS))


def test_yarn_without_the_length_that_it_extends_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    make_model("llama", tmp_path, max_position_embeddings=64, rope_parameters=yarn)
    load(tmp_path)
    assert "YaRN" not in caplog.text
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["rope_parameters"]["original_max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert load(tmp_path)[1].max_model_len == 256
    rule = "if 64 is the extended length, set original_max_position_embeddings beside the factor of YaRN"
    assert f"YaRN extends the 64 positions of config.json to 256: {rule}" in caplog.text


def test_a_damaged_index_is_refused(llama: Path) -> None:
    (llama / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(ModelError, match=r"index\.json is damaged"):
        load(llama)


def test_a_missing_tensor_is_named(llama: Path) -> None:
    edit_weights(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"missing model\.layers\.1\.mlp\.up_proj\.weight; unexpected none"):
        load(llama)


def test_no_values_are_drawn_for_missing_tensors(llama: Path) -> None:
    """It takes up to a minute for the weights of a large model."""
    save_file({"surprise": torch.ones(2, 2)}, llama / WEIGHTS, metadata={"format": "pt"})
    state = torch.get_rng_state()
    with pytest.raises(ModelError, match=r"missing .* and \d+ more; unexpected surprise"):
        load(llama)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_extra_tensor_is_named(llama: Path) -> None:
    edit_weights(llama, lambda tensors: tensors.update(surprise=torch.ones(2, 2)))
    with pytest.raises(ModelError, match="missing none; unexpected surprise"):
        load(llama)


def test_a_tensor_of_another_shape_is_named(llama: Path) -> None:
    edit_weights(llama, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as \[3\].*\[64\]"):
        load(llama)


def test_a_model_that_needs_its_own_code_is_refused_by_name(llama: Path) -> None:
    edit_config(llama, model_type="grand", auto_map={"AutoModelForCausalLM": "modeling_grand.GrandForCausalLM"})
    with pytest.raises(ModelError, match=r"modeling_grand\.GrandForCausalLM.*trust_remote_code is never used"):
        load(llama)


def test_code_beside_a_known_model_is_not_run(llama: Path) -> None:
    (llama / "modeling_own.py").write_text("raise SystemExit('this ran')")
    edit_config(llama, auto_map={"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"})
    assert load(llama)[1].architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("names", [None, [], ["LlamaModel"], ["LlamaForSequenceClassification", "LlamaForCausalLM"]])
def test_a_name_that_may_be_of_a_generator_is_no_reason_to_refuse(names: list[str] | None, llama: Path) -> None:
    edit_config(llama, architectures=names)
    assert load(llama)[1].architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "martian"}, 'does not know model_type "martian"'),
        ({"model_type": None}, "config.json has no model_type: copy the model again"),
        ({"max_position_embeddings": 0}, "max_position_embeddings in config.json is 0"),
        ({"model_type": "gptj", "rotary_dim": 8}, "gptj does not use transformers' attention interface"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantized checkpoint (hqq)"),
        ({"hidden_size": "many"}, "transformers cannot"),
        ({"model_type": ["llama"]}, "config.json (unhashable type"),
        ({"model_type": "grand", "auto_map": ["a.b"]}, "needs its own code (['a.b'])"),
        ({"quantization_config": "gptq"}, "quantized checkpoint (gptq)"),
        ({"layer_types": [["full_attention"]] * 3}, "transformers cannot"),
        ({"num_key_value_heads": 3}, "cannot be run with this config.json|do not fit|is stored as"),
        ({"model_type": "llama4_text", "intermediate_size_mlp": 128}, "layers of kind chunked_attention"),
        ({"model_type": "vit"}, "vit is not a causal language model"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "bert is an encoder: use a model that generates text"),
        ({"model_type": "xlm-roberta"}, "xlm-roberta is an encoder: use a model that generates text"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification is not a causal language",
        ),
        ({"model_type": "bloom"}, "does not use transformers' attention interface"),
        ({"model_type": "rwkv"}, "RwkvForCausalLM does not use transformers' attention interface"),
    ],
)
def test_what_cannot_be_served_is_refused(llama: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(llama, **changes)
    pattern = "|".join(re.escape(part) for part in message.split("|"))
    with pytest.raises(ModelError, match=pattern):
        load(llama)


def test_a_refusal_is_one_short_printable_line_that_ends_with_the_remedy(llama: Path) -> None:
    edit_config(llama, model_type="grand", auto_map={"AutoModelForCausalLM": "a\n\x1b[31m" + "b" * 5000})
    with pytest.raises(ModelError) as caught:
        load(llama)
    message = str(caught.value)
    assert len(message) < 500 and message.isprintable()
    assert message.startswith(str(llama)) and message.endswith("use another model")


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="t5 is an encoder-decoder"):
        load(tmp_path)


def test_an_option_of_attention_that_is_not_known_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward: Any = LlamaAttention.forward

    def forward_with_bias(self: LlamaAttention, *args: Any, **options: Any) -> Any:
        return forward(self, *args, **options, position_bias=torch.zeros(1))

    monkeypatch.setattr(LlamaAttention, "forward", forward_with_bias)
    with pytest.raises(ModelError, match="attention of LlamaAttention uses position_bias, which is not supported"):
        load(llama)


def test_attention_sinks_that_are_not_one_of_each_head_are_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward: Any = LlamaAttention.forward

    def forward_with_sinks(self: LlamaAttention, *args: Any, **options: Any) -> Any:
        return forward(self, *args, **options, s_aux=torch.zeros(2))

    monkeypatch.setattr(LlamaAttention, "forward", forward_with_sinks)
    with pytest.raises(ModelError, match=r"LlamaAttention passes attention sinks of shape \[2\] for 4 heads"):
        load(llama)


ATTENTION_ONLY = {
    "model_type": "granitemoehybrid",
    "layer_types": ["attention"] * 3,
    "shared_intermediate_size": 128,
    "residual_multiplier": 0.5,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
        {"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "nope"},
        {"num_local_experts": 0, "position_embedding_type": "rope"},
    ],
    ids=["rope", "nope", "dense"],
)
def test_a_class_that_can_keep_state_is_served_with_attention_layers_only(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    make_model("llama", tmp_path, seed=3, rope_parameters=None, **ATTENTION_ONLY, **changes)
    driver = Driver(start_worker(tmp_path), seed=1)
    check_against_transformers(tmp_path, driver.run([*prompts(1), *prompts(1)[2:4]], MAX_TOKENS))
    assert driver.num_forks > 0


def test_a_window_in_masks_only_is_served_up_to_its_length(tmp_path: Path) -> None:
    """PhiMoE does not pass its window to its attention."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    make_model("llama", tmp_path, model_type="phimoe", rope_parameters=None, sliding_window=48, **experts)
    message = "layer 0 of phimoe does not pass its sliding window of 48 tokens: set max_model_len to 48 or less"
    for max_model_len in (None, 49):
        with pytest.raises(ModelError, match=message):
            load(tmp_path, max_model_len=max_model_len)
    driver = Driver(start_worker(tmp_path, max_model_len=48), seed=1)
    given = [prompt for prompt in prompts(1) if len(prompt) + MAX_TOKENS <= 48]
    check_against_transformers(tmp_path, driver.run(given, MAX_TOKENS))


def test_unknown_options_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match='unknown attention "flash"'):
        load(llama, attention="flash")
    for device in ("tpu", "cuda:x", "cuda:"):
        with pytest.raises(ConfigError, match="unknown device"):
            Rank(0, 1, 1, WorkerConfig(model=str(llama), device=device)).start(lambda _: None)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="torch sees no GPU"):
            Rank(0, 1, 1, WorkerConfig(model=str(llama), device="cuda")).start(lambda _: None)
