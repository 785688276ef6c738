"""How much more the engine can take: what the intake may claim."""

from __future__ import annotations

import threading

import msgspec


class ClaimBudget(msgspec.Struct, frozen=True):
    """What fits now."""

    max_jobs: int
    kv_token_budget: int


class Capacity:
    """Counts the open jobs and the free KV tokens. Shared by the intake, which fills it, and the engine loop, which
    empties it."""

    def __init__(self, max_open_jobs: int, capacity_tokens: int) -> None:
        self._max_open_jobs = max_open_jobs
        self._changed = threading.Condition()
        self._num_open = 0
        self._num_alone = 0
        self._is_shut = False
        self._free_tokens = capacity_tokens
        self._tokens_on_the_way = 0

    def __repr__(self) -> str:
        return f"Capacity({self._num_open} of {self._max_open_jobs} jobs open, {self._free_tokens} KV tokens free)"

    # --- intake ---

    def wait_for_budget(self, timeout_s: float) -> ClaimBudget | None:
        """What fits, as soon as something does; None when nothing does within the time."""
        with self._changed:
            self._changed.wait_for(self._has_capacity, timeout_s)
            if not self._has_capacity():
                return None
            return ClaimBudget(self._max_open_jobs - self._num_open, self._free_tokens - self._tokens_on_the_way)

    def wait_for_change(self, timeout_s: float) -> None:
        """Until a job has ended, or the time is up: what is ready did not fit the last budget."""
        with self._changed:
            self._changed.wait(timeout_s)

    def open(self, cost_tokens: int, *, is_alone: bool) -> None:
        """A job has been claimed and is on its way to the engine loop."""
        with self._changed:
            self._num_open += 1
            self._num_alone += is_alone
            self._tokens_on_the_way += cost_tokens

    # --- engine loop ---

    @property
    def is_shut(self) -> bool:
        """Whether nothing is taken in, however much fits."""
        return self._is_shut

    def shut(self, is_shut: bool) -> None:
        """The engine falls asleep, or is awake again. A claim that is under way may still bring jobs."""
        with self._changed:
            self._is_shut = is_shut
            self._changed.notify_all()

    def arrive(self, cost_tokens: int) -> None:
        """The engine loop has taken a job in: from now on its tokens are in `update`."""
        with self._changed:
            self._tokens_on_the_way -= cost_tokens

    def close(self, *, is_alone: bool) -> None:
        """A job has ended, one way or another."""
        with self._changed:
            self._num_open -= 1
            self._num_alone -= is_alone
            self._changed.notify_all()

    def update(self, free_tokens: int) -> None:
        """After each step: KV tokens that neither running nor waiting sequences need now."""
        if free_tokens == self._free_tokens:
            return
        with self._changed:
            self._free_tokens = free_tokens
            if self._has_capacity():
                self._changed.notify_all()

    def _has_capacity(self) -> bool:
        """A job that runs alone, because engines have died with it, keeps others out until it is over."""
        if self._num_alone or self._is_shut:
            return False
        if self._num_open == 0:
            return True
        return self._num_open < self._max_open_jobs and self._free_tokens > self._tokens_on_the_way
