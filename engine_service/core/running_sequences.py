"""The running sequences and the blocks that they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from millrace.engine_service.core.block_pool import BlockPool
from millrace.engine_service.core.sequence import Sequence
from millrace.executor.wire.messages import NULL_BLOCK, SeqId


class RunningSequences:
    """Owns the running sequences, in the order of admission, and gives them the blocks of the pool.

    A running sequence is a member of a micro-batch, so it has a decode row in each of its steps, or it is ready for a row of
    another kind (a chunk of its prompt, or its first decode row after a pause), or its last row is in flight.
    """

    def __init__(self, pool: BlockPool, *, is_sharing: bool) -> None:
        """`is_sharing`: whether sequences that begin alike share blocks."""
        self.pool = pool
        self.is_sharing = is_sharing
        self._sequences: dict[SeqId, Sequence] = {}
        self.ready: dict[SeqId, Sequence] = {}
        """Those that wait for a row."""
        self.finished: list[SeqId] = []
        """Sequences that the next plan tells the workers to forget."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.seq_id) is sequence

    # --- admission ---

    def find_blocks(self, sequence: Sequence, longer_than: int = 0) -> list[int]:
        """Return the cached blocks that the sequence begins with, or maybe none if they are no more than `longer_than`. At
        least one token is left to compute."""
        if not self._is_caching or sequence.must_score_prompt:
            return []
        most = (sequence.num_tokens - 1) // self.pool.layout.block_size
        return self.pool.cache.find(sequence.hash_blocks(self.pool.layout.block_size)[:most], longer_than)

    def can_admit(self, sequence: Sequence, hit_blocks: list[int]) -> bool:
        """Whether its known tokens fit now, and one more, so that it is not preempted at once."""
        num_hits = len(hit_blocks) - hit_blocks.count(NULL_BLOCK)
        num_missing = self.pool.layout.num_blocks(sequence.num_tokens + 1) - num_hits
        return self.pool.can_allocate(num_missing + self.pool.num_free_among(hit_blocks))

    def admit(self, sequence: Sequence, hit_blocks: list[int]) -> set[int]:
        """Begin with cached blocks. Return those that the host tier had: the next step swaps them in."""
        table = self.pool.share(hit_blocks, sequence.block_hashes)
        self._add(sequence, table, self.pool.layout.num_tokens_in(table))
        return set(table) - set(hit_blocks)

    def fork(self, sequence: Sequence, source: Sequence) -> list[tuple[int, int]]:
        """Begin with the table of another sequence, which has computed the same tokens. Share its full blocks. Return
        (source, destination) of the block that is not full, by group: it has to be copied."""
        num_tokens, layout = sequence.num_tokens, self.pool.layout
        num_full = num_tokens // layout.block_size * layout.num_groups
        full, partial = source.block_ids[:num_full], source.block_ids[num_full:]
        copies = self.pool.allocate(len(partial))
        self._add(sequence, self.pool.share(full, sequence.block_hashes) + copies, num_tokens)
        return list(zip(partial, copies, strict=True))

    def _add(self, sequence: Sequence, table: list[int], num_hit_tokens: int) -> None:
        self._sequences[sequence.seq_id] = self.ready[sequence.seq_id] = sequence
        self.pool.cache.count_query(sequence.num_tokens, num_hit_tokens)
        sequence.admit(table, num_hit_tokens, self.pool.layout.block_size)

    # --- blocks ---

    @property
    def _is_caching(self) -> bool:
        return self.is_sharing or self.pool.host.num_blocks > 0

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many blocks the sequence needs for a row of `num_tokens`."""
        layout = self.pool.layout
        num_columns = layout.num_columns(sequence.num_computed + num_tokens)
        return num_columns * layout.num_groups - len(sequence.block_ids)

    def register_blocks(self, sequence: Sequence, num_tokens: int, registered: list[int]) -> None:
        """Cache the blocks that the first `num_tokens` fill, without pending tokens. Append those that were not cached
        before to `registered`."""
        block_size = self.pool.layout.block_size
        start, end = sequence.num_registered_columns, min(num_tokens, sequence.num_tokens) // block_size
        if self._is_caching and start < end:
            hashes = sequence.hash_blocks(block_size)
            registered += self.pool.cache.register(sequence.block_ids, hashes[start:end], start)
            sequence.num_registered_columns = end

    def choose_victim(self) -> Sequence:
        """Return the sequence to preempt: of the tenant with most blocks, then of the lowest priority, then the youngest."""
        blocks_of: Counter[str] = Counter()
        for sequence in self:
            blocks_of[sequence.tenant] += self.pool.layout.num_blocks(sequence.num_computed)
        return max(reversed(self), key=lambda each: (blocks_of[each.tenant], -each.priority))

    # --- the end ---

    def release(self, sequence: Sequence) -> None:
        """Remove a sequence, and free its blocks. It keeps its tokens."""
        del self._sequences[sequence.seq_id]
        self.ready.pop(sequence.seq_id, None)
        self.forget_at_workers(sequence)
        self.pool.free(sequence.reset())

    def forget_at_workers(self, sequence: Sequence) -> None:
        """Tell the workers with the next plan that the sequence has no more rows, as far as they know it."""
        if sequence.is_known_to_workers:
            sequence.is_known_to_workers = False
            self.finished.append(sequence.seq_id)

    def take_finished(self) -> list[SeqId]:
        finished, self.finished = self.finished, []
        return finished
