"""The models of the benchmarks: random weights, made once and kept in a folder outside of the project.

    llama-15m           Llama, 6 layers of 288, 6 heads of 64, 32,000 token ids, float32
    qwen3-0.6b-random   the shape of Qwen3-0.6B, bfloat16
    qwen3-14b-random    the shape of Qwen3-14B, bfloat16, all layers with the same weights
    qwen3.5-0.8b-random the shape of Qwen3.5-0.8B, bfloat16
    qwen3-0.6b-gptq-random qwen3-0.6b-random with weights in 4 bits, rounded to nearest, as GPTQ stores them

Matrices have the standard deviation 1 / sqrt(inputs), so that every layer changes the hidden state and the greedy tokens
depend on attention and positions.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.workloads import HYBRID, LLAMA, QWEN, QWEN_14B, QWEN_GPTQ, TINY_MODEL

HOME = Path(os.environ.get("MILLRACE_BENCH_HOME", "~/.cache/millrace-peers")).expanduser()
"""Models, logs, and the environments of other engines."""
NUM_TOKEN_IDS = 32_000
"""Of the tokenizer. A model may have more; their embeddings are small, so that they are hardly ever generated."""
TEXT_BYTES = 24_000_000
"""Text that the tokenizer is trained on."""
GPTQ_GROUP = 128
SEEDS = {LLAMA: 15, QWEN: 600, QWEN_14B: 14, HYBRID: 800}


def path_of(name: str) -> Path:
    """Return the directory of a model, which may not have been made yet."""
    return ROOT / "examples" / "tiny_model" if name == TINY_MODEL else HOME / "models" / name


def find(name: str) -> Path:
    """Return the directory of a model. Makes it first if it is missing, which takes up to a minute."""
    path = path_of(name)
    if not (path / "config.json").exists():
        print(f"making {name} in {path}", flush=True)
        unfinished = path.with_name(f"{name}.{os.getpid()}")
        _save(name, unfinished)
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)
    return path


def read_config(name: str) -> dict[str, Any]:
    """Return the configuration of a model that has been made."""
    config: dict[str, Any] = json.loads((path_of(name) / "config.json").read_text())
    return config


def _save(name: str, path: Path) -> None:
    if name == QWEN_GPTQ:
        save_gptq(find(QWEN), path)
        return
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    tokenizer = _tokenizer(path.parent)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    common: dict[str, Any] = {"max_position_embeddings": 4096, "tie_word_embeddings": name != QWEN_14B, **ends}
    rope: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    model: Any
    with torch.device("meta"):  # or transformers would draw weights too
        if name == LLAMA:
            common |= {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6}
            common |= {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64}
            model = LlamaForCausalLM(LlamaConfig(vocab_size=NUM_TOKEN_IDS, rms_norm_eps=1e-5, **common))
        elif name == QWEN:
            common |= {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
            common |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
            model = Qwen3ForCausalLM(Qwen3Config(vocab_size=151_936, **common, **rope))
        elif name == HYBRID:
            common |= {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24}
            common |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
            common |= {f"linear_num_{kind}_heads": 16 for kind in ("key", "value")}
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(vocab_size=248_320, **common))
        else:
            assert name == QWEN_14B, name
            common |= {"hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 1}
            common |= {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}
            model = Qwen3ForCausalLM(Qwen3Config(vocab_size=151_936, **common, **rope))
    model.to(torch.float32 if name == LLAMA else torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    _fill(model, SEEDS[name])
    if name == QWEN_14B:
        save_repeated(model, 40, path)
    else:
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def save_repeated(model: Any, num_layers: int, path: Path) -> None:
    """Save a model of one layer as one of several such layers, each in a file of its own. To draw the weights of a large
    model takes minutes."""
    from safetensors.torch import save_file

    first = "model.layers.0."
    weights = {name: weight.data for name, weight in model.named_parameters()}
    files = {"model-others.safetensors": {name: one for name, one in weights.items() if not name.startswith(first)}}
    for number in range(num_layers):
        files[f"model-{number}.safetensors"] = {
            name.replace(first, f"model.layers.{number}."): one
            for name, one in weights.items()
            if name.startswith(first)
        }
    path.mkdir(parents=True)
    for file, tensors in files.items():
        save_file(tensors, path / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = model.config.to_dict() | {"num_hidden_layers": num_layers, "architectures": [type(model).__name__]}
    config |= {"dtype": str(model.dtype).removeprefix("torch."), "layer_types": None}
    (path / "config.json").write_text(json.dumps(config, indent=2))


def save_gptq(of: Path, path: Path) -> None:
    """Save a model with the layers of another one rounded to 4 bits, in groups of 128 inputs with a scale each."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(of, path, ignore=shutil.ignore_patterns("*.safetensors"))
    stored: dict[str, Any] = {}
    for name, weight in load_file(of / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        layer, groups = name.removesuffix(".weight"), weight.float().unflatten(1, (-1, GPTQ_GROUP))
        scales = (groups.abs().amax(2) / 7.5).half()
        codes = (groups / scales[..., None].float() + 8).round().clamp(0, 15).flatten(1)
        zeros = torch.full_like(scales, 7)  # one less than the zero point
        stored[f"{layer}.qweight"] = _words(codes).T.contiguous()
        stored[f"{layer}.qzeros"] = _words(zeros.T)
        stored[f"{layer}.scales"] = scales.T.contiguous()
        stored[f"{layer}.g_idx"] = (torch.arange(weight.shape[1]) // GPTQ_GROUP).int()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((of / "config.json").read_text())
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GPTQ_GROUP, "sym": True, "desc_act": False}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}, indent=2))


def _words(codes: Any) -> Any:
    """Pack codes of 4 bits [N, K] into int32 [N, K / 8], the first into the lowest bits."""
    import torch

    shifted = codes.long().unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    words = shifted.sum(2)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def _fill(model: Any, seed: int) -> None:
    """Draw all weights."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:  # of a norm
                weight.copy_(1 + 0.1 * drawn)
                continue
            is_embedding = "embed_tokens" in name or "lm_head" in name
            weight.copy_(drawn * (2.0 if is_embedding else 1.0) / math.sqrt(weight.shape[1]))
            if is_embedding:
                weight[NUM_TOKEN_IDS:] *= 0.1


def _tokenizer(cache: Path) -> Any:
    """Return a tokenizer like the tiny model's with NUM_TOKEN_IDS token ids. The models share one."""
    from transformers import AutoTokenizer

    made = next((path.parent for path in sorted(cache.glob("*/tokenizer.json"))), None)
    if made is not None:
        return AutoTokenizer.from_pretrained(made)
    tiny = AutoTokenizer.from_pretrained(path_of(TINY_MODEL))
    return tiny.train_new_from_iterator(_texts(), NUM_TOKEN_IDS, show_progress=False)


def _texts() -> Iterator[str]:
    """Yield the sources of Python's standard library, a text that every machine has."""
    num_bytes = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or num_bytes > TEXT_BYTES:
            continue
        text = path.read_text(errors="ignore")
        num_bytes += len(text)
        yield text
