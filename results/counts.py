"""What readers get about a queue, a batch, a job's place, and rejected inbox entries."""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.results.messages import JobError

Obstacle = Literal["never_served", "no_engine", "paused", "asleep"]
"""Why no job of a queue begins."""


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one queue."""

    queued: int
    delayed: int
    running: int
    engines: int
    finished: int
    failed: int
    cancelled: int
    expired: int
    generated_tokens: int
    stale_writes: int = 0
    """Writes that were refused, because the job had another lease by then."""
    waiting_tokens: int = 0
    """Expected tokens of the queued and the delayed jobs."""
    oldest_queued_ms: int = 0
    """Age of the oldest queued job. 0 if there is none."""
    is_paused: bool = False
    sleep_levels: dict[str, int] = {}
    """By engine id: 0 awake, 1 asleep with the weights in host memory, 2 asleep without the weights."""
    was_served: bool = True
    """False if no engine has ever served the queue: its name may be mistyped."""
    rejected: int = 0
    """Inbox entries that could not become a job; `list_rejected` returns the last ones."""
    inbox: int = 0
    """Inbox entries that no engine has accepted or rejected yet. They are no jobs before that."""
    models: dict[str, str] = {}
    """By engine id: the name of the model that it serves. Jobs that name no model go to any engine."""

    @property
    def obstacle(self) -> Obstacle | None:
        """Why no job can start now. None if engines claim jobs."""
        if not self.engines:
            return "no_engine" if self.was_served else "never_served"
        if self.is_paused:
            return "paused"
        return "asleep" if all(self.sleep_levels.values()) else None

    def obstacle_of(self, state: str) -> Obstacle | None:
        """Return why a job in this state does not end. Only the lack of engines keeps a running job from it."""
        is_stuck = state in ("queued", "delayed") or (state == "running" and not self.engines)
        return self.obstacle if is_stuck else None


class RejectedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An inbox entry that could not become a job, not even a failed one."""

    rejected_ms: int
    """When it was rejected, server time in ms since the epoch."""
    id: str | None
    """The id in the entry, if it belongs to another job."""
    error: JobError
    raw: str
    """The beginning of the entry."""


class TenantStats(msgspec.Struct, frozen=True, kw_only=True):
    """What of a tenant's waits: queued and delayed jobs, which its limits count."""

    waiting_jobs: int
    waiting_tokens: int
    """Their cost: prompt tokens, as known when they were submitted, and the most output tokens."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate of when a job starts. Fair share and new jobs change it."""

    state: str
    num_ahead: int | None
    """Jobs that are likely to begin before it; None unless it is queued, and where `needs_model`."""
    eta_s: float | None
    """Seconds until it begins, at the pace of the last completions while jobs waited; None without any."""
    needs_model: bool = False
    """Whether it waits for an engine with the model that generated the output that readers have seen."""


class BatchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one batch, by state."""

    batch: str
    created_ms: int
    queued: int
    delayed: int
    running: int
    finished: int
    failed: int
    cancelled: int
    expired: int
    eta_s: float | None
    """Seconds until all have ended, at the pace of the last completions while jobs waited; None without any."""
    redriven: int = 0
    """Those of the failed, cancelled and expired jobs that were run again. Their redrives are counted too."""

    @property
    def total(self) -> int:
        return self.num_open + self.finished + self.failed + self.cancelled + self.expired

    @property
    def num_open(self) -> int:
        return self.queued + self.delayed + self.running

    @property
    def is_done(self) -> bool:
        return self.num_open == 0
