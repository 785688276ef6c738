"""How much more the engine can take: the budget of a claim."""

from __future__ import annotations

import threading

import msgspec

MAX_PREPARING_BEYOND_KV = 16
"""While the jobs that are being prepared would fill the KV pool, jobs are claimed until this many are being prepared. So the
large jobs of one tenant do not keep the others out, and one engine does not claim all large jobs of the queue."""


class ClaimBudget(msgspec.Struct, frozen=True):
    """What a claim may take now. A claimed job counts with all its candidates from then on."""

    max_jobs: int
    kv_token_budget: int


class Capacity:
    """Counts the candidates of the open jobs, and the free KV tokens. The intake adds jobs, the engine loop removes them."""

    def __init__(self, max_open: int, capacity_tokens: int) -> None:
        self._max_open = max_open
        self._changed = threading.Condition()
        self._num_open = 0
        self._num_alone = 0
        self._is_shut = False
        self._free_tokens = capacity_tokens
        self._tokens_on_the_way = 0
        """Cost of the jobs that the engine loop has not taken yet."""
        self._num_preparing = self._tokens_preparing = 0
        """Those of them that are being prepared, and their cost."""
        self._has_changed = False
        """Since the last budget."""

    # --- intake ---

    def wait_for_budget(self, timeout_s: float) -> ClaimBudget | None:
        """Wait until something fits and return how much. None: timed out."""
        with self._changed:
            has_capacity = self._changed.wait_for(self._has_capacity, timeout_s)
            self._has_changed = False
            return self._budget() if has_capacity else None

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait for a change since the last budget, or until the timeout. For jobs that did not fit that budget."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_changed, timeout_s)

    def open(self, cost_tokens: int, num_candidates: int = 1, *, is_alone: bool, is_slow: bool = False) -> None:
        """Count a claimed job, which the engine loop has not taken yet. A slow one is prepared until `end_preparation`."""
        with self._changed:
            self._num_open += num_candidates
            self._num_alone += is_alone
            self._tokens_on_the_way += cost_tokens
            if is_slow:
                self._num_preparing += 1
                self._tokens_preparing += cost_tokens

    # --- engine loop ---

    @property
    def is_shut(self) -> bool:
        """Whether no job may be claimed, however much is free."""
        return self._is_shut

    def shut(self, is_shut: bool) -> None:
        """Stop claims before the engine sleeps, or allow them again. A claim under way may still return jobs."""
        with self._changed:
            self._is_shut = is_shut
            self._notify()

    def end_preparation(self, cost_tokens: int) -> None:
        """Count a slow job as prepared, or as withdrawn before that."""
        with self._changed:
            self._num_preparing -= 1
            self._tokens_preparing -= cost_tokens
            self._notify()

    def arrive(self, cost_tokens: int) -> None:
        """Count a job as taken by the engine loop: from now on `update` includes its tokens."""
        with self._changed:
            self._tokens_on_the_way -= cost_tokens

    def close(self, num_candidates: int = 1, *, is_alone: bool) -> None:
        """Count a job as ended."""
        with self._changed:
            self._num_open -= num_candidates
            self._num_alone -= is_alone
            self._notify()

    def update(self, free_tokens: int) -> None:
        """Set the KV tokens that neither running nor waiting sequences need; after each step."""
        if free_tokens == self._free_tokens:
            return
        with self._changed:
            self._free_tokens = free_tokens
            if self._has_capacity():
                self._notify()

    def _notify(self) -> None:
        self._has_changed = True
        self._changed.notify_all()

    def _has_capacity(self) -> bool:
        if self._num_alone or self._is_shut:  # no other job may run beside a job that runs alone
            return False
        if self._num_open == 0:
            return True
        budget = self._budget()
        return budget.max_jobs > 0 and budget.kv_token_budget > 0

    def _budget(self) -> ClaimBudget:
        max_jobs, tokens = self._max_open - self._num_open, self._free_tokens - self._tokens_on_the_way
        if tokens <= 0 and self._num_preparing:
            max_jobs = min(max_jobs, MAX_PREPARING_BEYOND_KV - self._num_preparing)
            tokens += self._tokens_preparing
        return ClaimBudget(max_jobs, tokens)
