"""One sequence: its tokens, how many of them are computed, and when it ends.

position   0 ............ P-1 | P ...................... T-1 | T
token      prompt             | output                       | pending, or the next one to sample
KV pool    [0 ............. num_computed)
                                 P = num_prompt_tokens, T = num_tokens; a decode step feeds position T-1

A token is pending while the step that samples it is in flight: it has a position, but only the workers know its id. With
run-ahead the next step already feeds it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.engine_service.core.block_hash import extend_hashes, root_hash
from millrace.executor.wire.messages import NewSequence, RowSampling, SeqId, record_bytes

StopReason = Literal["stop", "length"]


class StopRules(msgspec.Struct, frozen=True, kw_only=True):
    """When a sequence ends by its tokens. Stop strings need text; `Generation` checks them."""

    max_tokens: int
    """Output tokens; already limited to what the context can hold."""
    min_tokens: int
    end_token_ids: frozenset[int]
    """EOS, unless the request ignores it, and the request's stop ids."""


class StepClock:
    """Counts the steps of one micro-batch. Its members compute one token in each."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.last_step = 0
        """Id of the step planned last."""
        self.has_lost_members = False
        """Whether a member has left since this was last reset."""
        self.record_bytes = 0
        """Size of the log-probability records that the decode rows of all members return in one step."""


class Sequence:
    """Owns the state of one sequence; everything else is derived from it."""

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
        tenant: str = "",
        priority: int = 0,
    ) -> None:
        """`cache_salt`: only sequences with the same salt share cached blocks. `priority`: larger comes first."""
        self.seq_id = seq_id
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids = output_token_ids or []
        """In a resumed sequence these begin with the tokens of an earlier attempt."""
        self.sampling = sampling
        self.stop_rules = stop_rules
        self._num_computed = 0
        """With a clock: less the steps of the clock."""
        self._last_step = 0
        self.clock: StepClock | None = None
        """Set while each step of a micro-batch computes one token of this sequence."""
        self.due_at = 0
        """The number of steps of the clock at which the scheduler has to look at the sequence."""
        self.block_ids: list[int] = []
        """The block table, see `KVLayout`."""
        self.block_hashes: list[bytes] = []
        """Hashes of the first full blocks, see `hash_blocks`."""
        self.hash_root = root_hash(cache_salt)
        self.num_hit_columns = 0
        """Columns at the beginning of the table that the prefix cache had when the sequence was admitted last."""
        self.num_registered_columns = 0
        """Columns at the beginning of the table that the prefix cache has, as far as they were not there already."""
        self.num_waiting_blocks = 0
        """Blocks that the sequence was expected to need when it began to wait."""
        self.num_cached_tokens: int | None = None
        """Tokens that it had when the sequence was admitted first; None before that."""
        self.crash_count = crash_count
        """Losses of the workers, or of whole engines, since the last new token."""
        self.tenant = tenant
        self.priority = priority
        self.num_passed_over = 0
        """How often a younger one was chosen before it because of what is cached, admitted or not."""
        self.is_known_to_workers = False
        self.is_watched = False
        """Whether somebody reads the output while it grows."""
        self.is_followed = False
        """Whether each new token is reported, and not only the end."""
        self.has_ended = False
        """Whether the scheduler has dropped it. Tokens of steps in flight are not for it any more."""
        self.num_resumed = len(self.output_token_ids)
        """Output tokens of an earlier attempt."""
        self.logprobs: list[bytes] | None = None if sampling.logprobs is None else []
        """The records, see `record_bytes`, of the other output tokens. None: not wanted."""
        self.prompt_logprobs: bytearray | None = None if sampling.prompt_logprobs is None else bytearray()
        """The records of the prompt's first tokens, without the very first. None: not wanted."""

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
    def num_computed(self) -> int:
        """Tokens whose keys and values are in the pool once the steps in flight are through."""
        return self._num_computed if self.clock is None else self._num_computed + self.clock.num_steps

    @property
    def last_step(self) -> int:
        """Id of the last step that the sequence is part of; 0 before the first."""
        return self._last_step if self.clock is None else self.clock.last_step

    @property
    def num_pending(self) -> int:
        """Tokens that steps in flight sample."""
        return max(0, self.num_computed + 1 - self.num_tokens)

    @property
    def num_uncomputed(self) -> int:
        """Known or pending tokens that no step has fed yet; 1 in a plain decode."""
        return max(1, self.num_tokens - self.num_computed)

    @property
    def num_decode_rows_left(self) -> int:
        """How many more rows may yield a token, when all known tokens are computed."""
        return self.num_prompt_tokens + self.stop_rules.max_tokens - self.num_computed - 1

    @property
    def must_score_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are missing. Then all of it is computed, also where the pool has it."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_record_bytes

    @property
    def num_prompt_record_bytes(self) -> int:
        return (self.num_prompt_tokens - 1) * record_bytes(self.sampling.prompt_logprobs or 0)

    @property
    def has_records(self) -> bool:
        """Whether log-probabilities are wanted."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def _output_record_bytes(self) -> int:
        return 0 if self.sampling.logprobs is None else record_bytes(self.sampling.logprobs)

    def row_record_bytes(self, start: int, num_tokens: int) -> int:
        """Return the size of the log-probability records of a row that feeds these tokens."""
        num_bytes = self._output_record_bytes if start + num_tokens >= self.num_tokens else 0
        if self.sampling.prompt_logprobs is not None:
            num_scored = max(0, min(num_tokens, self.num_prompt_tokens - 1 - start))
            num_bytes += num_scored * record_bytes(self.sampling.prompt_logprobs)
        return num_bytes

    def hash_blocks(self, block_size: int) -> list[bytes]:
        """Return the hashes of all blocks that the known tokens fill."""
        start, end = len(self.block_hashes) * block_size, self.num_tokens
        if end - start >= block_size:
            extend_hashes(self.block_hashes, self.hash_root, self._tokens_from(start), block_size)
        return self.block_hashes

    def content(self, block_size: int) -> tuple[bytes, tuple[int, ...]]:
        """Return a value that only sequences with the same known tokens, and the same salt, have in common."""
        hashes = self.hash_blocks(block_size)
        parent = hashes[-1] if hashes else self.hash_root
        return parent, tuple(self._tokens_from(len(hashes) * block_size))

    def _tokens_from(self, start: int) -> list[int]:
        return self.prompt_token_ids[start:] + self.output_token_ids[max(0, start - self.num_prompt_tokens) :]

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

    def share_nothing(self) -> None:
        """From now on only the sequence itself finds its blocks, after a preemption."""
        self.hash_root, self.block_hashes = root_hash(f"sequence {self.seq_id}"), []

    def admit(self, hit_blocks: list[int], num_hit_tokens: int, block_size: int) -> None:
        """Begin with this table of tokens whose keys and values are in the pool."""
        self.block_ids = list(hit_blocks)
        self.num_hit_columns = self.num_registered_columns = num_hit_tokens // block_size
        self._num_computed = num_hit_tokens
        if self.num_cached_tokens is None:
            self.num_cached_tokens = self._num_computed

    def schedule(self, num_tokens: int, new_blocks: list[int], step_id: int) -> None:
        """Count `num_tokens` more as computed, by this step, and append the blocks to the table."""
        self._num_computed += num_tokens
        self._last_step = step_id
        self.block_ids.extend(new_blocks)
        self.is_known_to_workers = True

    def join_clock(self, clock: StepClock) -> None:
        """From now on each step of this clock computes one token."""
        self._num_computed -= clock.num_steps
        self.clock = clock
        clock.record_bytes += self._output_record_bytes

    def leave_clock(self) -> None:
        """Go on without a clock, if there is one."""
        clock = self.clock
        if clock is not None:
            self._num_computed, self._last_step = self.num_computed, clock.last_step
            self.clock = None
            clock.has_lost_members = True
            clock.record_bytes -= self._output_record_bytes

    def append(self, token_id: int) -> StopReason | None:
        """Append a sampled token. Return the reason if the sequence has ended."""
        self.crash_count = 0
        outputs, rules = self.output_token_ids, self.stop_rules
        outputs.append(token_id)
        if token_id in rules.end_token_ids or len(outputs) >= rules.max_tokens:
            return self.finish_reason()
        return None

    def keep_logprobs(self, record: bytes) -> None:
        """Keep the record of the token that `append` adds next. May be repeated before it does."""
        assert self.logprobs is not None
        del self.logprobs[len(self.output_token_ids) - self.num_resumed :]
        self.logprobs.append(record)

    def keep_prompt_logprobs(self, start: int, records: bytes) -> None:
        """Keep the records of the tokens behind those from position `start` on. May be repeated."""
        assert self.prompt_logprobs is not None
        offset = start * record_bytes(self.sampling.prompt_logprobs or 0)
        self.prompt_logprobs[offset : offset + len(records)] = records

    def reset(self) -> list[int]:
        """Discard the computed state but keep the tokens. Return the blocks, for the caller to free."""
        self.leave_clock()
        blocks, self.block_ids = self.block_ids, []
        self._num_computed = 0
        self.is_known_to_workers = False
        return blocks
