"""Computes the number of KV blocks that fit on this rank."""

from __future__ import annotations

import logging

from millrace.executor.wire.messages import ModelFacts, WorkerConfig
from millrace.worker.errors import ConfigError, ModelError
from millrace.worker.host_memory import free_host_bytes, total_host_bytes

logger = logging.getLogger("millrace.worker")

USUAL_TOKENS = 512
"""Tokens of a usual sequence. The default pool on a CPU holds `max_num_seqs` of them."""
NUM_LONGEST = 8
"""Sequences of the greatest length that it holds at least."""
FREE_MEMORY_SHARE = 0.25
"""Maximum share of the free host memory for the default pools of all ranks on a CPU."""


def fixed_num_blocks(config: WorkerConfig, facts: ModelFacts) -> int | None:
    """Return the number of blocks that the configuration sets, or None. Raises `ConfigError` when they do not hold one
    sequence of the configured `max_model_len`."""
    num_blocks, layout, longest = config.num_blocks, facts.kv_layout, facts.max_model_len
    if num_blocks is None:
        return None
    if num_blocks < 2:
        raise ConfigError(f"num_blocks is {num_blocks}, but block 0 is never used: it must be at least 2")
    if config.max_model_len is not None and (needed := layout.num_blocks(longest) + 1) > num_blocks:
        raise ConfigError(
            f"num_blocks: ({num_blocks} - 1) blocks x {layout.block_size} tokens in {layout.num_groups} groups of layers "
            f"hold {layout.longest_sequence(num_blocks - 1)} tokens of one sequence, less than max_model_len = {longest} "
            f"(block 0 is never used); use at least {needed}, or a smaller max_model_len"
        )
    return num_blocks


def check_possible(num_blocks: int, facts: ModelFacts, device_bytes: int) -> None:
    """Raise `ConfigError` for a pool that is larger than the memory of the device: no attempt can succeed."""
    pool_bytes = num_blocks * facts.kv_bytes_per_block
    if pool_bytes > device_bytes:
        raise ConfigError(
            f"a KV pool of {num_blocks:,} blocks x {facts.kv_bytes_per_block:,} bytes = {pool_bytes:,} bytes is larger than "
            f"the {device_bytes:,} bytes of memory of this {facts.device}: lower num_blocks or kv_cache_memory"
        )


def num_host_blocks(config: WorkerConfig, facts: ModelFacts, device_type: str) -> int:
    """Return the size of the host tier. Raises `ConfigError` for one that is smaller than a block or larger than the memory
    of the host."""
    if config.swap_space_bytes == 0:
        return 0
    if device_type == "cpu" and not config.force_swap:
        logger.warning("swap_space_gib is ignored: on a CPU the KV pool is in host memory already")
        return 0
    if facts.is_recurrent:
        logger.warning("swap_space_gib is ignored: the model has recurrent layers, whose states are not kept")
        return 0
    num_blocks, host_bytes = config.swap_space_bytes // facts.kv_bytes_per_block, total_host_bytes()
    swap_space = f"swap_space_gib is {config.swap_space_bytes / 2**30:.9g} = {config.swap_space_bytes:,} bytes"
    if num_blocks == 0:
        raise ConfigError(
            f"{swap_space}, but one KV block has {facts.kv_bytes_per_block:,} bytes: raise it, or set it to 0"
        )
    if config.swap_space_bytes > host_bytes:
        raise ConfigError(f"{swap_space} for each rank, but this machine has {host_bytes:,} bytes of memory: lower it")
    return num_blocks


def host_pool_bytes(config: WorkerConfig, facts: ModelFacts, num_ranks: int) -> tuple[int, str]:
    """Return the bytes of this rank's pool on a CPU, and what they are for: `max_num_seqs` sequences of USUAL_TOKENS, or
    NUM_LONGEST of the greatest length if that is more, and at most this rank's part of FREE_MEMORY_SHARE."""
    lengths = {
        facts.max_model_len: min(NUM_LONGEST, config.max_num_seqs),
        min(facts.max_model_len, USUAL_TOKENS): config.max_num_seqs,
    }
    wanted = {length: number * facts.kv_layout.num_blocks(length) for length, number in lengths.items()}
    length = max(wanted, key=lambda each: wanted[each])
    pool_bytes = (wanted[length] + 1) * facts.kv_bytes_per_block
    purpose = f"{lengths[length]} sequences of {length} tokens"
    most_bytes = int(free_host_bytes() * FREE_MEMORY_SHARE / num_ranks)
    if pool_bytes <= most_bytes:
        return pool_bytes, f"for {purpose}"
    return most_bytes, f"{FREE_MEMORY_SHARE * 100:.0f} % of the free memory over all ranks, less than {purpose} need"


def most_pool_bytes(config: WorkerConfig, facts: ModelFacts) -> int:
    """Return the bytes of a pool that holds `max_num_seqs` sequences of the greatest length."""
    return (config.max_num_seqs * facts.kv_layout.num_blocks(facts.max_model_len) + 1) * facts.kv_bytes_per_block


def num_blocks_within(pool_bytes: int, config: WorkerConfig, facts: ModelFacts) -> int:
    """Return the number of blocks that fit into `pool_bytes`. Raises `ModelError` when they do not hold one sequence of
    the configured `max_model_len`. Without it, the engine ends sequences at the size of the pool."""
    num_blocks = max(pool_bytes, 0) // facts.kv_bytes_per_block
    shortest = facts.max_model_len if config.max_model_len is not None else 1
    needed = facts.kv_layout.num_blocks(shortest) + 1
    if num_blocks < needed:
        longest = facts.kv_layout.longest_sequence(num_blocks - 1)
        shorter = f"set max_model_len to at most {longest}, or " if longest else ""
        raise ModelError(
            f"one sequence of {shortest} tokens needs a KV pool of {needed:,} blocks x {facts.kv_bytes_per_block:,} bytes = "
            f"{needed * facts.kv_bytes_per_block:,} bytes, and {max(pool_bytes, 0):,} are available: "
            f"{shorter}give the pool more memory (kv_cache_memory, gpu_memory_utilization)"
        )
    return num_blocks
