"""What crosses the border of the job record: states, claims, events, and the job as a reader sees it.

Standard library and msgspec only. A job's body stays raw JSON bytes here; what is in it is the producer's business.

Offsets count output tokens from 0. An event covers the half-open range [offset, offset + len(token_ids)) and its text
is exactly what those tokens added; the events of a job cover its output without gap or overlap.
"""

from __future__ import annotations

from typing import Any, Literal, NewType, get_args

import msgspec

JobId = NewType("JobId", str)
EngineId = NewType("EngineId", str)
"""One incarnation of an engine service: a restarted engine is another one."""
Lease = NewType("Lease", int)
"""Fencing token of one claim of one job: grows with every claim, and a write that carries an old one is refused."""

PROTOCOL = 1
"""The version that `docs/protocol.md` describes; a record carries its own."""
DEFAULT_RETRIES = 2

EndState = Literal["finished", "failed", "cancelled", "expired"]
TERMINAL_STATES: frozenset[str] = frozenset(get_args(EndState))

EndReason = Literal["stop", "length", "error", "cancelled", "expired"]


class JobError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a job failed, in one sentence for a person and one word for a program."""

    kind: str
    """"invalid_request", "model_mismatch", "fingerprint_mismatch", "crashed", "nan_logits" or "internal"."""
    message: str
    field: str | None = None
    """The request's field that is at fault, where there is one."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int


# --- engine side ---------------------------------------------------------------------------------------------------


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One job on its way in: the body and what the queue has to know about it."""

    job_id: JobId
    body: bytes
    """The request as JSON, in its canonical form."""
    digest: str
    """SHA-256 of the canonical body, hexadecimal: the same id with the same digest is the same job."""
    cost: int
    """Estimated tokens, for fair share and the claim budget."""
    seed: int
    tenant: str = "default"
    priority: int = 0
    is_streamed: bool = False
    delay_ms: int = 0
    run_at_ms: int | None = None
    """Not before, in ms since the epoch; a time in the past is now. Goes before `delay_ms`."""
    deadline_ms: int | None = None
    """Counted from the submission: the job expires then, whatever it is doing."""
    max_retries: int | None = None
    """Failures that may pass after which it is tried again; None: DEFAULT_RETRIES."""
    meta: bytes | None = None
    """A JSON object that readers get back as it is."""
    batch: str | None = None


class ClaimedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job that an engine now owns, with the progress that an earlier attempt left."""

    job_id: JobId
    lease: Lease
    attempt: int
    body: bytes
    seed: int
    cost: int
    crash_count: int
    """Engines that died with this job since it last made progress. From 2 on it has to run alone."""
    token_ids: list[int]
    """The checkpoint: output tokens that survive."""
    num_published: int
    """Output tokens that readers have seen, in events; never more than the checkpoint holds."""
    is_watched: bool
    """Someone reads live: publish as it comes."""
    created_ms: int
    protocol: int = PROTOCOL
    """The version of the record. One that is newer than PROTOCOL is released, with a delay, for a newer engine."""
    tenant: str = "default"
    corruption: str | None = None
    """What is wrong with a record that somebody has changed so that it cannot be run: the job has to fail with that."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    jobs: list[ClaimedJob]
    num_ready: int
    """Jobs still ready after this claim, so that a caller with room knows whether to ask again."""
    num_set_aside: int
    """Jobs in front that nobody can run now, after their deadline or of another model. A claim that brings nothing else has
    not seen what is behind them."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of output that becomes visible: text is exactly what the token ids add."""

    offset: int
    token_ids: list[int]
    text: str


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint `token_ids` at `offset`, and show `event` when there is one. Idempotent: known tokens are skipped."""

    job_id: JobId
    lease: Lease
    offset: int
    token_ids: list[int]
    fingerprint: str
    event: Event | None = None


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """The engine begins to compute a job that runs alone: from here on its death counts against the job. Idempotent."""

    job_id: JobId
    lease: Lease


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """End the job: the last event (what was not yet shown), then the terminal entry.

    A failure with `is_retryable` ends the job only when its retries are used up. Before that the answer is "retrying": the
    job keeps its checkpoint and waits for its next attempt, and what `event` would have shown stays unseen.
    """

    job_id: JobId
    lease: Lease
    state: EndState
    finish_reason: EndReason
    usage: Usage
    event: Event | None = None
    error: JobError | None = None
    is_retryable: bool = False


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Give the job back with its tokens so far; the attempt does not count."""

    job_id: JobId
    lease: Lease
    offset: int
    token_ids: list[int]
    fingerprint: str
    delay_ms: int = 0


