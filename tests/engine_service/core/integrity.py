"""Checks that the state of the scheduler and of its parts is whole. Each raises AssertionError."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from millrace.engine_service.core.block_pool import BlockPool
from millrace.engine_service.core.host_tier import HostTier
from millrace.engine_service.core.prefix_cache import PrefixCache
from millrace.engine_service.core.running_sequences import RunningSequences
from millrace.engine_service.core.scheduler import Scheduler
from millrace.engine_service.core.sequence import Sequence
from millrace.engine_service.core.tenant_line import TenantLine
from millrace.engine_service.core.waiting_queue import _MAX_PASSED_OVER, WaitingQueue
from millrace.executor.wire.messages import NULL_BLOCK


def check_scheduler(scheduler: Scheduler) -> None:
    """Check that every part is whole, that no sequence is both running and waiting, and that each running one has one
    place."""
    running, waiting = scheduler._running, scheduler._waiting
    _check_running(running)
    for sequence in running:
        places = [
            sequence.seq_id in running.ready,
            sequence.clock is not None,
            scheduler._is_in_flight(sequence) and not sequence.is_known_to_workers,
        ]
        assert sum(places) == 1, sequence
    assert not any(sequence in waiting for sequence in running)
    check_queue(waiting, running)
    members = [each for micro_batch in scheduler._micro_batches for each in micro_batch.members]
    assert all(each in running for each in members) and len(members) == len(set(members))


def check_pool(pool: BlockPool, tables: Iterable[list[int]]) -> None:
    """Check that every block is free or in as many of `tables` as it has users, and that hashes lead to their blocks."""
    check_tier(pool.host)
    users = [0] * pool.num_blocks
    for table in tables:
        held = [block_id for block_id in table if block_id != NULL_BLOCK]
        assert len(held) == len(set(held)), "a table holds a block twice"
        for block_id in held:
            users[block_id] += 1
    assert users == [block.num_users for block in pool._blocks], "a block has other users than it counts"
    free, link = [], pool._free.following
    while link is not pool._free:
        assert link.following.previous is link, "the list of free blocks is broken"
        free.append(link.block_id)
        link = link.following
    free += range(pool._next_reserved, pool.num_blocks)
    assert sorted(free) == [n for n in range(1, pool.num_blocks) if users[n] == 0], "a block is lost, or free and used"
    assert len(free) == pool.num_free
    _check_cache(pool.cache)


def check_tier(tier: HostTier) -> None:
    """Check that every block is free or found by one key, and that no host block is moved twice in one direction."""
    assert sorted([*tier._free, *tier._blocks.values()]) == list(range(tier.num_blocks)), "a host block is lost"
    for moved in ([host for _, host in tier._next.swap_out], [host for host, _ in tier._next.swap_in]):
        assert len(moved) == len(set(moved)), "a host block is moved twice"
        assert set(moved) <= tier._pinned, "a host block that the next plan moves is not pinned"
    assert tier._pinned <= set(tier._blocks.values()), "a block that the next plan moves is free"


def check_queue(queue: WaitingQueue, running: Iterable[Sequence]) -> None:
    """Check that waiting sequences have no state in the pool, that none was passed over too often, that the sum of their
    blocks is right, that each is there once, and that the tenants are in order."""
    waiting = list(queue)
    assert all(not each.block_ids and each.num_computed == 0 for each in waiting), "a waiting sequence has blocks"
    assert all(each.num_passed_over <= _MAX_PASSED_OVER for each in waiting), "a sequence was passed over too often"
    assert queue.num_blocks == sum(each.num_waiting_blocks for each in waiting), "the sum of their blocks is wrong"
    assert sorted(each.seq_id for each in waiting) == sorted(queue._ids), "a sequence is lost, or there twice"
    for line in queue._lines.values():
        _check_line(line)
    num_running = {tenant: line.num_running for tenant, line in queue._lines.items() if line.num_running}
    assert num_running == Counter(each.tenant for each in running), "the tenants' running sequences are miscounted"
    places = [(line.num_running > 0, line.turns[0], line) for line in queue._lines.values() if line.turns]
    assert queue._order == sorted(places), "the order of the tenants is wrong"


def _check_running(running: RunningSequences) -> None:
    """Check that each block has the users that it counts, that a block in two tables holds the same tokens in both, and
    that the tables cover the computed tokens."""
    check_pool(running.pool, (sequence.block_ids for sequence in running))
    layout = running.pool.layout
    content: dict[int, tuple[int, bytes]] = {}
    for sequence in running:
        num_held = len(sequence.block_ids) - sequence.block_ids.count(NULL_BLOCK)
        num_tokens = layout.num_tokens_in(sequence.block_ids)
        assert sequence.num_computed <= num_tokens and num_held <= layout.num_blocks(num_tokens), sequence
        for entry, block_id in enumerate(sequence.block_ids):
            if running.pool._blocks[block_id].num_users > 1:
                column, group = divmod(entry, layout.num_groups)
                held = (group, sequence.hash_blocks(layout.block_size)[column])
                assert content.setdefault(block_id, held) == held, f"block {block_id} is shared wrongly"


def _check_cache(cache: PrefixCache) -> None:
    """Check that hashes lead to their blocks."""
    for group, cached in enumerate(cache._cached):
        for block_hash, block in cached.items():
            assert (block.block_hash, block.group) == (block_hash, group), "a hash leads to another block"
    assert len(cache) == sum(block.block_hash is not None for block in cache._blocks)


def _check_line(line: TenantLine) -> None:
    """Check that there is a turn for each sequence, in order, and that nothing is kept of those that have left."""
    assert len(line.turns) == len(list(line)) and list(line.turns) == sorted(line.turns), "turns are wrong"
    assert all(line._by_priority.values()) and line._priorities == sorted(line._by_priority), "priorities are wrong"
    assert line.turns or line.num_running, f"tenant {line.tenant} has nothing here"
