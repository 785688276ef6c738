"""Writes a model as a GGUF file for llama.cpp. Runs in llama.cpp's environment: MODEL FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write(model: Path, target: Path) -> None:
    """Convert a Llama or Qwen3 checkpoint of one file, in its own dtype. Its token ids get names that mean nothing."""
    config = json.loads((model / "config.json").read_text())
    arch = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[config["model_type"]]
    writer = gguf.GGUFWriter(target, config["model_type"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{number}>" for number in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["< 0"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in _tensors(model / "model.safetensors").items():
        if name == "lm_head.weight":  # the same as the embeddings
            continue
        projection = name.split(".")[-2]
        if config["model_type"] == "llama" and projection in heads:
            # llama.cpp rotates adjacent pairs of a head's rows, the checkpoint its two halves.
            rows, columns = tensor.shape
            halves = tensor.reshape(heads[projection], 2, rows // heads[projection] // 2, columns)
            tensor = halves.swapaxes(1, 2).reshape(rows, columns)
        kind = None
        if tensor.dtype == np.uint16 and tensor.ndim == 1:  # llama.cpp wants norms in float32
            tensor = (tensor.astype(np.uint32) << 16).view(np.float32)
        elif tensor.dtype == np.uint16:
            tensor, kind = np.ascontiguousarray(tensor).view(np.uint8), gguf.GGMLQuantizationType.BF16
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(tensor), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file, those of bfloat16 as uint16."""
    size = int.from_bytes(path.open("rb").read(8), "little")
    data: Any = np.memmap(path, np.uint8, "r")
    header = json.loads(bytes(data[8 : 8 + size]))
    header.pop("__metadata__", None)
    dtypes = {"F32": np.dtype("float32"), "BF16": np.dtype("uint16")}
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        tensors[name] = data[begin:end].view(dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
