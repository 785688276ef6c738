"""One rank from start to shutdown: device, model, KV pool, steps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from millrace.executor.heap import release_freed_memory
from millrace.executor.phases import timed
from millrace.executor.rank.worker import WAKE_TAGS
from millrace.executor.wire.messages import ModelFacts, StepPlan, StepResult, WorkerConfig
from millrace.worker.attention.select import choose_attention
from millrace.worker.cpu_threads import limit_threads
from millrace.worker.device import choose_device, device_utilization
from millrace.worker.errors import ConfigError, PlanError
from millrace.worker.host_memory import keep_freed_memory, total_host_bytes
from millrace.worker.kv_budget import (
    check_possible,
    fixed_num_blocks,
    host_pool_bytes,
    most_pool_bytes,
    num_blocks_within,
    num_host_blocks,
)
from millrace.worker.kv_pool import KVPool
from millrace.worker.parallel.peers import Peers
from millrace.worker.parallel.runner import ParallelRunner
from millrace.worker.parallel.topology import Topology
from millrace.worker.rank_model import RankModel
from millrace.worker.runner import Runner, largest_decode, largest_prefill

logger = logging.getLogger("millrace.worker")


class Rank:
    """Owns the model and the KV pool of this rank, and the runner that works on both. Implements `Worker`.

    All ranks get the same calls in the same order. They run a step, and the profile of a GPU, together. Each rank
    loads, sleeps and wakes up without the others.
    """

    def __init__(self, rank: int, world_size: int, epoch: int, config: WorkerConfig, rendezvous: str = "") -> None:
        self._topology = Topology(rank, config.tensor_parallel_size, config.pipeline_parallel_size)
        assert self._topology.world_size == world_size, config
        self._rank = rank
        self._epoch = epoch
        self._config = config
        self._rendezvous = rendezvous
        self.runner: Runner | None = None
        self._peers: Peers | None = None
        self._pool: KVPool | None = None
        self._num_blocks: int | None = None
        """Size of the pool. Kept while the pool is dropped; so is the next field."""
        self._num_host_blocks = 0
        self._pool_budget = ""
        """How the number of available blocks was computed, for logs."""

    _device: torch.device
    """Set by `start`, like the model."""
    _model: RankModel

    def start(self, on_phase: Callable[[str], None]) -> ModelFacts:
        """See `Worker.start`. The ranks connect to each other in the phase "device". After that no rank waits for
        another one until the first call, so they may enter "load_model" one at a time."""
        on_phase("device")
        self._device = choose_device(self._config.device, self._rank)
        if self._device.type == "cpu":
            keep_freed_memory()
            limit_threads()
        batch_invariant = self._config.batch_invariant
        attention = choose_attention(
            *(self._config.attention, self._device, self._config.kv_cache_dtype), batch_invariant=batch_invariant
        )
        if self._topology.world_size > 1:
            self._peers = Peers(self._topology, self._device, self._rendezvous, sums_in_order=batch_invariant)
        on_phase("load_model")
        self._model = RankModel(self._config, self._topology, self._device, attention, self._peers)
        try:
            self._model.load()
        except BaseException:
            self.shutdown()
            raise
        return self._model.facts

    def determine_num_available_blocks(self) -> tuple[int, int]:
        self._num_host_blocks = num_host_blocks(self._config, self._model.facts, self._device.type)
        return self._num_device_blocks(), self._num_host_blocks

    def _num_device_blocks(self) -> int:
        fixed = fixed_num_blocks(self._config, self._model.facts)
        if fixed is not None:
            self._pool_budget = "num_blocks is set"
            check_possible(fixed, self._model.facts, self._device_bytes())
            return fixed
        if self._config.kv_cache_memory_bytes is not None:
            pool_bytes = self._config.kv_cache_memory_bytes
            self._pool_budget = f"kv_cache_memory_bytes is {_mib(pool_bytes)}"
        elif self._device.type == "cpu":
            pool_bytes, purpose = host_pool_bytes(self._config, self._model.facts, self._topology.world_size)
            self._pool_budget = f"{_mib(pool_bytes)} of host memory, {purpose}"
        else:
            pool_bytes = self._profile_gpu()
        num_blocks = num_blocks_within(pool_bytes, self._config, self._model.facts)
        check_possible(num_blocks, self._model.facts, self._device_bytes())
        return num_blocks

    def _device_bytes(self) -> int:
        """Return the memory of the device, used or free."""
        if self._device.type == "cuda":
            return int(torch.cuda.get_device_properties(self._device).total_memory)
        return total_host_bytes()

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> float:
        if self._peers is not None and self._topology.tp_size > 1:
            chosen = [self._model.decoder is not None, self._model.uses_graphs]
            choices = torch.tensor([chosen], dtype=torch.int64, device="cpu")
            is_fused, uses_graphs = torch.cat(self._peers.all_gather(choices)).unbind(1)
            if len(is_fused.unique()) > 1:  # they exchange tensors of other sizes then
                raise ConfigError("only some ranks have accepted the fused forward pass: set attention to reference")
            if len(uses_graphs.unique()) > 1:
                raise ConfigError("steps run as graphs on some ranks only, whose GPUs differ: set enforce_eager")
        self._num_blocks, self._num_host_blocks = num_device_blocks, num_host_blocks
        with timed(logger, "KV pool"):
            self._pool = self._model.make_pool(num_device_blocks, num_host_blocks)
            self.runner = self._make_runner(self._pool)
            swap_s = self._pool.host.measure() if self._pool.host is not None else 0.0
        logger.debug("%r on %s, %r", self._pool, self._device, self._pool.host)
        return swap_s

    def launch(self, plan: StepPlan) -> None:
        runner = self._require_runner()
        if plan.epoch != self._epoch:
            raise PlanError(f"the plan is of epoch {plan.epoch}, this rank is in epoch {self._epoch}: drop the plan")
        runner.launch(plan)

    def collect(self) -> StepResult:
        return self._require_runner().collect()

    def is_result_ready(self) -> bool:
        return self._require_runner().is_result_ready()

    @property
    def has_idle_work(self) -> bool:
        return self.runner is not None and self.runner.has_idle_work

    def do_idle_work(self) -> None:
        self._require_runner().do_idle_work()

    def compile_grammar(self, number: int, grammar: str) -> None:
        self._model.grammars.announce(
            number, grammar if self._topology.is_last_stage else ""
        )  # others compute no masks

    @property
    def last_compiled(self) -> int:
        return self._model.grammars.last_compiled

    def _require_runner(self) -> Runner:
        if self.runner is None:
            reason = "it sleeps: call wake_up" if self._num_blocks else "there is no KV pool yet: call initialize_cache"
            raise PlanError(f"this rank cannot run steps, {reason} first")
        return self.runner

    def check_health(self) -> None:
        torch.ones(1, dtype=torch.float32, device=self._device).add_(1).item()

    def sleep(self, level: int) -> None:
        """See `Worker.sleep`. On a CPU level 1 leaves the weights where they are."""
        assert level in (1, 2), f"sleep level {level!r}"
        self._drop_pool()
        self._model.take_off_device(level)
        self._empty_cache()
        logger.info("asleep at level %d, weights: %s", level, self._model.location)

    def wake_up(self, tags: list[str], epoch: int, new_weights: str | None = None) -> int:
        """See `Worker.wake_up`. Raises `WeightsChanged` when the weights are not those from before the sleep."""
        assert set(tags) <= set(WAKE_TAGS), f"tags {tags!r}"
        if "weights" in tags:
            self._model.put_on_device(new_weights)
        if "kv_cache" in tags and self._num_blocks is not None:
            self._pool = self._pool or self._model.make_pool(self._num_blocks, self._num_host_blocks)
            self._epoch = epoch
        if self.runner is None and self._pool is not None and self._model.location == "device":
            self.runner = self._make_runner(self._pool)
        return self._model.facts.weights_checksum

    def stats(self) -> dict[str, Any]:
        on_gpu = self._device.type == "cuda"
        return {
            "device_bytes": torch.cuda.memory_reserved(self._device) if on_gpu else None,
            "device_total_bytes": self._device_bytes() if on_gpu else None,
            "device_utilization": device_utilization(self._device),
            "pool_budget": self._pool_budget,
        }

    def shutdown(self) -> None:
        if self._peers is None:  # another rank may have left this one waiting, and the process ends with such a rank
            with contextlib.suppress(RuntimeError):  # of a device that is lost
                self._wait_for_device()
        self.runner = self._pool = None
        self._model.drop()
        if self._peers is not None:
            self._peers.close()
            self._peers = None
        self._empty_cache()

    def _drop_pool(self) -> None:
        if self.runner is not None:
            self.runner.finish()
        self._wait_for_device()
        self.runner = self._pool = None
        if self._model.states is not None:
            self._model.states.release()

    def _wait_for_device(self) -> None:
        """Wait for copies of the host tier, whose memory is unpinned with the pool."""
        if self._pool is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _empty_cache(self) -> None:
        release_freed_memory()
        if torch.cuda.is_initialized():
            torch._C._cuda_clearCublasWorkspaces()  # some 30 MiB for each stream
            torch.cuda.empty_cache()

    def _make_runner(self, pool: KVPool) -> Runner:
        if self._peers is None:
            return Runner(self._model, pool, self._config.max_num_seqs)
        return ParallelRunner(self._model, pool, self._config.max_num_seqs, self._topology, self._peers)

    def _profile_gpu(self) -> int:
        """Run the largest steps, and return the bytes that the configured share of the GPU leaves for the pool, if running
        sequences can use them."""
        config, facts = self._config, self._model.facts
        if self._model.states is not None:
            try:
                self._model.states.allocate(config.max_num_seqs)
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"max_num_seqs: the states of recurrent layers of {config.max_num_seqs} sequences do not fit into the "
                    "memory of the GPU beside the weights: lower it"
                ) from error
        longest = min(facts.max_model_len, max(self._max_pool_tokens(), config.max_num_batched_tokens))
        pool = self._model.make_pool(2, min(1, self._num_host_blocks))
        torch.cuda.reset_peak_memory_stats(self._device)
        runner = self._make_runner(pool)
        prefill = largest_prefill(facts.kv_layout, config.max_num_seqs, longest)
        for plan in (prefill, *largest_decode(facts.kv_layout, config.max_num_seqs)):
            runner.launch(plan)
            runner.collect()
        runner.finish()
        # Reserved: with what the allocator cannot use, and the memory of graphs.
        peak = torch.cuda.max_memory_reserved(self._device) - pool.num_bytes()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        used_by_others = total - free - torch.cuda.memory_reserved(self._device)
        share = config.gpu_memory_utilization
        pool_bytes = int(total * share) - used_by_others - peak
        self._pool_budget = (
            f"{_mib(total)} x {share:g} - {_mib(used_by_others)} of other processes - {_mib(peak)} peak "
            f"= {_mib(pool_bytes)}"
        )
        if (most := most_pool_bytes(config, facts)) < pool_bytes:
            pool_bytes = most
            self._pool_budget += f", of which max_num_seqs x max_model_len can use {_mib(most)}"
        return pool_bytes

    def _max_pool_tokens(self) -> int:
        """Return the tokens of a KV pool that takes all memory beside the weights: no sequence can be longer."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        pool_bytes = int(total * self._config.gpu_memory_utilization) - (total - free)
        return self._model.facts.kv_layout.longest_sequence(pool_bytes // self._model.facts.kv_bytes_per_block)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
