"""The model of one rank: load it, prepare its weights for this device, move them away and back."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from typing import Literal

import torch
from llguidance import LLTokenizer
from msgspec.structs import replace
from transformers import PreTrainedModel

from millrace.executor.heap import release_freed_memory
from millrace.executor.phases import timed
from millrace.executor.wire.messages import ModelFacts, WorkerConfig
from millrace.worker.attention.interface import Attention
from millrace.worker.errors import ConfigError
from millrace.worker.fusion.decoder import DecoderWeights
from millrace.worker.fusion.device import choose_operations
from millrace.worker.fusion.fuse import FusionRejected, fuse
from millrace.worker.fusion.operations import Operations, not_batch_invariant
from millrace.worker.grammars import Grammars, load_tokenizer
from millrace.worker.kernels.library import KERNEL_DTYPES
from millrace.worker.kv_pool import KVPool, LayerSpec
from millrace.worker.linear.choice import quantize, round_inputs
from millrace.worker.linear.modules import use_packed_linear
from millrace.worker.loading.checksum import check_unchanged, checksums
from millrace.worker.loading.load import load_model
from millrace.worker.loading.weights import own_weights, use_numbers
from millrace.worker.parallel.peers import Peers
from millrace.worker.parallel.topology import Topology
from millrace.worker.recurrent.states import RecurrentStates

logger = logging.getLogger("millrace.worker")


class RankModel:
    """Owns the weights of this rank, and knows where they are."""

    decoder: DecoderWeights | None = None
    """The weights for a forward pass of our own; None if the model's own is used."""
    states: RecurrentStates | None = None
    """Of its recurrent layers; without space until a runner needs it. None, like the module, if the weights are dropped."""
    facts: ModelFacts
    """Set by `load` and kept when the weights are dropped; so are the next fields."""
    _specs: list[LayerSpec]
    _dtype: torch.dtype
    _kv_cache_dtype: torch.dtype

    def __init__(
        self, config: WorkerConfig, topology: Topology, device: torch.device, attention: Attention, peers: Peers | None
    ) -> None:
        self._config = config
        self._topology = topology
        self._device = device
        self.attention = attention
        self._peers = peers
        self._module: PreTrainedModel | None = None
        self.grammars = Grammars(self._load_tokenizer, num_threads=1 if device.type == "cpu" else None)
        self.location: Literal["device", "host", "disk"] = "disk"
        """Where the weights are."""
        self._checksums: dict[str, int] = {}
        """Checksums of the weights before the sleep."""

    @property
    def is_alone(self) -> bool:
        """Whether no other rank has a part of the same layers."""
        return self._topology.tp_size == 1

    @property
    def uses_graphs(self) -> bool:
        """Whether steps run as graphs where they can."""
        is_possible = self.decoder is not None and not self.decoder.waits
        return is_possible and self.attention.name == "triton" and not self._config.enforce_eager

    @property
    def module(self) -> PreTrainedModel:
        """transformers' module tree. Its `to` moves the tensors in place, and tied ones stay tied."""
        assert self._module is not None, "the weights are dropped"
        return self._module

    @property
    def _quantizes(self) -> bool:
        return self._config.quantization == "int8"

    @property
    def _rounds_inputs(self) -> bool:
        """Whether layers with quantized weights may round their inputs: not if someone asks for float32."""
        return self._config.dtype != "float32"

    def load(self) -> None:
        """Read the weights and prepare them. Raises `ModelError` and `ConfigError`."""
        if self._quantizes and self._device.type != "cpu":
            raise ConfigError("quantization: int8 needs device cpu; leave it out")
        self._read()
        if self._quantizes and self._dtype not in KERNEL_DTYPES:
            name = str(self._dtype).removeprefix("torch.")
            raise ConfigError(
                f"quantization: int8 needs dtype float32 or bfloat16, not {name}; choose one, or leave it out"
            )
        batch_invariant = self._config.batch_invariant
        operations = choose_operations(
            self.attention,
            self._dtype,
            self._device,
            batch_invariant=batch_invariant,
            quantizes=self._quantizes,
            rounds=self._rounds_inputs,
        )
        if operations is not None:
            self._fuse(operations)
        if batch_invariant and self.decoder is None:
            dtype = str(self._dtype).removeprefix("torch.")
            raise not_batch_invariant(f"{type(self.module).__name__} in {dtype}, attention {self.attention.name},")
        if self._device.type == "cpu":
            if self.decoder is None:
                self._pack_modules()
            own_weights(self.module)
            release_freed_memory()  # the unpacked weights
        use_numbers(self.module)
        self.location = "device"

    def _load_tokenizer(self) -> LLTokenizer:
        config = self._config
        return load_tokenizer(config.tokenizer or config.model, self.facts.vocab_size, config.eos_token_ids)

    def take_off_device(self, level: int) -> None:
        """Take the weights off the device, see `Worker.sleep`."""
        if self.location == "device":
            self._checksums = checksums(self.module)
        if level == 2:
            self.drop()
        elif self.location == "device":
            if self.decoder is not None:
                self.decoder.release_buffers()
            self.module.to("cpu")  # type: ignore[arg-type]
            self.location = "host"

    def put_on_device(self, new_weights: str | None = None) -> None:
        """Move the weights to the device, or read them again. Raises `WeightsChanged` when they are not those that
        `take_off_device` took. `new_weights`: the directory of others, which are read now and later; the dtype stays."""
        if new_weights is not None:
            self._config = replace(self._config, weights=new_weights, dtype=self.facts.dtype)
            self.drop()
        if self.location == "device":
            return
        if self.location == "disk":
            self.load()
        self.module.to(self._device)  # type: ignore[arg-type]
        try:
            if new_weights is None:
                check_unchanged(self.module, self._checksums)
        except Exception:
            self.drop()
            raise
        self.location = "device"

    def drop(self) -> None:
        self._module, self.decoder, self.states, self.location = None, None, None, "disk"

    def make_pool(self, num_blocks: int, num_host_blocks: int) -> KVPool:
        layout = self.facts.kv_layout
        pool = KVPool(self._specs, num_blocks, layout.block_size, self._kv_cache_dtype, self._device, layout.num_groups)
        if num_host_blocks:
            pool.add_host_tier(num_host_blocks)
        return pool

    def _read(self) -> None:
        self.drop()
        loaded = load_model(self._config, self._topology, self._peers, self._device, self.attention)
        self._module, self._specs, self.facts = loaded.model, loaded.specs, loaded.facts
        self._dtype, self._kv_cache_dtype, self.attention = loaded.dtype, loaded.kv_cache_dtype, loaded.attention
        self.states = loaded.states

    def _fuse(self, operations: Operations) -> None:
        is_rejected = False
        try:
            with timed(logger, "fuse and pack"), self._peers.dry_run() if self._peers else contextlib.nullcontext():
                assert self.states is not None
                self.decoder = fuse(
                    self.module, self._specs, self.facts.max_model_len, self.attention, operations, self.states
                )
        except FusionRejected as rejected:
            logger.info(
                "%s: it computes something else, so it runs through transformers' modules, which is slower", rejected
            )
            is_rejected = True
        if is_rejected:  # not above, where the exception still holds the packed weights
            self._read()

    def _pack_modules(self) -> None:
        began_s = time.perf_counter()
        layers = use_packed_linear(self.module, self._dtype)
        if self._quantizes:
            quantize(layers)
        elif self._rounds_inputs:
            round_inputs(layers)
        counts = Counter(layer.name for layer in layers)
        shown = ", ".join(f"{count} by {name}" for name, count in sorted(counts.items()))
        logger.info("linear layers: %s; packed in %.2f s", shown or "none", time.perf_counter() - began_s)
