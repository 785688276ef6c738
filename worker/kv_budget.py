"""How many KV blocks this rank can hold."""

from __future__ import annotations

from millrace.executor.wire.messages import ModelFacts, WorkerConfig
from millrace.worker.device import free_host_bytes
from millrace.worker.errors import ConfigError, ModelError
from millrace.worker.kv_pool import num_blocks_for

USUAL_TOKENS = 512
"""Length of a sequence for which the default pool on a CPU is sized."""
FREE_MEMORY_SHARE = 0.25
"""Share of the free host memory that the default pool on a CPU takes at most."""


def fixed_num_blocks(config: WorkerConfig) -> int | None:
    """The number of blocks that the configuration names itself, if it does."""
    if config.num_blocks is not None and config.num_blocks < 2:
        raise ConfigError(f"num_blocks is {config.num_blocks}, but block 0 is never used: at least 2 are needed")
    return config.num_blocks


def host_pool_bytes(config: WorkerConfig, facts: ModelFacts, num_ranks: int) -> int:
    """Bytes for the pool of a CPU: enough for `max_num_seqs` usual sequences, at most a quarter of what is free, of which
    the ranks, that run on one host, have a part each."""
    tokens_each = min(facts.max_model_len, USUAL_TOKENS)
    wanted_blocks = max(
        config.max_num_seqs * num_blocks_for(tokens_each, config.block_size),
        num_blocks_for(facts.max_model_len, config.block_size),
    )
    return min((wanted_blocks + 1) * facts.kv_bytes_per_block, int(free_host_bytes() * FREE_MEMORY_SHARE / num_ranks))


def num_blocks_within(pool_bytes: int, config: WorkerConfig, facts: ModelFacts) -> int:
    """Blocks that fit into so many bytes. Raises `ModelError` when they would not hold one sequence of a length that was
    asked for. Where none was, the engine lets sequences end where the pool does."""
    num_blocks = max(pool_bytes, 0) // facts.kv_bytes_per_block
    shortest = facts.max_model_len if config.max_model_len is not None else 1
    needed = num_blocks_for(shortest, config.block_size) + 1
    if num_blocks < needed:
        longest = max(num_blocks - 1, 0) * config.block_size
        shorter = f"set max_model_len to at most {longest}, or " if longest else ""
        raise ModelError(
            f"one sequence of {shortest} tokens needs {needed * facts.kv_bytes_per_block:,} bytes of KV pool, "
            f"and {max(pool_bytes, 0):,} are there: {shorter}give the pool more memory "
            "(kv_cache_memory, gpu_memory_utilization)"
        )
    return num_blocks
