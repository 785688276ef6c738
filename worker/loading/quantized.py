"""Reads quantized checkpoints: finds the tensors that hold a quantized weight, and computes the weight from them.

The weights are computed in float32 and rounded to the model's dtype, while it is loaded or whenever they are used, so the
model runs as its 16-bit checkpoint would. Every format stores codes of a weight with scales, of one output, of a group of
inputs, or of a block:

    weight [outputs, inputs] = (code - zero point) * scale

Sources: the code of compressed-tensors 0.20, AutoAWQ 0.2.9, AutoGPTQ 0.7, auto-round 0.16, bitsandbytes 0.50, and
transformers 5 (fp8, and MXFP4 of gpt-oss).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millrace.worker.errors import ModelError, unsupported
from millrace.worker.linear.codes import Codes, pack_halves
from millrace.worker.loading.tensor_files import DerivedTensor, Source, StoredTensor, WeightFiles

QUANTIZATION_KEYS = frozenset({"quantization_config", "compression_config"})
"""What config.json may call its settings."""
METHODS = frozenset(
    {"auto-round", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp4"}
)
"""Values of `quant_method`."""
_AUTO_GPTQ, _AUTO_AWQ = ("auto_round:auto_gptq", "auto_round:gptq"), ("auto_round:auto_awq", "auto_round:awq")
_FORMATS = {
    "auto-round": ("auto_round", "auto_round:gptqmodel", *_AUTO_GPTQ, *_AUTO_AWQ),
    "gptq": ("gptq", "gptq_v2"),
    "compressed-tensors": (
        "dense",
        "float-quantized",
        "int-quantized",
        "mixed-precision",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "pack-quantized",
    ),
}
"""The formats of methods that have several."""
_SCALES = ("weight_scale_inv", "weight_scale")
"""Names of the scales of codes of one byte. The first is the inverse of the number that the weights were multiplied by, so
codes are multiplied by either."""
_UNUSED = (
    *(".input_scale", ".input_global_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale"),
    *(".kv_scale", ".input_zero_point", ".output_zero_point", ".k_zero_point", ".v_zero_point", ".q_zero_point"),
    *(".output_global_scale", ".k_global_scale", ".v_global_scale", ".q_global_scale", ".weight_format"),
)
"""Ends of the names of tensors that belong to quantized activations or keys and values, or to a format."""
_STATE = "weight.quant_state.bitsandbytes__"
_OTHER_PARTS = {
    "weight": (
        *(*_SCALES, "weight_scale_2", "weight_zero_point", "SCB"),
        *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *(f"{_STATE}nf4", f"{_STATE}fp4"),
    ),
    "weight_packed": ("weight_scale", "weight_global_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    "qweight": ("scales", "qzeros", "g_idx"),
    **{f"{name}_blocks": (f"{name}_scales",) for name in ("gate_up_proj", "down_proj")},
}
"""What a layer may store besides its codes, by the name of these."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of 4 bits that NVFP4 and MXFP4 have, by code."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word of AWQ holds each of its 8 codes."""

Parts = dict[str, Tensor]


def quantization_settings(directory: Path) -> dict[str, Any] | None:
    """Return what config.json says of quantized weights, if anything. Raises `ModelError` for what cannot be read."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
        parts = (config, config.get("text_config") or {})
        settings = next((part[name] for part in parts for name in QUANTIZATION_KEYS if part.get(name)), None)
    except (OSError, ValueError, AttributeError, RecursionError):  # weights to load again may have no config.json
        return None
    if not settings and (directory / "hf_quant_config.json").exists():  # older checkpoints of modelopt
        settings = {"quant_method": "modelopt"}
    if not settings:
        return None
    if isinstance(settings, dict) and "quant_method" not in settings:  # bitsandbytes did not write it at first
        is_of_bitsandbytes = settings.get("load_in_4bit") or settings.get("load_in_8bit")
        settings = settings | {"quant_method": "bitsandbytes" if is_of_bitsandbytes else "unknown"}
    method = settings["quant_method"] if isinstance(settings, dict) else settings
    what = f"{directory} is a quantized checkpoint ({method})"
    if not isinstance(settings, dict) or method not in METHODS:
        raise unsupported(what)
    if settings.get("transform_config") or settings.get("rotation_config"):
        raise unsupported(f"{what} with transforms")
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise unsupported(f"{what} in a sparse format")
    form = settings.get({"auto-round": "packing_format", "gptq": "checkpoint_format"}.get(method, "format"))
    if form is not None and form not in _FORMATS.get(method, (form,)):
        raise unsupported(f"{what} in the format {form}")
    if method == "awq" and (settings.get("bits"), str(settings.get("version", "gemm")).lower()) != (4, "gemm"):
        raise unsupported(f"{what} with {settings.get('bits')} bits, in the version {settings.get('version')}")
    return settings


