"""Loads this rank's part of a model, and collects the facts that the engine needs about it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from millrace.executor.phases import timed
from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import ModelFacts, WorkerConfig
from millrace.worker.attention.interface import Attention
from millrace.worker.attention.select import attention_for
from millrace.worker.errors import ModelError, WeightsDiffer
from millrace.worker.kv_pool import LayerSpec, share_tensors
from millrace.worker.layer_groups import group_layers
from millrace.worker.loading.checkpoint import find_weights
from millrace.worker.loading.checksum import weights_checksum
from millrace.worker.loading.dtype import (
    can_keep_bfloat16,
    checkpoint_dtype,
    choose_dtype,
    choose_kv_cache_dtype,
    declared_dtype,
    keep_bfloat16,
    keeps_codes,
)
from millrace.worker.loading.model import build_empty, longest_sequence, read_config
from millrace.worker.loading.part import ModelPart
from millrace.worker.loading.probe import check_windows, probe_layers, runs_head_alone
from millrace.worker.loading.quantized import without_idle_biases
from millrace.worker.loading.rope import fix_frequencies
from millrace.worker.loading.tensor_files import Source
from millrace.worker.loading.weights import load_converted, load_weights, take_weights
from millrace.worker.parallel.peers import Peers
from millrace.worker.parallel.topology import Topology
from millrace.worker.recurrent.modules import recurrent_modules
from millrace.worker.recurrent.states import RecurrentStates

logger = logging.getLogger("millrace.worker")


@dataclass(frozen=True)
class LoadedModel:
    """What a rank holds of a model. `specs` describe the layers of this rank."""

    model: PreTrainedModel
    specs: list[LayerSpec]
    facts: ModelFacts
    dtype: torch.dtype
    """Dtype of the activations. Weights may be bfloat16 although this is float32."""
    kv_cache_dtype: torch.dtype
    attention: Attention
    states: RecurrentStates


def load_model(
    config: WorkerConfig, topology: Topology, peers: Peers | None, device: torch.device, attention: Attention
) -> LoadedModel:
    """Load this rank's part of the model. Does not wait for other ranks. Raises `ModelError` and `ConfigError`.

    `attention`: what the layers should use. What they can use is in the result.
    """
    directory = Path(config.model)
    with timed(logger, "read config"):
        model_config = read_config(directory)
    weights = find_weights(Path(config.weights or directory), declared_dtype(model_config), directory)
    dtype = choose_dtype(config.dtype, checkpoint_dtype(model_config, weights), device)
    with timed(logger, "build modules"):
        model = build_empty(model_config, dtype)
        if topology.world_size > 1 and recurrent_modules(model):
            sizes = "tensor_parallel_size and pipeline_parallel_size"
            raise ModelError(
                f"{type(model).__name__} has recurrent layers, which run on one rank only: set {sizes} to 1"
            )
        if topology.world_size == 1 and can_keep_bfloat16(dtype, weights, device):
            logger.info("computing in float32, the weights of linear layers stay bfloat16 as they are stored")
            keep_bfloat16(model)
        part = ModelPart(model, topology)
        weights = without_idle_biases(weights, f"{model.base_model_prefix}.", part.whole_names)
    max_model_len = longest_sequence(model_config, config.max_model_len)
    coded_dtype = dtype if keeps_codes(config, model, dtype, device) else None
    with timed(logger, "read weights"):
        try:
            load_weights(model, part, weights, device, coded_dtype)
        except WeightsDiffer as difference:
            logger.info("transformers converts the checkpoint, because %s", difference)
            model = _load_converted(model, part, weights, topology, device, dtype, coded_dtype)
    rope = fix_frequencies(model, max_model_len)
    states = RecurrentStates(model, batch_invariant=config.batch_invariant)
    with timed(logger, "probe"):
        specs = _probe(model, part, peers)
    check_windows(model_config, specs, max_model_len)
    part.check_layers(model, specs)
    attention = attention_for(attention, specs)
    plain = KVLayout(config.block_size, (None,), config.max_num_batched_tokens, max_model_len)
    whole, kv_layout = group_layers(part.whole_specs or specs, plain)
    groups = {spec.layer_index: spec.group for spec in whole}
    specs = [replace(spec, group=groups[spec.layer_index]) for spec in specs]
    kv_cache_dtype = choose_kv_cache_dtype(config.kv_cache_dtype, dtype)
    parameters = list(model.parameters())
    facts = ModelFacts(
        architecture=type(model).__name__,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        attention=attention.name,
        weight_bytes=sum(parameter.nbytes for parameter in parameters),
        kv_bytes_per_block=config.block_size
        * sum(group[0].bytes_per_token(kv_cache_dtype) for group in share_tensors(specs)),
        weights_checksum=weights_checksum(model),
        kv_cache_dtype=str(kv_cache_dtype).removeprefix("torch."),
        kv_layout=kv_layout,
        scores_prompts=runs_head_alone(model),
        rope=rope,
        is_recurrent=bool(states),
    )
    return LoadedModel(model, specs, facts, dtype, kv_cache_dtype, attention, states)


def _probe(model: PreTrainedModel, part: ModelPart, peers: Peers | None) -> list[LayerSpec]:
    if peers is None:
        return probe_layers(model)
    part.join(model, peers)
    with peers.dry_run():
        return probe_layers(model, part.layers)


def _load_converted(
    model: PreTrainedModel,
    part: ModelPart,
    weights: dict[str, Source],
    topology: Topology,
    device: torch.device,
    dtype: torch.dtype,
    coded_dtype: torch.dtype | None,
) -> PreTrainedModel:
    if topology.world_size == 1:
        return load_converted(model, weights, device, dtype, coded_dtype if device.type == "cpu" else None)
    logger.info("each rank converts the whole checkpoint in host memory and keeps its part")
    take_weights(model, part, load_converted(model, weights, torch.device("cpu"), dtype), device)
    return model
