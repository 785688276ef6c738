"""Tiny models with random weights, for every test that needs a real one. Token ids only: there is no tokenizer.

Linear layers get a standard deviation of 1/sqrt(fan_in), so that each of them moves the residual stream: a wrong
position, mask or KV slot then changes the greedy tokens. Embeddings that are tied to the head are small against that, or
the continuation would be the last token for ever, which checks nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 512
WINDOW = 24
TIED_STD = 0.02
TIED_NORM = 10.0

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW, "tie_word_embeddings": False},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
"""The families that have their own tests, by name: `make_model(name, ...)`."""

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "head_dim": 16,
    "sliding_window": WINDOW,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
"""Attention sinks, and experts that only transformers' modules compute. There is no tensor parallel plan for it."""
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.4,
}
"""Of Granite. Each changes the logits a lot."""
_MIXED_LAYERS = ["linear_attention", "full_attention", "linear_attention"]
_DELTA_NET = {
    "layer_types": _MIXED_LAYERS,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {
        "model_type": "lfm2",
        "conv_L_cache": 4,
        "layer_types": ["conv", "full_attention", "conv"],
        "tie_word_embeddings": False,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": False,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", "head_dim": 16, "tie_word_embeddings": True, **_DELTA_NET},
    "qwen3_next": {
        "model_type": "qwen3_next",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "tie_word_embeddings": True,
        **_DELTA_NET,
    },
    "olmo_hybrid": {"model_type": "olmo_hybrid", "tie_word_embeddings": False, **_DELTA_NET},
    "granite": {
        "model_type": "granitemoehybrid",
        "layer_types": _MIXED_LAYERS,
        "shared_intermediate_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        **MULTIPLIERS,
        **_MAMBA,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "moe", "attention"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "tie_word_embeddings": False,
    },
    "falcon_h1": {"model_type": "falcon_h1", "head_dim": 16, "mamba_d_ssm": 128, **_MAMBA},
}
"""Families with recurrent layers: short convolutions, gated delta nets, and state space models beside attention, beside
experts without either, or in the same layers."""
ALL_EXPERTS = {"num_experts_per_tok": GPT_OSS["num_local_experts"]}
"""For gpt-oss in bfloat16: numbers that are rounded otherwise never choose other experts."""
SINKS_STD = 2.0


def make_model(arch: str, path: Path, seed: int = 0, **overrides: Any) -> None:
    """Save a model of the family `arch` in `path`: config.json and safetensors."""
    build_model(arch, seed, **overrides).save_pretrained(path)


def build_model(arch: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A float32 model in memory, ready to run."""
    settings = _SIZES | (CONFIGS | {"gpt_oss": GPT_OSS} | RECURRENT)[arch] | overrides
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.random.fork_rng():  # for what `randomize` leaves
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    return model.eval()


def randomize(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    is_tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and not (is_tied and module is model.get_output_embeddings()):
                module.weight.normal_(0.0, module.in_features**-0.5, generator=generator)
            elif isinstance(module, torch.nn.Embedding):
                module.weight.normal_(0.0, TIED_STD if is_tied else module.embedding_dim**-0.5, generator=generator)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, parameter in model.named_parameters():
            if name.endswith(".sinks"):
                parameter.normal_(0.0, SINKS_STD, generator=generator)
            elif model.config.model_type == "gpt_oss" and ".mlp." in name:  # weights: [experts, inputs, outputs]
                parameter.normal_(0.0, model.config.hidden_size**-0.5, generator=generator)
        if is_tied:
            model.get_decoder().norm.weight.add_(TIED_NORM)  # spreads the logits
