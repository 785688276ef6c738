"""One sequence: its tokens, how many of them are computed, and when it ends.

position   0 ............ P-1 | P ...................... T-1 | T
token      prompt             | output                       | the next one to sample
KV pool    [0 ............. num_computed)
                                 P = num_prompt_tokens, T = num_tokens; a decode step feeds position T-1
"""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.engine_service.core.block_hash import extend_hashes, root_hash
from millrace.executor.wire.messages import NewSequence, RowSampling, SeqId

StopReason = Literal["stop", "length"]


class StopRules(msgspec.Struct, frozen=True, kw_only=True):
    """When a sequence ends by its tokens. Stop strings need text; `Generation` checks them."""

    max_tokens: int
    """Output tokens; already limited to what the context can hold."""
    min_tokens: int
    end_token_ids: frozenset[int]
    """EOS, unless the request ignores it, and the request's stop ids."""


class Sequence:
    """Owns the state of one sequence; everything else is derived from it."""

    __slots__ = (
        "seq_id",
        "prompt_token_ids",
        "output_token_ids",
        "sampling",
        "stop_rules",
        "num_computed",
        "block_ids",
        "block_hashes",
        "hash_root",
        "num_hit_blocks",
        "num_cached_tokens",
        "num_in_flight",
        "sampled_step",
        "crash_count",
        "is_known_to_workers",
    )

    def __init__(
        self,
        seq_id: SeqId,
        prompt_token_ids: list[int],
        sampling: RowSampling,
        stop_rules: StopRules,
        *,
        output_token_ids: list[int] | None = None,
        crash_count: int = 0,
        cache_salt: str = "",
    ) -> None:
        """`cache_salt`: only sequences with the same salt share cached blocks."""
        self.seq_id = seq_id
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids = output_token_ids or []
        """Of a resumed sequence: starts with what an earlier attempt has produced."""
        self.sampling = sampling
        self.stop_rules = stop_rules
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        """Of the first full blocks; see `hash_blocks`."""
        self.hash_root = root_hash(cache_salt)
        self.num_hit_blocks = 0
        """Blocks at the beginning of the table that the prefix cache had when the sequence was admitted last."""
        self.num_cached_tokens: int | None = None
        """Tokens that it had when the sequence was admitted first; None before that."""
        self.num_in_flight = 0
        """Steps in flight that the sequence is part of."""
        self.sampled_step: int | None = None
        """The step that sampled the last token; None while the workers know that token from `NewSequence`."""
        self.crash_count = crash_count
        """Losses of the workers, or of whole engines, since the last new token."""
        self.is_known_to_workers = False

    def __repr__(self) -> str:
        outputs = f"{len(self.output_token_ids)}/{self.stop_rules.max_tokens}"
        return (
            f"Sequence({self.seq_id}: {self.num_prompt_tokens} prompt, {outputs} output, {self.num_computed} computed)"
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose keys and values are not in the pool yet; 1 in a plain decode."""
        return self.num_tokens - self.num_computed

    def hash_blocks(self, block_size: int) -> list[bytes]:
        """Return the hashes of all blocks that the known tokens fill."""
        start, end = len(self.block_hashes) * block_size, self.num_tokens
        if end - start >= block_size:
            num_prompt = self.num_prompt_tokens
            outputs = self.output_token_ids[max(0, start - num_prompt) :]
            extend_hashes(self.block_hashes, self.hash_root, self.prompt_token_ids[start:] + outputs, block_size)
        return self.block_hashes

    def finish_reason(self) -> StopReason | None:
        """Return why the sequence has ended; None when it has not."""
        outputs, rules = self.output_token_ids, self.stop_rules
        if outputs and outputs[-1] in rules.end_token_ids and len(outputs) > rules.min_tokens:
            return "stop"
        if len(outputs) >= rules.max_tokens:
            return "length"
        return None

    def as_new(self) -> NewSequence:
        """Return the message that introduces this sequence to the workers, for the first time or again."""
        token_ids = self.prompt_token_ids + self.output_token_ids
        return NewSequence(self.seq_id, token_ids, self.num_prompt_tokens, self.sampling)

    # --- transitions ---

    def admit(self, hit_blocks: list[int], block_size: int) -> None:
        """Begin with these blocks, whose keys and values are in the pool."""
        self.block_ids = list(hit_blocks)
        self.num_hit_blocks = len(hit_blocks)
        self.num_computed = len(hit_blocks) * block_size
        if self.num_cached_tokens is None:
            self.num_cached_tokens = self.num_computed

    def schedule(self, num_tokens: int, new_blocks: list[int]) -> None:
        """Count `num_tokens` more as computed, by the next step, and append the blocks to the table."""
        self.num_computed += num_tokens
        self.block_ids.extend(new_blocks)
        self.is_known_to_workers = True

    def extend(self, token_ids: list[int], step_id: int) -> StopReason | None:
        """Append the tokens that a step sampled; those past the end are dropped. Return the reason if the sequence ended."""
        self.crash_count = 0
        self.sampled_step = step_id
        for token_id in token_ids:
            self.output_token_ids.append(token_id)
            reason = self.finish_reason()
            if reason is not None:
                return reason
        return None

    def reset(self) -> list[int]:
        """Discard the computed state but keep the tokens. Return the blocks, for the caller to free."""
        blocks, self.block_ids = self.block_ids, []
        self.num_computed = 0
        self.sampled_step = None
        self.is_known_to_workers = False
        return blocks
