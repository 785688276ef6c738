"""Quantized checkpoints: each weight is what its codes and scales say, and the model runs as with these weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from millrace.worker.errors import ModelError
from millrace.worker.fusion.operations import CompiledOperations
from millrace.worker.kernels.library import find_kernels
from millrace.worker.linear.codes import CodedWeight
from millrace.worker.linear.packed import CodedLinear
from millrace.worker.loading.checksum import weights_checksum
from millrace.worker.parallel.topology import Topology
from tests.worker.driver import Driver, start_worker
from tests.worker.loading.test_load import WEIGHTS, edit_config, edit_weights, load
from tests.worker.loading.test_part import load_part
from tests.worker.models import CONFIGS, RECURRENT, make_model
from tests.worker.test_parity import MAX_TOKENS, check_close_to_transformers, prompts

GROUP = 16
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column whose code each place of a word of AWQ holds, from the lowest bits up."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])

Quantized = tuple[dict[str, Tensor], Tensor]
"""The stored tensors of a layer by the ends of their names, and the weight in float32 that they stand for."""


def words(codes: Tensor, num_bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack each row [N] of codes into words [N * bits / 32], the first code into the lowest bits."""
    per_word = 32 // num_bits
    order = order or tuple(range(per_word))
    rows = []
    for row in codes.tolist():
        groups = [row[first : first + per_word] for first in range(0, len(row), per_word)]
        packed = [sum(group[order[place]] << num_bits * place for place in range(per_word)) for group in groups]
        rows.append([each - (1 << 32) if each >> 31 else each for each in packed])
    return torch.tensor(rows, dtype=torch.int32)