Write = Append | Begin | Finish | Release


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """What a heartbeat found out about the leases that the engine thinks it holds."""

    lost: list[JobId]
    """Held by the engine, but no longer its own: drop them, write nothing."""
    cancelled: list[JobId]
    """Somebody asked to cancel them."""
    watched: list[JobId]
    """Somebody reads them live."""
    expired: list[JobId] = []
    """Their deadline has passed: end them as expired."""
    sleep_level: int = 0
    """How the engine shall sleep: 0 (not at all), 1 or 2."""
    next_lapse_ms: int = 2**31
    """When the next engine counts as dead, if it is silent until then."""


SignalKind = Literal["cancel", "watch", "expire"]


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """A word to the engine that runs a job, faster than its next heartbeat."""

    kind: SignalKind
    job_id: JobId


class InboxEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the open door, unread."""

    entry_id: str
    """Where to read on, and what `accept` and `reject` take."""
    raw: bytes
    """The field `job`; empty when the entry has none."""


# --- reader side ---------------------------------------------------------------------------------------------------


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a job's visible life, as `stream()` yields it."""

    id: str
    """Where a reader can resume: `stream(job_id, after=event.id)`."""
    offset: int
    token_ids: list[int]
    text: str
    """What this event adds; the texts of all events join to `Job.text`. The terminal event adds none."""
    state: str | None = None
    """Set on the terminal event: finished, failed, cancelled or expired."""
    is_restart: bool = False
    """Set when what came after `after` has been trimmed from the stream: this event starts over from offset 0, and what
    was read before it is to be thrown away."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Server times in milliseconds since the epoch; None until it happened, or where there is none."""

    created_ms: int
    started_ms: int | None = None
    ended_ms: int | None = None
    due_ms: int | None = None
    """Of a delayed job: when it can begin."""
    deadline_ms: int | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job as a reader sees it now."""

    id: str
    state: str
    text: str
    token_ids: list[int]
    finish_reason: str | None
    usage: Usage | None
    error: JobError | None
    timings: Timings
    attempt: int = 0
    num_retries: int = 0
    """How often a failure that may pass has been tried again."""
    meta: dict[str, Any] | None = None
    batch: str | None = None
    redrive_of: str | None = None
    """The job that this one runs again."""
    redriven_as: str | None = None
    """The job that runs this one again."""
    has_result: bool = True
    """False once the result's time is over while the record is still kept: the text is gone, not empty."""

    @property
    def is_done(self) -> bool:
        """Whether the record is terminal: nothing about it will change any more."""
        return self.state in TERMINAL_STATES


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
    """Writes refused because the job was no longer the writer's."""
    waiting_tokens: int = 0
    """What the queued and the delayed jobs are expected to take."""
    is_paused: bool = False
    sleep_levels: dict[str, int] = {}
    """By the id of each engine alive: 0 awake, 1 asleep with its weights in host memory, 2 without them."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job stands in its queue, as far as one can tell: fair share and new work change it."""

    state: str
    num_ahead: int | None
    """Jobs that are likely to begin before it; None unless it is queued."""
    eta_s: float | None
    """Seconds until it begins, at the pace of the last completions; None where nothing has ended lately."""


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
    """Seconds until all has ended, at the pace of the last completions; None where nothing has ended lately."""

    @property
    def total(self) -> int:
        return self.num_open + self.finished + self.failed + self.cancelled + self.expired

    @property
    def num_open(self) -> int:
        return self.queued + self.delayed + self.running

    @property
    def is_done(self) -> bool:
        return self.num_open == 0