def find_quantized(stored: dict[str, StoredTensor], settings: dict[str, Any], dtype: str) -> dict[str, Source]:
    """Return the tensors of a checkpoint as the model knows them: quantized weights take the place of their parts.

    `settings`: `quantization_config`. `dtype`: that of the weights, as safetensors names it. Raises `ModelError`."""
    found: dict[str, Source] = {name: tensor for name, tensor in stored.items() if not name.endswith(_UNUSED)}
    for name, tensor in stored.items():
        layer, dot, leaf = name.rpartition(".")
        names = [each for each in (leaf, *_OTHER_PARTS.get(leaf, ())) if layer + dot + each in stored]
        parts = {each: stored[layer + dot + each] for each in names}
        if compute := _computation(leaf, tensor, parts, settings):
            for part in parts:
                found.pop(layer + dot + part, None)
            weight = leaf.removesuffix("_blocks") if leaf.endswith("_blocks") else "weight"
            found[layer + dot + weight] = DerivedTensor(parts, compute, dtype)
    return found


def without_idle_biases(weights: dict[str, Source], prefix: str, expected: frozenset[str]) -> dict[str, Source]:
    """Leave out the zeros that AutoGPTQ stores as the bias of each layer that has none. `expected`: the names of the model's
    tensors, from which a checkpoint may leave out `prefix`."""
    files, host = WeightFiles(), torch.device("cpu")

    def is_idle(name: str, tensor: Source) -> bool:
        layer, _, leaf = name.rpartition(".")
        is_of_quantized = leaf == "bias" and isinstance(weights.get(f"{layer}.weight"), DerivedTensor)
        return is_of_quantized and not {name, prefix + name} & expected and not files.read(tensor, host).any()

    return {name: tensor for name, tensor in weights.items() if not is_idle(name, tensor)}


def _computation(
    leaf: str, codes: StoredTensor, parts: dict[str, StoredTensor], settings: dict[str, Any]
) -> Callable[[Parts], Tensor | Codes] | None:
    """Return what computes a weight from its parts, or what makes codes of one kind of them, if the tensor `leaf` of a layer
    holds its codes."""
    if leaf == "qweight" and "scales" in parts:
        is_awq = settings["quant_method"] == "awq" or settings.get("packing_format") in _AUTO_AWQ
        return partial(_awq if is_awq else _gptq, settings)
    if leaf == "weight_packed" and "weight_scale" in parts:
        return _four_bit_floats if codes.dtype == "U8" else _packed_integers
    if leaf.endswith("_blocks") and len(parts) > 1:
        return _expert_blocks
    if leaf == "weight" and codes.dtype == "U8" and "weight_scale_2" in parts:
        return _four_bit_floats
    if leaf == "weight" and "weight.quant_map" in parts:
        return _entries_of_table
    if leaf == "weight" and codes.dtype in ("F8_E4M3", "F8_E5M2", "I8") and len(parts) > 1:
        return partial(_bytes, _block_size(settings))
    return None


def _block_size(settings: dict[str, Any]) -> tuple[int, int] | None:
    """Return the outputs and inputs that share a scale, where the settings name them. The last block may be smaller."""
    block = settings.get("weight_block_size")
    try:
        for group in (settings.get("config_groups") or {}).values():
            block = block or (group.get("weights") or {}).get("block_structure")
        num_outputs, num_inputs = map(int, block.split("x") if isinstance(block, str) else block or (0, 0))
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"quantization_config in config.json is damaged ({error}): copy the model again") from error
    return (num_outputs, num_inputs) if num_outputs > 0 and num_inputs > 0 else None


def _bytes(block: tuple[int, int] | None, parts: Parts) -> Codes:
    """Codes of one byte: float8 or int8."""
    if "SCB" in parts:  # of bitsandbytes: the largest weight of each output
        return _by_block(parts["weight"], None, parts["SCB"].float() / 127)
    scales = parts[next(name for name in _SCALES if name in parts)]
    return _by_block(parts["weight"], parts.get("weight_zero_point"), _numbers(scales), block)