def spread(scales: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Return the scale of each weight, where blocks of this many outputs and inputs share one."""
    return scales[torch.arange(shape[0])[:, None] // block[0], torch.arange(shape[1])[None] // block[1]]


def random_integers(weight: Tensor, num_bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [N, K], zero points [N, groups] and scales [N, groups] in float16, near the weight."""
    grouped = weight.unflatten(1, (-1, GROUP))
    scales = (grouped.abs().amax(2) / (1 << num_bits - 1)).half()
    zeros = torch.randint(1, 1 << num_bits, scales.shape)
    codes = (grouped / scales[..., None].float()).round().int() + zeros[..., None]
    return codes.clamp_(0, (1 << num_bits) - 1).flatten(1), zeros, scales


def of_integers(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    block = (1, GROUP)
    return (codes - spread(zeros, codes.shape, block)) * spread(scales.float(), codes.shape, block)


def fp8_blocks(weight: Tensor) -> Quantized:
    block = (48, 40)  # neither divides 64 or 128
    scales = torch.rand(-(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])) + 0.5
    codes = weight.to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread(scales, weight.shape, block)


def fp8_tensor(weight: Tensor) -> Quantized:
    codes, scale = (weight * 100).to(torch.float8_e4m3fn), torch.tensor(0.01)
    extra = {"input_scale": torch.tensor(1.0)}
    return {"weight": codes, "weight_scale": scale, **extra}, codes.float() * scale


def int8_channels(weight: Tensor) -> Quantized:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def mxfp8(weight: Tensor) -> Quantized:
    exponents = torch.randint(120, 130, (weight.shape[0], weight.shape[1] // 32), dtype=torch.uint8)
    codes = weight.to(torch.float8_e4m3fn)
    scales = spread(2.0 ** (exponents.float() - 127), weight.shape, (1, 32))
    return {"weight": codes, "weight_scale": exponents}, codes.float() * scales


def packed(num_bits: int, has_zeros: bool, is_ordered: bool) -> Callable[[Tensor], Quantized]:
    """compressed-tensors, with zero points or without, and with groups of any inputs."""

    def quantize(weight: Tensor) -> Quantized:
        codes, zeros, scales = random_integers(weight, num_bits)
        tensors = {"weight_shape": torch.tensor(weight.shape), "weight_scale": scales}
        if has_zeros and is_ordered:  # before version 0.9
            tensors["weight_zero_point"] = (zeros - (1 << num_bits - 1)).to(torch.int8)
        elif has_zeros:
            tensors["weight_zero_point"] = words(zeros.T, num_bits).T.contiguous()
        else:
            zeros = torch.full_like(zeros, 1 << num_bits - 1)
        expected = of_integers(codes, zeros, scales)
        if is_ordered:
            order = torch.randperm(weight.shape[1])
            codes, expected = codes[:, order], expected[:, order]
            tensors["weight_g_idx"] = (order // GROUP).int()
        return tensors | {"weight_packed": words(codes, num_bits)}, expected

    return quantize


def nvfp4(weight: Tensor) -> Quantized:
    codes = torch.randint(16, weight.shape)
    scales = (torch.rand(weight.shape[0], weight.shape[1] // GROUP) + 1).to(torch.float8_e4m3fn)
    over_all = torch.tensor([8.0])
    weight = E2M1[codes] * spread(scales.float(), weight.shape, (1, GROUP)) / over_all
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": over_all}, weight


def modelopt_nvfp4(weight: Tensor) -> Quantized:
    tensors, weight = nvfp4(weight)
    names = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}
    return names | {"weight_scale_2": torch.tensor(0.125)}, weight


def gptq(num_bits: int, stored_zero: int) -> Callable[[Tensor], Quantized]:
    def quantize(weight: Tensor) -> Quantized:
        codes, zeros, scales = random_integers(weight, num_bits)
        order = torch.randperm(weight.shape[1])
        tensors = {
            "qweight": words(codes[:, order], num_bits).T.contiguous(),
            "qzeros": words(zeros.T + stored_zero, num_bits),
            "scales": scales.T.contiguous(),
            "g_idx": (order // GROUP).int(),
        }
        return tensors, of_integers(codes, zeros, scales)[:, order]

    return quantize


def awq(weight: Tensor) -> Quantized:
    codes, zeros, scales = random_integers(weight, 4)
    tensors = {
        "qweight": words(codes.T, 4, AWQ_COLUMNS),
        "qzeros": words(zeros.T, 4, AWQ_COLUMNS),
        "scales": scales.T.contiguous(),
    }
    return tensors, of_integers(codes, zeros, scales)


def bitsandbytes(weight: Tensor) -> Quantized:
    """As with double quantization: the scales of blocks are codes too."""
    table, scales_table = torch.rand(16) - 0.5, torch.rand(256)
    codes, scales = torch.randint(16, (weight.numel(),)), torch.randint(256, (weight.numel() // 64,))
    scales_of_scales = torch.rand(-(-len(scales) // 50))
    state = {"shape": list(weight.shape), "blocksize": 64, "nested_blocksize": 50, "nested_offset": 0.25}
    tensors = {
        "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": scales.to(torch.uint8),
        "weight.quant_map": table,
        "weight.nested_absmax": scales_of_scales,
        "weight.nested_quant_map": scales_table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    numbers = scales_table[scales] * scales_of_scales[torch.arange(len(scales)) // 50] + 0.25
    return tensors, (table[codes] * numbers[torch.arange(len(codes)) // 64]).view(weight.shape)


def bitsandbytes_int8(weight: Tensor) -> Quantized:
    largest = weight.float().abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes * largest[:, None] / 127


COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
BLOCKS = {"group_0": {"weights": {"strategy": "block", "block_structure": [48, 40]}}}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Quantized]]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [48, 40]}, fp8_blocks),
    "fp8 of a tensor": ({"quant_method": "fp8", "weight_block_size": None}, fp8_tensor),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, int8_channels),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt_nvfp4),
    "compressed fp8": (COMPRESSED | {"format": "float-quantized"}, fp8_tensor),
    "compressed blocks": (COMPRESSED | {"format": "float-quantized", "config_groups": BLOCKS}, fp8_blocks),
    "compressed int8": (COMPRESSED | {"format": "int-quantized"}, int8_channels),
    "compressed mxfp8": (COMPRESSED | {"format": "mxfp8-quantized"}, mxfp8),
    "compressed nvfp4": (COMPRESSED | {"format": "nvfp4-pack-quantized"}, nvfp4),
    "packed 4": (COMPRESSED | {"format": "pack-quantized"}, packed(4, has_zeros=False, is_ordered=False)),
    "packed 8, zeros": (COMPRESSED | {"format": "pack-quantized"}, packed(8, has_zeros=True, is_ordered=False)),
    "packed 4, zeros, order": (COMPRESSED | {"format": "pack-quantized"}, packed(4, has_zeros=True, is_ordered=True)),
    "gptq 4": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq(4, -1)),
    "gptq 8": ({"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"}, gptq(8, 0)),
    "auto-round": ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, gptq(2, -1)),
    "auto-round, no offset": ({"quant_method": "auto-round", "packing_format": "auto_round"}, gptq(4, 0)),
    "auto-round awq": ({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4}, awq),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_int8),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
}


def quantize_model(path: Path, name: str, to: Path, dtype: str = "bfloat16") -> None:
    """Quantize the layers of a model in place, and save the model with the weights that they stand for, rounded to this
    dtype, in another place."""
    settings, quantize = FORMATS[name]
    torch.manual_seed(0)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for key, tensor in load_file(path / WEIGHTS).items():
        plain[key] = stored[key] = tensor
        if re.search(r"(_proj|experts\.\d+\.w\d)\.weight$", key):
            parts, weight = quantize(tensor)
            del stored[key]
            stored |= {key.removesuffix("weight") + part: each.contiguous() for part, each in parts.items()}
            plain[key] = weight.to(getattr(torch, dtype))
    to.mkdir()
    (to / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(plain, to / WEIGHTS, metadata={"format": "pt"})
    save_file(stored, path / WEIGHTS, metadata={"format": "pt"})
    edit_config(path, quantization_config=settings)


def make_bfloat16(arch: str, path: Path, **overrides: Any) -> None:
    make_model(arch, path, **overrides)
    edit_weights(path, lambda tensors: tensors.update({name: each.bfloat16() for name, each in tensors.items()}))
    edit_config(path, dtype="bfloat16")


def check_same(model: nn.Module, expected: nn.Module) -> None:
    """All parameters are equal, but for products in another order: in float32, and a few that were rounded to bfloat16."""
    for name, parameter in model.named_parameters():
        other = expected.get_parameter(name)
        if other.dtype == torch.float32:  # what is stored as bfloat16 may stay so
            assert torch.allclose(parameter.float(), other, rtol=2**-20, atol=0), name
            continue
        assert parameter.dtype == other.dtype, name
        assert torch.allclose(parameter, other, rtol=2**-7, atol=0), name
        assert (parameter != other).float().mean() < 0.01, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_what_its_codes_and_scales_say(name: str, dtype: str, tmp_path: Path) -> None:
    path, plain = tmp_path / "model", tmp_path / "plain"
    make_bfloat16("llama", path)
    quantize_model(path, name, plain, dtype)
    check_same(load(path, dtype=dtype)[0], load(plain, dtype=dtype)[0])


@pytest.mark.parametrize("name", ["fp8", "packed 8, zeros"])
def test_a_model_generates_what_transformers_does_with_these_weights(name: str, tmp_path: Path) -> None:
    make_bfloat16("qwen3", tmp_path / "model")
    quantize_model(tmp_path / "model", name, tmp_path / "plain", "float32")
    requests = Driver(start_worker(tmp_path / "model", dtype="float32"), seed=1).run(prompts(1), MAX_TOKENS)
    check_close_to_transformers(tmp_path / "plain", requests, torch.float32, 0.002)


@pytest.mark.skipif(find_kernels() is None, reason="there are no compiled kernels")
@pytest.mark.parametrize("arch", ["llama", "phi3", "olmo2", "qwen3_5", "mixtral"])
@pytest.mark.parametrize("name", ["fp8", "gptq 4", "packed 8, zeros"])
def test_codes_stay_in_memory(name: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do in fused forward passes and in modules. Gates of attention, recurrent layers and experts divide and merge
    weights."""
    monkeypatch.setattr(f"{__name__}.GROUP", 32 if name.startswith("packed") else 64)
    base, overrides = "llama", dict[str, Any](model_type=arch, rope_parameters=None, num_local_experts=4)
    if arch in CONFIGS | RECURRENT:
        base, overrides = arch, {}
    make_bfloat16(base, tmp_path / "model", **overrides)
    quantize_model(tmp_path / "model", name, tmp_path / "plain")
    worker = start_worker(tmp_path / "model")
    plain = start_worker(tmp_path / "plain")
    assert worker._model.facts.weight_bytes < 0.9 * plain._model.facts.weight_bytes
    if arch != "olmo2":
        assert worker._model.decoder is not None
        operations = worker._model.decoder.operations
        assert isinstance(operations, CompiledOperations)
        num_coded = sum(isinstance(each, CodedLinear) for each in operations._layers)
        is_merged = arch == "mixtral" and name != "gptq 4"  # whose inputs have another order in each weight
        assert num_coded >= (30 if is_merged else 3)
    assert not any(isinstance(each, CodedWeight) for each in worker._model.module.parameters())
    requests = Driver(worker, seed=1).run(prompts(1), MAX_TOKENS)
    check_close_to_transformers(tmp_path / "plain", requests, torch.bfloat16, 0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", ["fp8", "gptq 4", "compressed int8"])
def test_codes_stay_in_the_memory_of_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from millrace.worker.linear.codes_triton import CodedTritonLinear

    monkeypatch.setattr(f"{__name__}.GROUP", 64)
    monkeypatch.setattr("millrace.worker.loading.dtype.LARGEST_SHARE", 0.0)
    make_bfloat16("llama", tmp_path / "model")
    quantize_model(tmp_path / "model", name, tmp_path / "plain")
    worker = start_worker(tmp_path / "model", device="cuda")
    assert worker._model.decoder is not None
    assert isinstance(worker._model.decoder.layers[0].output, CodedTritonLinear)
    check_close_to_transformers(
        tmp_path / "plain", Driver(worker, seed=1).run(prompts(1), MAX_TOKENS), torch.bfloat16, 0.1
    )
    worker.sleep(1)
    worker.wake_up(["weights", "kv_cache"], 2)
    check_close_to_transformers(
        tmp_path / "plain", Driver(worker, seed=2).run(prompts(2), MAX_TOKENS), torch.bfloat16, 0.1
    )


@pytest.mark.parametrize("name", ["fp8", "packed 4", "compressed nvfp4"])
def test_experts_are_merged_by_transformers(name: str, tmp_path: Path) -> None:
    path, plain = tmp_path / "model", tmp_path / "plain"
    make_bfloat16("mistral", path, model_type="mixtral", num_local_experts=4, sliding_window=None)
    assert any("experts.0" in key for key in load_file(path / WEIGHTS))
    quantize_model(path, name, plain)
    check_same(load(path)[0], load(plain)[0])


def mxfp4_experts(shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks [E, N, K / 32, 16] and exponents [E, N, K / 32] of random codes, and the weight [E, K, N] in float32."""
    num_experts, num_inputs, num_outputs = shape
    codes = torch.randint(16, (num_experts, num_outputs, num_inputs))
    exponents = torch.randint(118, 126, (num_experts, num_outputs, num_inputs // 32), dtype=torch.uint8)
    weight = E2M1[codes] * (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 2)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8).unflatten(2, (-1, 16))
    return blocks, exponents, weight.transpose(1, 2).contiguous()


def make_mxfp4(path: Path, plain: Path) -> None:
    """Save gpt-oss with experts in MXFP4, and in another place with the weights that they stand for."""
    make_bfloat16("gpt_oss", plain)
    stored = load_file(plain / WEIGHTS)
    weights: dict[str, Tensor] = {}
    torch.manual_seed(0)
    for key in [key for key in stored if key.endswith((".gate_up_proj", ".down_proj"))]:
        blocks, exponents, weight = mxfp4_experts(stored.pop(key).shape)
        stored |= {f"{key}_blocks": blocks.contiguous(), f"{key}_scales": exponents}
        weights[key] = weight.bfloat16()
    path.mkdir()
    (path / "config.json").write_bytes((plain / "config.json").read_bytes())
    save_file(stored, path / WEIGHTS, metadata={"format": "pt"})
    edit_weights(plain, lambda tensors: tensors.update(weights))
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    edit_config(path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": kept})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_stacked_experts_are_what_their_blocks_say(dtype: str, tmp_path: Path) -> None:
    make_mxfp4(tmp_path / "model", tmp_path / "plain")
    ours, expected = (load(tmp_path / name, dtype=dtype)[0] for name in ("model", "plain"))
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name
    for layer, kind in ((0, "gate_up_proj"), (2, "down_proj")):
        stored = load_file(tmp_path / "model" / WEIGHTS)
        name = f"model.layers.{layer}.mlp.experts.{kind}"
        theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(ours.get_parameter(name).bfloat16(), theirs)


def test_gpt_oss_in_mxfp4_generates_what_transformers_does_with_these_weights(tmp_path: Path) -> None:
    make_mxfp4(tmp_path / "model", tmp_path / "plain")
    requests = Driver(start_worker(tmp_path / "model", dtype="float32"), seed=1).run(prompts(1), MAX_TOKENS)
    check_close_to_transformers(tmp_path / "plain", requests, torch.float32, 0.002)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "unexpected model.layers.1.mlp.experts.down_proj_blocks"),
        (torch.full((3, 64, 4), 120, dtype=torch.uint8), "no weight can be computed from .*1.mlp.experts.down_proj_"),
        (torch.full((4, 64, 3), 120, dtype=torch.uint8), "no weight can be computed from .*1.mlp.experts.down_proj_"),
    ],
)
def test_damaged_blocks_of_experts_are_named(value: Tensor | None, message: str, tmp_path: Path) -> None:
    path, key = tmp_path / "model", "model.layers.1.mlp.experts.down_proj_scales"
    make_mxfp4(path, tmp_path / "plain")
    edit_weights(path, lambda tensors: tensors.pop(key) if value is None else tensors.update({key: value}))
    with pytest.raises(ModelError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "hqq"}, "is a quantized checkpoint (hqq), which is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "quantization_config in config.json is damaged"),
        ({"quant_method": "auto-round", "packing_format": "mlx"}, "(auto-round) in the format mlx, which is not"),
        ("gptq", "is a quantized checkpoint (gptq), which is not supported"),
        (COMPRESSED | {"format": "marlin-24"}, "(compressed-tensors) in the format marlin-24, which is not supported"),
        (
            COMPRESSED | {"format": "pack-quantized", "transform_config": {"R3": {}}},
            "(compressed-tensors) with transforms, which is not",
        ),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "(compressed-tensors) in a sparse format"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "(gptq) in the format marlin, which is not"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "with 4 bits, in the version gemv"),
    ],
)
def test_other_formats_are_refused(settings: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    make_bfloat16("llama", path)
    quantize_model(path, "fp8", tmp_path / "plain")
    edit_config(path, quantization_config=settings)
    with pytest.raises(ModelError, match=re.escape(message)):
        load(path)


@pytest.mark.parametrize(
    ("name", "part", "value", "message"),
    [
        ("gptq 4", "qzeros", torch.zeros(4, 6, dtype=torch.int32), "codes of 3 bits are not supported"),
        ("gptq 4", "qzeros", None, "no weight can be computed from .*q_proj.qweight"),
        ("awq", "scales", None, "unexpected .*q_proj.qweight"),
        ("packed 4", "weight_shape", torch.tensor([64, 640]), "no weight can be computed from .*q_proj.weight_packed"),
        ("fp8", "weight_scale_inv", torch.ones(60, 2), "60 scales do not divide 64 weights"),
        ("fp8", "weight_scale_inv", None, "is stored as F8_E4M3: use a checkpoint in 16 or 32 bits"),
        ("packed 4", "weight_scale", None, "unexpected .*q_proj.weight_packed"),
    ],
)
def test_a_damaged_checkpoint_is_named(
    name: str, part: str, value: Tensor | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    make_bfloat16("llama", path)
    quantize_model(path, name, tmp_path / "plain")
    tensors = load_file(path / WEIGHTS)
    key = f"model.layers.1.self_attn.q_proj.{part}"
    tensors = {k: v for k, v in tensors.items() if k != key} | ({} if value is None else {key: value})
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load(path)


def test_biases_of_zeros_that_autogptq_adds_are_left_out_and_others_are_not(tmp_path: Path) -> None:
    path, plain = tmp_path / "model", tmp_path / "plain"
    make_bfloat16("llama", path)
    quantize_model(path, "gptq 4", plain)
    bias = "model.layers.1.mlp.down_proj.bias"
    edit_weights(path, lambda tensors: tensors.update({bias: torch.zeros(64).half()}))
    check_same(load(path)[0], load(plain)[0])
    edit_weights(path, lambda tensors: tensors[bias].fill_(1))
    with pytest.raises(ModelError, match=f"unexpected {bias}"):
        load(path)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("modelopt fp8", None),
        ("bitsandbytes", {"load_in_4bit": True}),
        ("compressed blocks", COMPRESSED | {"config_groups": {"group_0": {"weights": {"block_structure": "48x40"}}}}),
    ],
)
def test_settings_as_older_versions_write_them(name: str, settings: dict[str, Any] | None, tmp_path: Path) -> None:
    path, plain = tmp_path / "model", tmp_path / "plain"
    make_bfloat16("llama", path)
    quantize_model(path, name, plain)
    edit_config(path, quantization_config=settings)
    if settings is None:
        (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    check_same(load(path)[0], load(plain)[0])


@pytest.mark.parametrize("name", ["packed 8, zeros", "fp8", "awq", "gptq 4"])
def test_a_tensor_parallel_rank_reads_its_part(name: str, tmp_path: Path) -> None:
    path, plain = tmp_path / "model", tmp_path / "plain"
    make_bfloat16("llama", path)
    quantize_model(path, name, plain)
    for rank in range(2):
        ours, coded, expected = (
            load_part(each, Topology(rank, 2, 1), dtype)[0]
            for each, dtype in ((path, None), (path, torch.float32), (plain, None))
        )
        for key, parameter in ours.named_parameters():  # in float32, unlike the rounded ones
            assert torch.allclose(parameter, expected.get_parameter(key), rtol=2**-7, atol=0), key
            assert torch.equal(coded.get_parameter(key).float(), parameter), key
        weights = [each.coded for each in coded.parameters() if isinstance(each, CodedWeight)]
        assert len(weights) == 21
        assert all(each.codes.untyped_storage().nbytes() == each.codes.nbytes for each in weights)
        assert weights_checksum(coded) != weights_checksum(ours)
