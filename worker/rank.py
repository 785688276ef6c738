"""One rank from start to shutdown: the device, the model, the KV pool, then steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from millrace.executor.wire.messages import ModelFacts, StepPlan, StepResult, WorkerConfig
from millrace.worker.attention.select import choose_attention
from millrace.worker.device import choose_device, keep_freed_memory
from millrace.worker.errors import ConfigError, PlanError
from millrace.worker.kv_budget import fixed_num_blocks, host_pool_bytes, num_blocks_within
from millrace.worker.kv_pool import KVPool
from millrace.worker.loading.checksum import checksums
from millrace.worker.loading.load import load_model
from millrace.worker.parallel.peers import Peers
from millrace.worker.parallel.runner import ParallelRunner
from millrace.worker.parallel.topology import find_place
from millrace.worker.runner import Runner, largest_prefill
from millrace.worker.sleep import check_level, check_tags, check_unchanged
from millrace.worker.utilization import device_utilization

logger = logging.getLogger("millrace.worker")


class Rank:
    """Owns the device's memory: the model, the KV pool, and the runner that works on both. Implements `Worker`.

    With more than one rank, all of them get the same calls in the same order: a step, and the profile of a GPU, are
    work that they do together. Loading, sleeping and waking up each does alone.
    """

    def __init__(self, rank: int, world_size: int, epoch: int, config: WorkerConfig, rendezvous: str = "") -> None:
        self._topology = find_place(rank, world_size, config)
        if world_size > 1 and not rendezvous:
            raise ConfigError(f"{world_size} ranks need a rendezvous to meet at: none was given")
        self._rank = rank
        self._epoch = epoch
        self._config = config
        self._rendezvous = rendezvous
        self._num_steps = 0
        self.runner: Runner | None = None
        self._peers: Peers | None = None
        self._pool: KVPool | None = None
        self._num_blocks: int | None = None
        """The pool's size, also while it is dropped."""
        self._pool_budget = ""
        """In words: what the number of available blocks was made of."""
        self._model: Any = None
        """transformers' module tree, or None."""
        self._weights: Literal["device", "host", "disk"] = "device"
        self._checksums: dict[str, int] = {}

    def start(self, on_phase: Callable[[str], None]) -> ModelFacts:
        """Meet the other ranks in the phase "device": from then on no rank waits for another until the first call, so
        that they may enter "load_model" one after the other."""
        on_phase("device")
        self._device = choose_device(self._config.device, self._rank)
        if self._device.type == "cpu":
            keep_freed_memory()
        self._attention = choose_attention(self._config.attention, self._device)
        if self._topology.world_size > 1:
            self._peers = Peers(self._topology, self._device, self._rendezvous)
        on_phase("load_model")
        try:
            self._load_model()
        except BaseException:
            self.shutdown()
            raise
        return self._facts

    def determine_num_available_blocks(self) -> tuple[int, int]:
        fixed = fixed_num_blocks(self._config)
        if fixed is not None:
            self._pool_budget = "num_blocks is set"
            return fixed, 0
        if self._config.kv_cache_memory_bytes is not None:
            pool_bytes = self._config.kv_cache_memory_bytes
            self._pool_budget = f"kv_cache_memory_bytes is {_mib(pool_bytes)}"
        elif self._device.type == "cpu":
            pool_bytes = host_pool_bytes(self._config, self._facts, self._topology.world_size)
            self._pool_budget = f"{_mib(pool_bytes)} of host memory"
        else:
            pool_bytes = self._profile_gpu()
        return num_blocks_within(pool_bytes, self._config, self._facts), 0

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        if num_host_blocks:
            raise ConfigError("this version has no host memory tier: the number of host blocks must be 0")
        if num_device_blocks < 2:
            raise ConfigError(f"a KV pool of {num_device_blocks} blocks holds nothing: block 0 is never used")
        self._num_blocks = num_device_blocks
        self._pool = self._make_pool(num_device_blocks)
        self.runner = self._make_runner(self._pool)
        logger.debug("%r on %s", self._pool, self._device)

    def execute_model(self, plan: StepPlan) -> StepResult:
        if self.runner is None:
            missing = (
                "it sleeps: call wake_up" if self._num_blocks else "there is no KV pool yet: call initialize_cache"
            )
            raise PlanError(f"this rank cannot run steps, {missing} first")
        if plan.epoch != self._epoch:
            raise PlanError(f"the plan is of epoch {plan.epoch}, this rank lives in epoch {self._epoch}")
        self._num_steps += 1
        return self.runner.execute_model(plan)

    def check_health(self) -> None:
        torch.ones(1, device=self._device).add_(1).item()

    def sleep(self, level: int) -> None:
        """Give memory of the device back, as `millrace.worker.sleep` has it. All sequences are forgotten."""
        check_level(level)
        self._drop_pool()
        if self._weights == "device":
            self._checksums = checksums(self._loaded())
        if level == 2:
            self._model, self._weights = None, "disk"
        elif self._weights == "device":
            _move(self._loaded(), torch.device("cpu"))
            self._weights = "host"
        self._empty_cache()
        logger.info("asleep at level %d, weights: %s", level, self._weights)

    def wake_up(self, tags: list[str] | None = None, epoch: int | None = None) -> None:
        """Take back what `tags` name, or all. The KV pool comes back empty and of its old size, and with it `epoch`
        begins. Raises `WeightsChanged` when the weights are not those of before."""
        wanted = check_tags(tags)
        if "weights" in wanted:
            self._wake_weights()
        if "kv_cache" in wanted and self._num_blocks is not None:
            self._pool = self._pool or self._make_pool(self._num_blocks)
            self._epoch = self._epoch if epoch is None else epoch
        if self.runner is None and self._pool is not None and self._weights == "device":
            self.runner = self._make_runner(self._pool)

    def stats(self) -> dict[str, Any]:
        on_gpu = self._device.type == "cuda"
        return {
            "rank": self._rank,
            "epoch": self._epoch,
            "num_steps": self._num_steps,
            "num_sequences": self.runner.num_sequences if self.runner else 0,
            "num_blocks": self._pool.num_blocks if self._pool else 0,
            "kv_pool_bytes": self._pool.num_bytes() if self._pool else 0,
            "weight_bytes": self._facts.weight_bytes,
            "weights_on": self._weights,
            "device_bytes": torch.cuda.memory_reserved(self._device) if on_gpu else None,
            "device_total_bytes": torch.cuda.get_device_properties(self._device).total_memory if on_gpu else None,
            "device_utilization": device_utilization(self._device),
            "pool_budget": self._pool_budget,
        }

    def shutdown(self) -> None:
        self.runner = self._pool = self._model = None
        if self._peers is not None:
            self._peers.close()
            self._peers = None
        self._empty_cache()

    def _load_model(self) -> None:
        loaded = load_model(self._config, self._topology, self._peers, self._device, self._attention.name)
        self._model, self._specs, self._facts = loaded.model, loaded.specs, loaded.facts
        self._dtype = loaded.model.dtype

    def _wake_weights(self) -> None:
        if self._weights == "device":
            return
        if self._weights == "disk":
            self._load_model()
        _move(self._loaded(), self._device)
        try:
            check_unchanged(self._loaded(), self._checksums)
        except Exception:
            self._model, self._weights = None, "disk"
            raise
        self._weights = "device"

    def _drop_pool(self) -> None:
        if self.runner is not None:
            self.runner.finish()
        self.runner = self._pool = None

    def _empty_cache(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _loaded(self) -> PreTrainedModel:
        assert self._model is not None, "the weights are not here"
        return self._model

    def _make_pool(self, num_blocks: int) -> KVPool:
        return KVPool(self._specs, num_blocks, self._config.block_size, self._dtype, self._device)

    def _make_runner(self, pool: KVPool) -> Runner:
        common = (self._loaded(), self._attention, pool, self._config.max_num_seqs, self._facts.max_model_len)
        return ParallelRunner(*common, self._topology, self._peers) if self._peers else Runner(*common)

    def _profile_gpu(self) -> int:
        """Bytes that the configured share of the GPU leaves beside the weights and a real largest step."""
        config = self._config
        longest = min(self._facts.max_model_len, max(self._num_tokens_beside_weights(), config.max_num_batched_tokens))
        plan = largest_prefill(config.max_num_batched_tokens, config.max_num_seqs, longest, config.block_size)
        pool = self._make_pool(2)
        torch.cuda.reset_peak_memory_stats(self._device)
        runner = self._make_runner(pool)
        runner.execute_model(plan)
        runner.finish()
        peak = torch.cuda.max_memory_allocated(self._device) - pool.num_bytes()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        used_by_others = total - free - torch.cuda.memory_reserved(self._device)
        share = config.gpu_memory_utilization
        pool_bytes = int(total * share) - used_by_others - peak
        self._pool_budget = (
            f"{_mib(total)} x {share:g} - {_mib(used_by_others)} of others - {_mib(peak)} at the peak "
            f"= {_mib(pool_bytes)}"
        )
        return pool_bytes

    def _num_tokens_beside_weights(self) -> int:
        """Tokens of a KV pool that takes all that the weights leave of the configured share: no sequence can be longer."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        left = int(total * self._config.gpu_memory_utilization) - (total - free)
        return left // self._facts.kv_bytes_per_block * self._config.block_size


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _move(model: nn.Module, device: torch.device) -> None:
    """Bring a model's tensors to a device, in place; tied ones stay tied."""
    model.to(device)