def _four_bit_floats(parts: Parts) -> Codes:
    """NVFP4 and MXFP4: two codes in a byte, the lower half first, a scale for each group of inputs and one for all."""
    packed = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
    scales = _numbers(parts["weight_scale"])
    if "weight_global_scale" in parts:  # of compressed-tensors
        scales = scales / parts["weight_global_scale"].float()
    elif "weight_scale_2" in parts:
        scales = scales * parts["weight_scale_2"].float()
    return _by_block(packed.view(torch.uint8), None, scales, table=_E2M1)


def _expert_blocks(parts: Parts) -> Tensor:  # [E, K, N]
    """MXFP4 of gpt-oss: stacked experts in blocks [E, N, groups, bytes] with exponents [E, N, groups]. The model has its
    inputs before its outputs."""
    blocks, exponents = (next(parts[name] for name in parts if name.endswith(end)) for end in ("_blocks", "_scales"))
    numbers = torch.tensor(_E2M1, dtype=torch.float32, device=blocks.device)
    num_experts, num_outputs, num_groups, num_bytes = blocks.shape
    shape = (num_experts, num_outputs, num_groups, 2 * num_bytes)
    weights = torch.empty(shape, dtype=torch.float32, device=blocks.device)
    # One expert at a time: the indices take as much memory as the weights.
    for weight, packed, scales in zip(weights, blocks, exponents, strict=True):
        torch.mul(numbers[_split(packed, 4).int()], _numbers(scales)[..., None], out=weight)
    return weights.flatten(2).transpose(1, 2)


def _entries_of_table(parts: Parts) -> Tensor | Codes:
    """bitsandbytes: codes of a table in half bytes, the upper half first, and a scale for so many weights in their order,
    which may be codes of another table."""
    name = next(name for name in parts if name.startswith(_STATE))
    state = json.loads(bytes(parts[name].tolist()))
    scales = parts["weight.absmax"].float()
    if "weight.nested_absmax" in parts:
        scales = parts["weight.nested_quant_map"].float()[parts["weight.absmax"].int()]
        scales = scales * _spread(parts["weight.nested_absmax"].float(), state["nested_blocksize"], len(scales))
        scales += state["nested_offset"]
    num_outputs, num_inputs = state["shape"]
    packed, size = parts["weight"].flatten().view(torch.uint8), state["blocksize"]
    table = parts["weight.quant_map"].float()
    if num_inputs % size == 0:
        codes = (packed << 4 | packed >> 4).view(num_outputs, num_inputs // 2)
        return _by_block(codes, None, scales.view(num_outputs, -1), table=table.tolist())
    weight = table[_split(packed, 4).view(-1, 2).flip(1).flatten()[: num_outputs * num_inputs].int()]
    return (weight * _spread(scales, size, len(weight))).view(num_outputs, num_inputs)


def _spread(scales: Tensor, size: int, num_values: int) -> Tensor:
    return scales.repeat_interleave(size)[:num_values]


def _packed_integers(parts: Parts) -> Codes:
    """compressed-tensors: codes in words along the inputs; zero points in words along the outputs."""
    num_outputs, num_inputs = parts["weight_shape"].tolist()
    packed, scales = parts["weight_packed"], parts["weight_scale"].float()
    num_bits = 32 * packed.shape[1] // num_inputs
    zeros = None
    if "weight_zero_point" in parts and parts["weight_zero_point"].dtype != torch.int32:  # before version 0.9
        zeros = parts["weight_zero_point"].float() + (1 << num_bits - 1)
    elif "weight_zero_point" in parts:
        zeros = _unpack(parts["weight_zero_point"].T, num_bits).T[:num_outputs].float()
    codes = _bytes_of_words(packed, num_bits)
    return _by_group(codes, num_inputs, num_bits, zeros, scales, parts.get("weight_g_idx"))


def _gptq(settings: dict[str, Any], parts: Parts) -> Codes:
    """GPTQ: codes in words along the inputs, in the first dimension; zero points in words along the outputs."""
    scales = parts["scales"].float()
    num_bits = 32 * parts["qzeros"].shape[1] // scales.shape[1]
    zeros = _unpack(parts["qzeros"], num_bits).float()
    form = settings.get("checkpoint_format") or settings.get("packing_format") or "gptq"
    if form in ("gptq", *_AUTO_GPTQ):  # the first version subtracts 1 from what it stores
        zeros += 1
    codes = _bytes_of_words(parts["qweight"].T, num_bits)
    num_inputs = parts["qweight"].shape[0] * 32 // num_bits
    return _by_group(codes, num_inputs, num_bits, zeros.T, scales.T, parts.get("g_idx"))


def _awq(settings: dict[str, Any], parts: Parts) -> Codes:
    """AWQ: codes and zero points in words along the outputs, in an order of their own."""
    codes, zeros = (
        _unpack(parts[name], settings["bits"]).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1).T
        for name in ("qweight", "qzeros")
    )
    scales = parts["scales"].float().T
    return _by_group(pack_halves(codes), codes.shape[1], settings["bits"], zeros.float(), scales, None)


def _bytes_of_words(words: Tensor, num_bits: int) -> Tensor:  # [N, bytes] uint8, from [N, words] int32
    """Return codes of 8 bits, or two of fewer bits in each byte, of which a word holds the first in its lowest bits."""
    if num_bits in (4, 8):
        return words.contiguous().view(torch.uint8)  # the lowest byte first, as on all supported machines
    return pack_halves(_unpack(words, num_bits))


def _by_group(
    codes: Tensor, num_inputs: int, num_bits: int, zeros: Tensor | None, scales: Tensor, groups: Tensor | None
) -> Codes:
    """Return codes [N, bytes] of integers. `zeros`: None means that of signed integers. `groups`: that of each input, or
    `None` where each has its neighbours."""
    middle = 1 << num_bits - 1
    if num_bits == 8:
        codes = (codes[:, :num_inputs] ^ 128).view(torch.int8)
        made = _by_block(codes, None if zeros is None else zeros - middle, scales)
    else:
        table = [float(code - (middle if zeros is None else 0)) for code in range(16)]
        made = _by_block(codes[:, : (num_inputs + 1) // 2], zeros, scales, table=table, num_inputs=num_inputs)
    if groups is None or made.scales.shape[1] == 1 or (groups < 0).any():
        return made
    if (groups >= made.scales.shape[1]).any() or len(groups) != num_inputs:
        raise ValueError(f"an input is of group {int(groups.max())} of {made.scales.shape[1]}")
    return made._replace(groups=groups.int())


def _unpack(words: Tensor, num_bits: int) -> Tensor:  # [N, words * 32 / bits] uint8, from [N, words] int32
    """Return the codes of each row, of which a word holds the first in its lowest bits."""
    if num_bits not in (2, 4, 8):
        raise ValueError(f"codes of {num_bits} bits are not supported")
    return _split(words.contiguous().view(torch.uint8), num_bits)


def _split(packed: Tensor, num_bits: int) -> Tensor:  # [N, bytes * 8 / bits] uint8, from [N, bytes]
    mask = (1 << num_bits) - 1
    return torch.stack([packed >> shift & mask for shift in range(0, 8, num_bits)], dim=-1).flatten(-2)


def _numbers(scale: Tensor) -> Tensor:
    """Return scales in float32. Whole bytes are exponents of two, as in E8M0."""
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def _by_block(
    codes: Tensor,
    zeros: Tensor | None,
    scales: Tensor,
    block: tuple[int, int] | None = None,
    *,
    table: Sequence[float] | None = None,
    num_inputs: int | None = None,
) -> Codes:
    """Return codes [N, K], or [N, K / 2] of a table. `zeros` and `scales`: one, one for each output, or a matrix of them,
    for blocks of the same size, which is `block` if the last ones are smaller."""
    if table is not None and len(table) != 16:
        raise ValueError(f"a table of {len(table)} numbers for codes of 4 bits")
    shape = len(codes), num_inputs or codes.shape[1] * (1 if table is None else 2)
    numbers = None if table is None else torch.tensor(table, dtype=torch.float32, device=codes.device)
    by_output, size = _by_output(scales, shape, block)
    if zeros is not None:
        zeros = _by_output(zeros.float(), shape, block)[0].expand_as(by_output)
    groups = torch.arange(shape[1], dtype=torch.int32, device=codes.device).div_(size, rounding_mode="floor")
    return Codes(codes.contiguous(), numbers, by_output, zeros, groups)


def _by_output(values: Tensor, shape: tuple[int, int], block: tuple[int, int] | None) -> tuple[Tensor, int]:
    """Return the values of each output [N, G], and the inputs of a group."""
    matrix = values.reshape(1, 1) if values.numel() == 1 else values.reshape(len(values), -1)
    lengths = [
        min(size, length) if math.ceil(size / length) == count else size // count
        for size, count, length in zip(shape, matrix.shape, block or shape, strict=True)
    ]
    for size, count, length in zip(shape, matrix.shape, lengths, strict=True):
        if length == 0 or math.ceil(size / length) != count:
            raise ValueError(f"{count} scales do not divide {size} weights")
    return matrix.repeat_interleave(lengths[0], 0)[: shape[0]], lengths[1]
